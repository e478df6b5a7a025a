"""Plain data as bytes, for two processes that do not trust each other, and messages that carry them.

Runs inside sandboxes, on builtins alone.

A value is a byte that names its kind, a number of four bytes, little-endian, and content. The number is the length of
content in bytes (`_SIZED`, and ``n``, a builtin by its name), or how many values follow:

    `_NESTED`   list, tuple, set, frozenset, dict, range, keys, values and items of a dict
    V           a value of `VALUE_TYPES`, such as a date: its class, and the arguments that make it
    P           a named tuple: name, fields and values of its class
    x           an exception of a builtin class: class and arguments

Or it is itself the value: ``H``, the number of a handle, and ``A``, one of `known`.

A subclass of one of these travels as that one, so no behaviour of a program's classes reaches the reader. All else
travels as a handle, which only the process that made it can open. Containers that hold themselves are refused.
"""

from __future__ import annotations

import builtins
import os
import struct
import sys

TYPE_CHECKING = False  # importing `typing` takes longer than most programs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any


VALUE_TYPES: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "timedelta": ("datetime", lambda v: [v.days, v.seconds, v.microseconds]),
    "timezone": ("datetime", lambda v: [v.utcoffset(None), v.tzname(None)]),
    "datetime": ("datetime", lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo]),
    "date": ("datetime", lambda v: [v.year, v.month, v.day]),
    "time": ("datetime", lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo]),
    "ZoneInfo": ("zoneinfo", lambda v: [v.key]),
    "UUID": ("uuid", lambda v: [str(v)]),
    "PosixPath": ("pathlib", lambda v: [str(v)]),
    "PurePosixPath": ("pathlib", lambda v: [str(v)]),
    "IPv4Address": ("ipaddress", lambda v: [str(v)]),
    "IPv6Address": ("ipaddress", lambda v: [str(v)]),
    "slice": ("builtins", lambda v: [v.start, v.stop, v.step]),
    "Decimal": ("decimal", lambda v: [str(v)]),
    "Fraction": ("fractions", lambda v: [v.numerator, v.denominator]),
    "Counter": ("collections", lambda v: [_items(v)]),
    "OrderedDict": ("collections", lambda v: [_items(v)]),
    "defaultdict": (
        "collections",
        lambda v: [v.default_factory if builtin_name(v.default_factory) in SAFE_NAMES else None, _items(v)],
    ),
    "deque": ("collections", lambda v: [content_of(v)]),
}
"""Classes of the standard library that compare by value: module, and the arguments of the constructor."""

_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
_OTHERS = (
    "neg pos abs invert int float complex index round trunc floor ceil len bool str repr hash format bytes call "
    "getitem setitem delitem iter next reversed contains enter exit await aiter anext aenter aexit "
    "lt le gt ge eq ne instancecheck subclasscheck dir fspath copy deepcopy"
)
SPECIALS = tuple(
    f"__{prefix}{name}__"
    for names, prefixes in ((_BINARY, ("", "r", "i")), (_OTHERS, ("",)))
    for name in names.split()
    for prefix in prefixes
    if prefix + name != "idivmod"
)
"""Special methods that are sent to the program."""

COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__")

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
    if not issubclass(type(value), (type, type(len))):  # not for a remote object, whatever its `__class__`
        return ""
    name = value.__name__
    return name if vars(builtins).get(name) is value else ""


def value_type(kind: type) -> str:
    """The name in `VALUE_TYPES` of a class, which may be a program's; empty if it is none of them."""
    module = VALUE_TYPES.get(kind.__name__, ("",))[0]
    return kind.__name__ if module and getattr(sys.modules.get(module), kind.__name__, None) is kind else ""


def is_named_tuple(kind: type) -> bool:
    """Whether a class is a named tuple that adds no methods or operators."""
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
    return isinstance(value, (list, dict, set, bytearray, *deque_class()))


def content_of(part: Any) -> Any:
    """A copy of a container of `mutable_parts`, of a builtin class; it holds the same objects."""
    if isinstance(part, dict):
        return dict(dict.items(part))
    return set(part) if isinstance(part, set) else bytearray(part) if isinstance(part, bytearray) else [*part]


def refill(part: Any, content: Any) -> None:
    """Fill a container of `mutable_parts` with the `content_of` another."""
    part.clear()
    if isinstance(part, (dict, set)):
        part.update(content)
    else:
        part.extend(content)


def deque_class() -> tuple[Any, ...]:
    """`collections.deque`, if that is imported: nothing else is one, whatever its name."""
    collections = sys.modules.get("collections")
    return (collections.deque,) if collections else ()


MAX_DEPTH = 100  # of nested containers: writing, reading and comparing them stays below the recursion limit
_DATA_TYPES = (int, float, complex, bool, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, object)

ALL_NAMES = frozenset(name for name in vars(builtins) if not name.startswith("_"))
"""Builtins that a trusted process may send."""

SAFE_NAMES: frozenset[str] = frozenset(
    {one.__name__ for one in _DATA_TYPES}
    | {name for name in ALL_NAMES if isinstance(one := getattr(builtins, name), type) and issubclass(one, Exception)}
    | {"Ellipsis", "NotImplemented"}
) - {"AssertionError", "Exception"}
"""Builtins that a process that is not trusted may send: calling them does no harm, whatever the arguments, and tests
that catch them catch none of the tests' failures."""


def no_handle(*arguments: Any) -> Any:
    """Refuse handles: the argument of `dumps` and `loads` for values that are plain data throughout."""
    raise ValueError(f"not plain data: {arguments}")


def dumps(
    value: Any,
    handle: Callable[[Any], int] = no_handle,
    names: frozenset[str] = SAFE_NAMES,
    known: Sequence[Any] = (),
    narrowed: set[str] | None = None,
) -> bytes:
    """Encode a value; objects that are not plain data travel as the number that `handle` gives them.

    Builtins of `names` travel by name, and objects of `known`, which the reader has too, by their position there.
    Classes whose objects travel as their base are added to `narrowed`. A ValueError where containers are nested deeper
    than `MAX_DEPTH`, for instance because one holds itself.
    """
    writer = _Writer(handle, names, known, narrowed)
    writer.write(value)
    return bytes(writer.out)


def loads(
    data: bytes,
    handle: Callable[[int], Any] = no_handle,
    names: frozenset[str] = SAFE_NAMES,
    known: Sequence[Any] = (),
) -> Any:
    """Decode a value. Whatever the bytes are, only plain data, handles, `known` and builtins of `names` come out.

    A ValueError where the bytes, which may be hostile, are not a value or one nested too deep. `handle` gives the
    object of a number.
    """
    reader = _Reader(data, handle, names, known)
    try:
        value = reader.read()
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, struct.error) as error:
        raise ValueError(f"not a value: {error}") from None
    if reader.position != len(data):
        raise ValueError(f"{len(data) - reader.position} bytes after the value")
    return value


def is_plain(kind: type) -> bool:
    return _code_of(kind) != b""


def _code_of(kind: type) -> bytes:
    """The kind as which objects of a class travel, by the first of its bases that has one; empty for handles."""
    for base in kind.__mro__:
        if code := _CODES.get(base) or (b"V" if value_type(base) else b""):
            return code
    return b""


def _may_make_a_value(argument: Any) -> bool:
    return is_plain(type(argument)) or builtin_name(argument) in SAFE_NAMES


class _Writer:
    def __init__(self, handle: Any, names: frozenset[str], known: Sequence[Any], narrowed: set[str] | None):
        self.out, self.handle, self.names, self.depth = bytearray(), handle, names, 0
        self.known = {id(one): at for at, one in enumerate(known)}
        self.narrowed = narrowed

    def write(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self.known:
            self.put(b"A", self.known[id(value)])
        elif code := _CODES.get(kind) or _code_of(kind):
            if self.narrowed is not None and kind.__module__ == "__main__" and not is_named_tuple(kind):
                self.narrowed.add(kind.__name__)
            if code in _SIZED:
                self.sized(code, _SIZED[code][1](value))
            elif code == b"V":
                self.of_value_type(value)
            elif is_named_tuple(kind):
                self.several(b"P", [kind.__name__, kind._fields, *tuple.__iter__(value)])
            else:
                self.several(code, _NESTED[code][1](value))
        elif issubclass(kind, BaseException) and builtin_name(kind) in self.names:
            self.several(b"x", [kind, *value.args])
        elif (name := builtin_name(value)) in self.names:
            self.sized(b"n", name.encode())
        else:
            self.put(b"H", self.handle(value))

    def put(self, code: bytes, number: int) -> None:
        self.out += code + number.to_bytes(4, "little")

    def sized(self, code: bytes, content: bytes) -> None:
        self.put(code, len(content))
        self.out += content

    def several(self, code: bytes, values: list[Any]) -> None:
        if self.depth >= MAX_DEPTH:
            raise ValueError(f"containers nested more than {MAX_DEPTH} deep, or one that holds itself")
        self.put(code, len(values))
        self.depth += 1
        for value in values:
            self.write(value)
        self.depth -= 1

    def of_value_type(self, value: Any) -> None:
        """As its class and arguments; as a handle with a fold, or a time zone of a class that is not plain data."""
        name = next(filter(None, map(value_type, type(value).__mro__)))
        arguments = VALUE_TYPES[name][1](value)
        if getattr(value, "fold", 0) or not all(map(_may_make_a_value, arguments)):
            self.put(b"H", self.handle(value))
        else:
            self.several(b"V", [name, *arguments])


class _Reader:
    def __init__(self, data: bytes, handle: Any, names: frozenset[str], known: Sequence[Any]):
        self.data, self.position, self.handle, self.names, self.depth = data, 0, handle, names, 0
        self.known = known

    def read(self) -> Any:
        code, number = self.take(1), int.from_bytes(self.take(4), "little")
        if code in _SIZED:
            return _SIZED[code][2](self.take(number))
        if code == b"H":
            return self.handle(number)
        if code == b"A":
            return self.known[number]
        if code == b"n":
            name = self.take(number).decode()
            if name not in self.names:
                raise ValueError(f"{name!r} may not occur")
            return getattr(builtins, name)
        return _NESTED[code][2](self.several(number))

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise ValueError(f"{self.position - len(self.data)} bytes are missing")
        return self.data[start : self.position]

    def several(self, count: int) -> list[Any]:
        if self.depth >= MAX_DEPTH:
            raise ValueError(f"containers nested more than {MAX_DEPTH} deep")
        self.depth += 1
        values = []
        for _ in range(count):  # which may be far more than there are
            values.append(self.read())
        self.depth -= 1
        return values


def _made_value(parts: list[Any]) -> Any:
    name, *arguments = parts
    if not all(map(_may_make_a_value, arguments)):
        raise ValueError(f"a {name} is made from plain data")
    return getattr(__import__(VALUE_TYPES[name][0]), name)(*arguments)


def _made_exception(parts: list[Any]) -> BaseException:
    kind, *arguments = parts
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise ValueError(f"{kind} is no class of exceptions")
    return kind(*arguments)


def _ordered_set(elements: list[Any]) -> set[Any]:
    """A set that iterates in this order if it can: the order of a set depends on how it was made.

    As a display such as ``{12, 13, 16}`` is made, and as `set` makes one of a list: the tables differ in size.
    """
    made = set(elements)
    if all(one is other for one, other in zip(made, elements)):
        return made
    displayed: set[Any] = set()
    displayed.update(frozenset(elements))
    return displayed if all(one is other for one, other in zip(displayed, elements)) else made


def _items(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(value))


def _paired(parts: list[Any]) -> dict[Any, Any]:
    if len(parts) % 2:
        raise ValueError("a key without a value")
    return dict(zip(parts[::2], parts[1::2]))


def _integer(value: int) -> bytes:
    value = int.__index__(value)
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _complex(value: complex) -> bytes:
    value = complex.__complex__(value)
    return struct.pack("<dd", value.real, value.imag)


# The encoders ask builtin classes alone, whatever a subclass of them does.
_SIZED: dict[bytes, tuple[type, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    b"N": (type(None), lambda value: b"", lambda data: None),
    b"T": (bool, lambda value: b"1" if value else b"", bool),
    b"i": (int, _integer, lambda data: int.from_bytes(data, "little", signed=True)),
    b"f": (float, lambda value: struct.pack("<d", float.__float__(value)), lambda data: struct.unpack("<d", data)[0]),
    b"c": (complex, _complex, lambda data: complex(*struct.unpack("<dd", data))),
    b"s": (
        str,
        lambda value: str.__str__(value).encode("utf-8", "surrogatepass"),
        lambda data: data.decode("utf-8", "surrogatepass"),
    ),
    b"b": (bytes, lambda value: bytes.__add__(value, b""), bytes),
    b"a": (bytearray, lambda value: bytes(memoryview(value)), bytearray),
}
"""Conversions by kind: class, to bytes, from bytes."""

_KEYS: type = type({}.keys())
_VALUES: type = type({}.values())
_ITEMS: type = type({}.items())
_NESTED: dict[bytes, tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    b"l": (list, lambda value: [*list.__iter__(value)], list),
    b"t": (tuple, lambda value: [*tuple.__iter__(value)], tuple),
    b"S": (set, lambda value: [*set.__iter__(value)], _ordered_set),
    b"Z": (frozenset, lambda value: [*frozenset.__iter__(value)], lambda parts: frozenset(_ordered_set(parts))),
    b"d": (dict, lambda value: [part for pair in dict.items(value) for part in pair], _paired),
    b"r": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    b"k": (_KEYS, lambda value: [*value], lambda parts: dict.fromkeys(parts).keys()),
    b"v": (_VALUES, lambda value: [*value], lambda parts: dict(enumerate(parts)).values()),
    b"e": (_ITEMS, lambda value: [*value], lambda parts: dict(parts).items()),
    b"V": (object, lambda value: [], _made_value),
    b"P": (object, lambda value: [], lambda parts: named_tuple(*parts[:2])(*parts[2:])),
    b"x": (object, lambda value: [], _made_exception),
}
"""Conversions by kind: class, to the values that it holds, and from them. `_Writer` writes the last ones."""

_CODES: dict[type, bytes] = {
    kind: code for table in (_SIZED, _NESTED) for code, (kind, *_) in table.items() if kind is not object
}


class Messages:
    """Takes over standard input and output, so that nothing else in the process reads or writes them by chance.

    From then on standard input is empty, and what is printed goes to standard error.
    """

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)

    def receive(self) -> list[bytes]:
        """The next message; nothing once the other side is gone."""
        return [self._take(self._number()) for _ in range(self._number())]

    def send(self, *parts: bytes) -> None:
        sized = (part for one in parts for part in (len(one).to_bytes(4, "big"), one))
        unsent = memoryview(len(parts).to_bytes(4, "big") + b"".join(sized))
        while unsent:
            unsent = unsent[os.write(self._out, unsent) :]

    def _number(self) -> int:
        return int.from_bytes(self._take(4), "big")

    def _take(self, size: int) -> bytes:
        parts = []
        while size and (part := os.read(self._in, min(size, 1 << 20))):
            parts.append(part)
            size -= len(part)
        return b"" if size else b"".join(parts)
