"""The tests' side of a program in another process: requests, answers, remote objects, and a hash of answers.

The program's objects stay in its process, only plain data comes here.

A remote object has a class made from the program's description of the object's class, with its special methods; each
is sent to the program, as calls are. Decisions of the program's objects about values of the tests are never asked for,
since they could equal everything, or give 0 less any number: such tests have no verdict, see `Unjudged`.
"""

from __future__ import annotations

import _thread
import builtins
import sys

from .plain import (
    ALL_NAMES,
    COMPARISONS,
    SPECIALS,
    VALUE_TYPES,
    builtin_name,
    dumps,
    loads,
    mutable_parts,
    no_handle,
    refill,
    value_type,
)

TYPE_CHECKING = False  # importing `typing` takes longer than most programs

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def canonical(value: Any) -> str:
    """Return a text that equal values of `loads` share: 1, 1.0 and True, a list's items, a set's in any order.

    An object of the program is ``object``: to ask it for anything would run the program. The program chooses the name
    of its class, so only names of classes in the standard library's modules count.
    """
    kind = type(value)
    name = kind.__name__ if kind.__module__ in ("builtins", "collections") else ""
    if name in ("int", "bool", "float"):
        return hex(int(value)) if kind is not float or value.is_integer() else repr(value)
    if name == "str":  # without addresses, as in ``<generator object f at 0x7f01>``, which differ between runs
        first, *parts = value.split(" at 0x")
        return repr(" at 0x".join([first, *(part.lstrip("0123456789abcdef") for part in parts)]))
    if name in ("NoneType", "complex"):
        return repr(value)
    if name in ("bytes", "bytearray"):
        return repr(bytes(value))
    if name in ("set", "frozenset", "dict_keys", "dict_items"):
        return f"set({','.join(sorted(map(canonical, value)))})"
    if name in ("dict", "OrderedDict", "defaultdict", "Counter"):
        return f"dict({','.join(sorted(map(canonical, value.items())))})"
    if isinstance(value, tuple) or name in ("list", "deque", "dict_values"):  # named tuples too
        return f"{'tuple' if isinstance(value, tuple) else name}({','.join(map(canonical, value))})"
    if name == "range":
        return f"range{canonical([value.start, value.stop, value.step])}"
    if of_library := value_type(kind):
        return f"{of_library}{canonical(VALUE_TYPES[of_library][1](value))}"
    return f"builtin {builtin_name(value)}" if builtin_name(value) else "object"


class Untrusted(BaseException):
    """An answer of the program's process is invalid, or missing. No test can catch it with `except Exception`."""


class Unjudged(BaseException):
    """The tests need one process for themselves and the program. `Link.unjudged` keeps it, as tests may catch it."""


def require(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise Untrusted(f"the program's answer is invalid: {type(value).__name__} in place of {kind.__name__}")
    return value


_RESULTS = {
    **{"__len__": int, "__bool__": bool, "__hash__": int, "__int__": int, "__float__": float, "__index__": int},
    **dict.fromkeys(("__str__", "__repr__", "__format__"), str),
}


def _special(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any) -> Any:
        return require(_RESULTS.get(name, object), self._remote[0].request("special", self, name, *arguments))

    return method


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

    __str__, __repr__, __format__, __dir__ = map(_special, ("__str__", "__repr__", "__format__", "__dir__"))

    def __mro_entries__(self, bases: Any) -> Any:
        raise self._remote[0].no_verdict("the tests derive a class from one of the program")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._remote[0].no_verdict(f"the tests copy a {type(self).__name__} of the program")


_BUILTIN_CLASSES = {
    "function": type(no_handle),
    "generator": type(character for character in ""),
    "builtin_function_or_method": type(len),
    **{one.__name__: one for one in (type, map, filter, zip, enumerate, reversed)},
}
_DECIDES = {*COMPARISONS, *SPECIALS[: SPECIALS.index("__neg__")]}
"""Methods by which a program's object may decide about a value of the tests."""


def object_class(kinds: list[type], name: str, specials: list[str], narrow: list[str], builtin: str) -> type:
    """Make the class of remote objects of a class of the program, by its description."""
    body: dict[str, Any] = {}
    for one in (one for one in specials if one in SPECIALS and one not in vars(Remote)):
        if one == "__contains__" and one in narrow:
            continue  # by iteration
        body[one] = _between_objects(one, one in narrow) if one in _DECIDES else _special(one)
    if "__call__" in body:
        body["__call__"] = lambda self, *positional, **named: self._remote[0].request("call", self, positional, named)
    if "__eq__" in body:
        body.setdefault("__hash__", None)
    for one in {"__exit__", "__aexit__"} & body.keys():
        body[one] = _left_asynchronously if one == "__aexit__" else _left
    if builtin == "type":
        body = {"__eq__": _is_class, "__hash__": object.__hash__, **body}
        body.setdefault("__getitem__", lambda self, parameters: self.__class_getitem__(parameters))
        body["__instancecheck__"] = _has_instance
    if "__await__" in body:  # a coroutine runs to its end in the program's process, in one step
        body |= {"__await__": _await_remotely, "send": _result_of, "throw": _ended, "close": lambda self: None}
    body["__doc__"] = property(lambda self: self._remote[0].request("getattr", self, "__doc__"))
    if builtin in _BUILTIN_CLASSES:
        body["__class__"] = property(lambda self: _BUILTIN_CLASSES[builtin])
    return type(require(str, name), (Remote,), {**body, "__slots__": (), "_remote_kind": len(kinds)})


def _between_objects(name: str, narrow: bool) -> Callable[..., Any]:
    """Make a method that asks the program about two of its objects; a `narrow` one accepts no others."""

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
    """Refuse to let a program suppress or replace exceptions: they could be failures of the tests."""
    if error is not None and answer and not isinstance(answer, (Untrusted, Unjudged)):
        raise self._remote[0].no_verdict(f"a {type(self).__name__} of the program handles a {type(error).__name__}")
    if isinstance(answer, BaseException):
        raise answer
    return False


def _has_instance(self: Any, value: Any) -> bool:
    link = self._remote[0]
    if isinstance(value, Remote):
        return bool(require(bool, link.request("special", self, "__instancecheck__", value)))
    if require(bool, link.request("plain base", self)):
        raise link.no_verdict("the tests ask for the class of an object of the program that came as plain data")
    return False


def _is_class(self: Any, other: Any) -> bool:
    """Compare remote classes: one equals itself, and the `type` of its objects here."""
    if isinstance(other, type) and issubclass(other, Remote):
        return bool(require(bool, self._remote[0].request("is_kind", self, vars(other)["_remote_kind"])))
    return self is other


def _await_remotely(self: Any) -> Any:
    yield from ()  # so that this is a generator, which ends with the result
    return self._remote[0].request("wait", self)


def _result_of(self: Any, value: Any) -> Any:
    raise StopIteration(self._remote[0].request("wait", self))


def _ended(self: Any, *error: Any) -> Any:
    raise self._remote[0].no_verdict("the tests throw into a coroutine of the program")


def exception_class(kinds: list[type], name: str, bases: list[Any], module: str) -> type:
    """Make the class that the tests catch and raise in the place of a program's class of exceptions."""
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
    """Whether tests that catch it catch none of the tests' failures, and `unittest` runs as it would."""
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
    text = vars(self).get("_remote_text")
    return text if isinstance(text, str) else BaseException.__str__(self)


class Link:
    """Sends requests to the program's process by `exchange`, which returns the answer, or nothing if there is none."""

    def __init__(self, exchange: Callable[[bytes], bytes]):
        self._exchange = exchange
        self._one_by_one = _thread.RLock()
        self.requests = 0  # that were sent
        self.unjudged = ""  # why the outcome of the tests is none
        self.instances = False  # whether there were remote objects besides functions and classes
        self.expects_stop = False  # whether the tests name StopIteration
        self.narrowed: set[str] = set()  # classes of the program whose objects came as plain data
        self.on_names: Callable[[str, Any], object] = lambda name, value: None  # is told changed variables
        self._objects: list[Any] = []  # by number
        self._kinds: list[type] = []  # by number
        self._answers: Any = None  # a hash of them, once there are any

    def request(self, operation: str, *operands: Any) -> Any:
        """The result of an operation, with the mutable operands as it left them.

        Raises:
            Exception: What the operation raised, of the same class where that is a builtin or the program's, else of
                the nearest builtin one. Or an operand is nested too deep.
            Unjudged: An operand is an object of the tests.
            Untrusted: There is no valid answer.
        """
        with self._one_by_one:  # tests may have threads
            return self._request(operation, *operands)

    def _request(self, operation: str, *operands: Any) -> Any:
        self.requests += 1
        asked = dumps([operation, *operands], self._number, ALL_NAMES)
        known = mutable_parts(list(operands))
        answer = self._exchange(asked)
        if not answer:
            raise Untrusted("the program ended during a call")
        try:
            objects, kinds, narrowed, changed, names, said, content = loads(answer)
            self._learn(objects, kinds, narrowed)
            for new in changed:
                position, inside = loads(new, self._objects.__getitem__, known=known)
                refill(known[position], inside)
            kind, result = loads(content, self._objects.__getitem__, known=known)
            raised = None if kind == "value" else self._error(*result)
            for name, value in zip(names[::2], names[1::2]):
                self.on_names(name, loads(value, self._objects.__getitem__))
            if said and sys.stdout is not sys.__stdout__:  # else no test reads it
                sys.stdout.write(said)
        except MemoryError:
            raise
        except Exception as invalid:
            raise Untrusted(f"the program's answer is invalid: {invalid}") from None
        if operation != "names":
            self._note(result if raised is None else raised, list(operands) if changed else None)
        if isinstance(raised, StopIteration) and operands[1:] != ("__next__",) and not self.expects_stop:
            raise self.no_verdict("the program raises StopIteration, which may end an iteration of the tests")
        if raised is not None:
            raise raised
        return result

    def no_verdict(self, reason: str) -> Unjudged:
        """Keep why the tests cannot be judged, and return the exception that says it."""
        self.unjudged = self.unjudged or reason
        return Unjudged(reason)

    def outputs(self) -> bytes:
        """Return a hash of the program's answers so far, see `canonical`; empty where it was asked for nothing."""
        return b"" if self._answers is None else self._answers.hexdigest().encode()

    def _note(self, outcome: Any, changed: Any) -> None:
        """Add an answer to the hash of all: the answers themselves could take the memory of the tests."""
        if self._answers is None:
            import hashlib  # takes milliseconds, and programs that do not load need none

            self._answers = hashlib.sha256()
        try:
            raised = isinstance(outcome, BaseException)
            text = f"raised {_builtin_base(type(outcome))}" if raised else canonical(outcome)
            text += f" changed {canonical(changed)}" if changed is not None else ""
        except RecursionError:  # an argument holds itself now
            text = "without end"
        self._answers.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def _learn(self, objects: list[int], kinds: list[Any], narrowed: list[str]) -> None:
        """Make the classes and objects that an answer is the first to hold."""
        self.narrowed.update(map(str, narrowed))
        for form, *description in kinds:
            make = exception_class if form == "exception" else object_class
            self._kinds.append(make(self._kinds, *description))
        for kind in objects:
            made: Any = self._kinds[kind if kind >= 0 else ~kind]
            reference: Any = (self, len(self._objects))
            if kind >= 0 and issubclass(made, BaseException):
                made = made.__new__(made)
                made._remote = reference
            elif kind >= 0:
                made = made(*reference)
                self.instances = self.instances or not isinstance(made, (type, type(no_handle)))
            elif "_remote_class" in vars(made):  # not one of a library
                made._remote_class = reference
            self._objects.append(made)

    def _error(self, classes: list[str], said: str, arguments: list[Any], attributes: Any, itself: Any) -> Any:
        """An exception of the program's class, or of the first of the named classes that is a builtin."""
        if isinstance(itself, BaseException):
            error: Any = itself
        else:
            kinds = [getattr(builtins, name, None) for name in classes]
            kind = next(one for one in kinds if isinstance(one, type) and issubclass(one, BaseException))
            try:
                error = kind(*arguments)
            except (TypeError, ValueError):  # such as UnicodeDecodeError of a text
                error = kind.__new__(kind)
        error.args = tuple(arguments)
        vars(error).update(attributes)
        if "_remote_class" in vars(type(error)):
            error._remote_text = require(str, said)
        return error

    def _number(self, value: Any) -> int:
        if isinstance(value, Remote):
            return value._remote[1]
        is_class = isinstance(value, type)
        if issubclass(value if is_class else type(value), BaseException):
            reference = vars(value).get("_remote_class" if is_class else "_remote")
            if reference is not None:
                return reference[1]
        if isinstance(value, type(builtins)):  # the program chooses whether a name is that of a module
            raise TypeError("a module cannot be sent to the program")
        raise self.no_verdict(
            f"the tests give the program a {type(value).__name__}; only plain data can be sent to it"
        )


def _builtin_base(kind: type) -> str:
    return next(base.__name__ for base in kind.__mro__ if builtin_name(base))
