"""What the tests hold in place of a program's objects: the object is in the other process, only plain data comes here.

A remote object equals itself and nothing else, whatever its class says, and no comparison or search is ever sent: the
program could answer what suits it.
"""

from __future__ import annotations

import builtins

from .plain import ALL_NAMES, dumps, loads

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Untrusted(BaseException):
    """The other process has answered nonsense, or is gone. No test can catch it with `except Exception`."""


class NotPlain(BaseException):
    """The tests give the program something that cannot travel, such as a function of theirs."""


class Link:
    """Sends requests to the program's process.

    Args:
        exchange: Sends a request and gives the answer; nothing if there is none.
    """

    def __init__(self, exchange: Callable[[bytes], bytes]):
        self._exchange = exchange
        self._known: dict[int, Remote] = {}
        self._returned: list[str] | None = []  # None once a call has given no plain data

    def request(self, operation: str, *operands: Any) -> Any:
        """The result of an operation, with the mutable operands as it left them.

        Raises:
            Exception: What the operation raised: the builtin class that is nearest to its own. Or an operand is
                nested too deep.
            NotPlain: An operand is an object of the tests' own.
            Untrusted: There is no valid answer.
        """
        answer = self._exchange(dumps([operation, *operands], _number, ALL_NAMES))
        if not answer:
            raise Untrusted("the program ended during a call")
        try:
            kind, result, changed = loads(answer, self._take)
            if operation == "call":
                self._note(result if kind == "value" else NotPlain())
            if changed is not None:
                _update(list(operands), changed)
            if kind == "value":
                return result
            raised = _error(*result)
        except MemoryError:
            raise
        except Exception as invalid:
            raise Untrusted(f"the program's answer is invalid: {invalid}") from None
        raise raised

    def outputs(self) -> bytes:
        """A hash of what the program's functions have returned, in order.

        Empty where one raised or returned an object that is not plain data, or none was called.
        """
        if not self._returned:
            return b""
        import hashlib

        return hashlib.sha256("\0".join(self._returned).encode("utf-8", "surrogatepass")).hexdigest().encode()

    def _note(self, result: Any) -> None:
        if self._returned is not None:
            try:
                self._returned.append(_canonical(result))
            except (NotPlain, ValueError):  # integers of thousands of digits have no text
                self._returned = None

    def _take(self, number: int) -> Remote:
        return self._known.setdefault(number, Remote(self, number))


class Remote:
    """An object of the program that is not plain data."""

    def __init__(self, link: Link, number: int):
        vars(self).update(_link=link, _number=number)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._link.request("call", self, positional, named)

    def __getattr__(self, name: str) -> Any:
        return self._link.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.request("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._link.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.request("setitem", self, key, value)

    def __iter__(self) -> Any:
        return self._link.request("iter", self)

    def __next__(self) -> Any:
        return self._link.request("next", self)

    def __len__(self) -> int:
        return _of(int, self._link.request("len", self))

    def __bool__(self) -> bool:
        return _of(bool, self._link.request("bool", self))

    def __str__(self) -> str:
        return _of(str, self._link.request("str", self))

    def __repr__(self) -> str:
        return _of(str, self._link.request("repr", self))


def _canonical(value: Any) -> str:
    """A text that equal builtins share: 1, 1.0 and True, sets and frozensets, items in any order.

    Raises:
        NotPlain: It is, or holds, something else than plain data.
        ValueError: An integer is too long.
    """
    if isinstance(value, (Remote, NotPlain)):
        raise NotPlain
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    if isinstance(value, (set, frozenset)):
        return f"set({','.join(sorted(map(_canonical, value)))})"
    if isinstance(value, dict):
        pairs = sorted(f"{_canonical(key)}:{_canonical(one)}" for key, one in value.items())
        return f"dict({','.join(pairs)})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(map(_canonical, value))})"
    return repr(value)


def _number(value: Any) -> int:
    if isinstance(value, Remote):
        return vars(value)["_number"]
    if isinstance(value, type(builtins)):  # the program chooses whether a name is that of a module
        raise TypeError("a module cannot be sent to the program")
    raise NotPlain(f"the tests give the program a {type(value).__name__}; only plain data can be sent to it")


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise Untrusted(f"the program's answer is invalid: {type(value).__name__} in place of {kind.__name__}")
    return value


def _error(classes: list[str], said: str) -> BaseException:
    """An exception of the first class that is a builtin and can be made with a text alone."""
    for name in classes:
        one = getattr(builtins, name, None)
        if isinstance(one, type) and issubclass(one, BaseException):
            try:
                return one(said)
            except TypeError:  # such as UnicodeDecodeError
                continue
    raise ValueError(f"{classes} are no exceptions")


def _update(old: Any, new: Any) -> Any:
    """Make mutable containers equal to new ones in place; gives what now stands for the new value."""
    if type(old) is not type(new):
        return new
    if isinstance(old, (list, tuple)):
        kept = [_update(one, other) for one, other in zip(old, new)] + list(new[len(old) :])
        if isinstance(old, tuple):
            return old if len(old) == len(new) and all(a is b for a, b in zip(old, kept)) else tuple(kept)
        old[:] = kept
    elif isinstance(old, dict):
        values = {key: _update(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(values)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) or type(old).__name__ == "deque":
        old.clear()
        old.extend(new)
    else:
        return new
    return old
