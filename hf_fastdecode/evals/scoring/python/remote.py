"""What the tests hold in place of a program's objects: the object is in the other process, only plain data comes here.

A remote object equals itself and nothing else, whatever its class says, and no comparison or search is ever sent: the
program could answer what suits it.
"""

from __future__ import annotations

import builtins

from .plain import ALL_NAMES, builtin_name, dumps, loads

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Untrusted(BaseException):
    """The other process has answered nonsense, or is gone. No test can catch it with `except Exception`."""


class NotPlain(BaseException):
    """The tests give the program something that cannot travel, such as a function of theirs."""


class Link:
    """Sends requests to the program's process by `exchange`, which returns the answer, or nothing if there is none."""

    def __init__(self, exchange: Callable[[bytes], bytes]):
        self._exchange = exchange
        self.requests = 0
        self._known: dict[int, Remote] = {}
        self._answers: Any = None  # a hash of them, once there are any

    def request(self, operation: str, *operands: Any) -> Any:
        """The result of an operation, with the mutable operands as it left them.

        Raises:
            Exception: What the operation raised: the builtin class that is nearest to its own. Or an operand is
                nested too deep.
            NotPlain: An operand is an object of the tests' own.
            Untrusted: There is no valid answer.
        """
        self.requests += 1
        answer = self._exchange(dumps([operation, *operands], _number, ALL_NAMES))
        if not answer:
            raise Untrusted("the program ended during a call")
        try:
            kind, result, changed = loads(answer, self._take)
            raised = None if kind == "value" else _error(result)
            if changed is not None:
                _update(list(operands), changed)
        except MemoryError:
            raise
        except Exception as invalid:
            raise Untrusted(f"the program's answer is invalid: {invalid}") from None
        if operation != "names":
            self._note(result if raised is None else raised, changed)
        if raised is not None:
            raise raised
        return result

    def outputs(self) -> bytes:
        """A hash of the program's answers so far, in order, see `canonical`; empty where it was asked for nothing.

        They are the values that its functions returned, the classes of the exceptions that they raised, how they left
        their arguments, and what the tests learned from objects that are not plain data.
        """
        return b"" if self._answers is None else self._answers.hexdigest().encode()

    def _note(self, outcome: Any, changed: Any) -> None:
        """Add an answer to the hash of all: kept as they are, they could take the memory of the tests."""
        if self._answers is None:
            import hashlib  # takes milliseconds, and programs that do not load need none

            self._answers = hashlib.sha256()
        text = f"raised {type(outcome).__name__}" if isinstance(outcome, BaseException) else canonical(outcome)
        if changed is not None:
            text += f" changed {canonical(changed)}"
        self._answers.update(text.encode("utf-8", "surrogatepass") + b"\0")

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


def canonical(value: Any) -> str:
    """A text of a value of `loads` that equal values share: 1, 1.0 and True, a list's items, a set's in any order.

    An object of the program stands for itself as ``object``: to ask it for anything would run the program.
    """
    name = type(value).__name__  # of classes that only `plain` makes: no program can have one of its own named so
    if way := _CANONICAL.get(name):
        return way(value)
    return f"builtin {builtin_name(value)}" if builtin_name(value) else "object"


def _real(value: Any) -> str:
    """Equal numbers of any class have equal hashes and are nearest to the same float; few others share both."""
    try:
        nearest = float(value) + 0.0  # -0.0 equals 0.0
    except OverflowError:
        nearest = float("inf" if value > 0 else "-inf")
    except ValueError:  # a signalling NaN of `decimal`
        nearest = float("nan")
    return f"{nearest} {hash(value)}" if nearest == nearest else "nan"


def _complex(value: complex) -> str:
    return _real(value.real) if value.imag == 0 else f"complex({_real(value.real)},{_real(value.imag)})"


def _text(value: str) -> str:
    """Without addresses, as of ``<generator object f at 0x7f01>``: they are others in each run."""
    first, *rest = value.split(" at 0x")
    return repr(" at 0x".join([first, *(part.lstrip("0123456789abcdef") for part in rest)]))


def _range(value: range) -> str:
    """By its elements, which may be too many to be listed."""
    steps = (value.step,) if value and value[0] != value[-1] else ()
    return f"range({','.join(map(_real, (*value[:1], *value[-1:], *steps)))})"


def _in_order(name: str) -> Callable[[Any], str]:
    return lambda value: f"{name}({','.join(map(canonical, value))})"


def _in_any_order(value: Any) -> str:
    return f"set({','.join(sorted(map(canonical, value)))})"


def _pairs(value: dict[Any, Any]) -> str:
    return f"dict({','.join(sorted(f'{canonical(key)}:{canonical(one)}' for key, one in value.items()))})"


def _counts(value: dict[Any, Any]) -> str:
    """Counters are equal where they differ in elements that are counted as 0."""
    return _pairs({key: one for key, one in value.items() if canonical(one) != canonical(0)})


_CANONICAL: dict[str, Callable[[Any], str]] = {
    "NoneType": repr,
    **dict.fromkeys(("int", "bool", "float", "Decimal", "Fraction"), _real),
    "complex": _complex,
    "str": _text,
    **dict.fromkeys(("bytes", "bytearray"), lambda value: repr(bytes(value))),
    "range": _range,
    **{name: _in_order(name) for name in ("list", "tuple", "deque", "dict_values")},
    **dict.fromkeys(("set", "frozenset", "dict_keys", "dict_items"), _in_any_order),
    **dict.fromkeys(("dict", "OrderedDict", "defaultdict"), _pairs),
    "Counter": _counts,
}


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


def _error(sent: Any) -> BaseException:
    """An exception of the first of the named classes that is a builtin and can be made with a text alone."""
    classes, said = _of(list, sent)
    for name in _of(list, classes):
        one = getattr(builtins, _of(str, name), None)
        if isinstance(one, type) and issubclass(one, BaseException):
            try:
                return one(_of(str, said))
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
