"""What the tests hold in place of a program's objects: the object is in the other process, only plain data comes here.

A stand-in has a class made from what the program says of its own, with the special methods that this has; each is sent
to the program, as calls are. What the program's objects decide about values of the tests is never asked, since they
could equal everything, or give 0 less any number: such tests have no verdict, see `Unjudged`.
"""

from __future__ import annotations

import builtins
import sys

from .classes import builtin_name
from .describe import COMPARISONS, SPECIALS
from .plain import no_handle

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Untrusted(BaseException):
    """The other process has answered nonsense, or is gone. No test can catch it with `except Exception`."""


class Unjudged(BaseException):
    """The tests do what two processes cannot do as one would; this says nothing about the program.

    `Link.unjudged` keeps the first reason, as tests may catch it.
    """


def require(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise Untrusted(f"the program's answer is invalid: {type(value).__name__} in place of {kind.__name__}")
    return value


class Remote:
    """An object of the program that is not plain data."""

    __slots__ = ("_remote",)

    def __init__(self, link: Any, number: int):
        object.__setattr__(self, "_remote", (link, number))

    def __getattr__(self, name: str) -> Any:
        return self._remote[0].request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote[0].request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._remote[0].request("delattr", self, name)

    def __str__(self) -> str:
        return require(str, self._remote[0].request("special", self, "__str__"))

    def __repr__(self) -> str:
        return require(str, self._remote[0].request("special", self, "__repr__"))

    def __format__(self, form: str) -> str:
        return require(str, self._remote[0].request("special", self, "__format__", form))

    def __dir__(self) -> Any:
        return self._remote[0].request("special", self, "__dir__")

    def __mro_entries__(self, bases: Any) -> Any:
        raise self._remote[0].no_verdict("the tests derive a class from one of the program")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._remote[0].no_verdict(f"the tests copy a {type(self).__name__} of the program")


_RESULTS = {"__len__": int, "__bool__": bool, "__hash__": int, "__int__": int, "__float__": float, "__index__": int}
_BUILTIN_CLASSES = {
    "function": type(no_handle),
    "generator": type(character for character in ""),
    "builtin_function_or_method": type(len),
    **{one.__name__: one for one in (type, map, filter, zip, enumerate, reversed)},
}
_DECIDES = {*COMPARISONS, *SPECIALS[: SPECIALS.index("__neg__")]}
"""Methods by which a program's object may decide about a value of the tests."""


def object_class(kinds: list[type], name: str, specials: list[str], narrow: list[str], builtin: str) -> type:
    """The class of remote objects of a class of the program, by its description."""
    body: dict[str, Any] = {}
    for one in (one for one in specials if one in SPECIALS and one not in vars(Remote)):
        if one == "__contains__" and one in narrow:
            continue  # by iteration
        body[one] = _between_objects(one, one in narrow) if one in _DECIDES else _special(one)
    if "__call__" in body:
        body["__call__"] = _called
    if "__eq__" in body:
        body.setdefault("__hash__", None)
    for one in {"__exit__", "__aexit__"} & body.keys():
        body[one] = _left_asynchronously if one == "__aexit__" else _left
    if builtin == "type":
        body = {"__eq__": _is_class, "__hash__": object.__hash__, "__getitem__": _of_generic, **body}
        body["__instancecheck__"] = _has_instance
    if "__await__" in body:
        body |= {"__await__": _await_remotely, "send": _result_of, "throw": _ended, "close": lambda self: None}
    body["__doc__"] = property(lambda self: self._remote[0].request("getattr", self, "__doc__"))
    if builtin in _BUILTIN_CLASSES:
        body["__class__"] = property(lambda self: _BUILTIN_CLASSES[builtin])
    return type(require(str, name), (Remote,), {**body, "__slots__": (), "_remote_kind": len(kinds)})


def _called(self: Any, *positional: Any, **named: Any) -> Any:
    return self._remote[0].request("call", self, positional, named)


def _special(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any) -> Any:
        found = self._remote[0].request("special", self, name, *arguments)
        return found if name not in _RESULTS else require(_RESULTS[name], found)

    return method


def _between_objects(name: str, narrow: bool) -> Callable[..., Any]:
    """A method that asks the program about two of its objects; a `narrow` one knows no others."""

    def method(self: Any, other: Any, *more: Any) -> Any:
        link = self._remote[0]
        if isinstance(other, Remote) and name in ("__eq__", "__ne__"):
            answers = link.request("equal", self, other)  # the program does not learn which of the two is wanted
            if answers not in ((True, False), (False, True)):
                raise link.no_verdict(
                    f"a {type(self).__name__} of the program equals another and does not, or neither"
                )
            return answers[name == "__ne__"]
        if isinstance(other, Remote):
            return link.request("special", self, name, other, *more)
        if narrow:
            return NotImplemented
        kinds = f"the program's {type(self).__name__}", f"{type(other).__name__} of the tests"
        raise link.no_verdict(f"{name} of {kinds[0]} would decide about a {kinds[1]}")

    return method


def _left(self: Any, kind: Any, error: Any, trace: Any) -> bool:
    """The end of a `with` statement."""
    try:
        answer = self._remote[0].request("special", self, "__exit__", *_sendable(kind, error), None)
    except BaseException as raised:
        answer = raised
    return _goes_on(self, error, answer)


async def _left_asynchronously(self: Any, kind: Any, error: Any, trace: Any) -> bool:
    try:
        answer = await self._remote[0].request("special", self, "__aexit__", *_sendable(kind, error), None)
    except BaseException as raised:
        answer = raised
    return _goes_on(self, error, answer)


def _sendable(kind: Any, error: Any) -> tuple[Any, Any]:
    return (kind, error) if error is None or builtin_name(kind) or "_remote" in vars(error) else (Exception, None)


def _goes_on(self: Any, error: Any, answer: Any) -> bool:
    """False: a program that suppresses or replaces exceptions could do so with failures of the tests."""
    if error is not None and answer and not isinstance(answer, (Untrusted, Unjudged)):
        raise self._remote[0].no_verdict(f"a {type(self).__name__} of the program handles a {type(error).__name__}")
    if isinstance(answer, BaseException):
        raise answer
    return False


def _has_instance(self: Any, value: Any) -> bool:
    """Whether a value is an object of a remote class."""
    link = self._remote[0]
    if isinstance(value, Remote):
        return bool(require(bool, link.request("special", self, "__instancecheck__", value)))
    if require(bool, link.request("plain base", self)):
        raise link.no_verdict("the tests ask for the class of an object of the program that came as plain data")
    return False


def _of_generic(self: Any, parameters: Any) -> Any:
    """Of a remote class, such as ``Stack[int]``."""
    return self.__class_getitem__(parameters)


def _is_class(self: Any, other: Any) -> bool:
    """Of a remote class: also equal to what `type` gives of its objects here."""
    if isinstance(other, type) and issubclass(other, Remote):
        return bool(require(bool, self._remote[0].request("is_kind", self, vars(other)["_remote_kind"])))
    return self is other


def _await_remotely(self: Any) -> Any:
    yield from ()  # so that this is a generator, which ends with the result
    return self._remote[0].request("wait", self)


def _result_of(self: Any, value: Any) -> Any:
    """The only step of a remote coroutine, which runs to its end in the program's process."""
    raise StopIteration(self._remote[0].request("wait", self))


def _ended(self: Any, *error: Any) -> Any:
    raise self._remote[0].no_verdict("the tests throw into a coroutine of the program")


def exception_class(kinds: list[type], name: str, bases: list[Any], module: str) -> type:
    """The class that stands for a program's class of exceptions: one that the tests can catch and raise."""
    top = sys.modules.get(module) if module.partition(".")[0] in sys.stdlib_module_names else None
    known = getattr(top, name, None)
    if isinstance(known, type) and issubclass(known, Exception) and _is_harmless(known):
        return known
    found = tuple(kinds[base] if isinstance(base, int) else getattr(builtins, require(str, base)) for base in bases)
    if not all(issubclass(base, BaseException) for base in found):
        raise ValueError(f"{bases} are no classes of exceptions")
    body = {
        "__init__": _made_by_tests,
        "__getattr__": _error_attribute,
        "__str__": _error_text,
        "__module__": __name__,
        "_remote_class": None,
    }
    return type(require(str, name).rpartition(".")[2], found, body)


def _is_harmless(kind: type[Exception]) -> bool:
    """Whether tests that catch it catch none of their own failures, and `unittest` runs as it would."""
    return not issubclass(AssertionError, kind) and kind.__module__.partition(".")[0] != "unittest"


def _made_by_tests(self: Any, *arguments: Any, **named: Any) -> None:
    if named:
        raise _made_here(self)
    BaseException.__init__(self, *arguments)


def _made_here(error: Any) -> Unjudged:
    kind = type(error)
    verdict: Unjudged = kind._remote_class[0].no_verdict(f"the tests make a {kind.__name__} of the program")
    return verdict


def _error_attribute(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if "_remote" not in vars(self):
        raise _made_here(self)
    return self._remote[0].request("getattr", self, name)


def _error_text(self: Any) -> str:
    own = vars(self).get("_remote_text")
    return own if isinstance(own, str) else BaseException.__str__(self)


def new_exception(kind: Any, link: Any, number: int) -> Any:
    error = kind.__new__(kind)
    error._remote = (link, number)
    return error
