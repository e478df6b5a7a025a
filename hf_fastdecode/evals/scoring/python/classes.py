"""Which classes travel as plain data besides the builtin containers. Runs inside sandboxes, on builtins alone."""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

VALUE_TYPES: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "timedelta": ("datetime", lambda v: [v.days, v.seconds, v.microseconds]),
    "timezone": ("datetime", lambda v: [v.utcoffset(None), v.tzname(None)]),
    "datetime": (
        "datetime",
        lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo],
    ),
    "date": ("datetime", lambda v: [v.year, v.month, v.day]),
    "time": ("datetime", lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo]),
    "ZoneInfo": ("zoneinfo", lambda v: [v.key]),
    "UUID": ("uuid", lambda v: [str(v)]),
    "PosixPath": ("pathlib", lambda v: [str(v)]),
    "PurePosixPath": ("pathlib", lambda v: [str(v)]),
    "IPv4Address": ("ipaddress", lambda v: [str(v)]),
    "IPv6Address": ("ipaddress", lambda v: [str(v)]),
    "slice": ("builtins", lambda v: [v.start, v.stop, v.step]),
}
"""Immutable classes of the standard library that compare by value: module, and the arguments of the constructor."""

_OF_NAMED_TUPLES = frozenset(
    f"__{name}__"
    for name in (
        *("new", "repr", "getnewargs", "slots", "doc", "match_args", "module", "annotations", "orig_bases", "replace"),
        *("firstlineno", "static_attributes", "annotate_func", "annotations_cache", "classcell", "qualname"),
    )
)


def builtin_name(value: Any) -> str:
    """The name under which an object is a builtin function, class or constant; empty for all others."""
    if value is Ellipsis or value is NotImplemented:
        return str(value)
    if not issubclass(type(value), (type, type(len))):  # a stand-in for a class is none, whatever its `__class__`
        return ""
    name = value.__name__
    return name if vars(builtins).get(name) is value else ""


def value_type(kind: type) -> str:
    """The name in `VALUE_TYPES` of a class, which may be a program's; empty if it is none of them."""
    module = VALUE_TYPES.get(kind.__name__, ("",))[0]
    return kind.__name__ if module and getattr(sys.modules.get(module), kind.__name__, None) is kind else ""


def make_value(name: str, arguments: list[Any]) -> Any:
    """An object of a class of `VALUE_TYPES`."""
    return getattr(__import__(VALUE_TYPES[name][0]), name)(*arguments)


def is_named_tuple(kind: type) -> bool:
    """Whether a class is a named tuple without methods or operators of its own."""
    fields = getattr(kind, "_fields", None)
    if kind.__bases__ != (tuple,) or type(fields) is not tuple or "_make" not in vars(kind):
        return False
    special = {name for name in vars(kind) if name.startswith("__")}
    return special <= _OF_NAMED_TUPLES and {name for name in vars(kind) if not name.startswith("_")} == {*fields}


_named_tuples: dict[tuple[str, tuple[str, ...]], Any] = {}


def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """The class of this name and these fields; the same one each time. A ValueError where they are no names."""
    if (name, fields) not in _named_tuples:
        from collections import namedtuple

        if not all(type(one) is str for one in (name, *fields)):
            raise ValueError(f"{name!r} and {fields!r} are no names")
        _named_tuples[name, fields] = namedtuple(name, fields)
    return _named_tuples[name, fields]


def mutable_parts(value: Any, most: float = float("inf")) -> list[Any]:
    """The lists, dicts, sets and the like in a value that is a tree: in the same order for equal values.

    A search that has found more than `most` ends; a value that holds itself has endlessly many.
    """
    found: list[Any] = []
    series: tuple[Any, ...] = (list, tuple, *deque_class())
    waiting: list[Any] = [value]
    while waiting and len(found) <= most:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += dict.values(value)
        elif isinstance(value, series):
            waiting += value
        if is_mutable(value):
            found.append(value)
    return found


def is_mutable(value: Any) -> bool:
    """Whether a value of plain data can change."""
    return isinstance(value, (list, dict, set, bytearray, *deque_class()))


def content_of(part: Any) -> Any:
    """A copy of a container of `mutable_parts`, of a builtin class; it holds the same objects."""
    if isinstance(part, dict):
        return dict(dict.items(part))
    return set(part) if isinstance(part, set) else bytearray(part) if isinstance(part, bytearray) else [*part]


def refill(part: Any, content: Any) -> None:
    """Have a container of `mutable_parts` hold what `content_of` gave of another."""
    part.clear()
    if isinstance(part, (dict, set)):
        part.update(content)
    else:
        part.extend(content)


def deque_class() -> tuple[Any, ...]:
    """`collections.deque`, if that is imported: nothing else is one, whatever its name."""
    collections = sys.modules.get("collections")
    return (collections.deque,) if collections else ()
