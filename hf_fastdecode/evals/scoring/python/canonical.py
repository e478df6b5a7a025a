"""Texts of answers, equal for programs that answer alike. Runs inside sandboxes, on builtins alone."""

from __future__ import annotations

from .classes import VALUE_TYPES, builtin_name, value_type

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def canonical(value: Any) -> str:
    """A text of a value of `loads` that equal values share: 1, 1.0 and True, a list's items, a set's in any order.

    An object of the program is ``object``: to ask it for anything would run the program. The program chooses the name
    of its class, so only names of classes in the standard library's modules count.
    """
    kind = type(value)
    if isinstance(value, tuple):
        return _in_order("tuple")(value)
    if (way := _CANONICAL.get(kind.__name__)) and kind.__module__ in _MODULES:
        return way(value)
    if name := value_type(kind):
        return _in_order(name)(VALUE_TYPES[name][1](value))
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


_MODULES = ("builtins", "collections", "decimal", "fractions")
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
