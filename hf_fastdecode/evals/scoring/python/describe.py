"""What the program's process says of the classes of its objects, which `remote` makes classes of its own from.

Nothing here is trusted: a description decides which operations of an object are sent back to the program, and no more.
"""

from __future__ import annotations

import sys

from .classes import builtin_name
from .plain import is_plain

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from typing import Any

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
_OWN_TESTS = ("unittest", "doctest")  # whose exceptions steer the run of tests


def described(kind: Any, number_of: Any) -> list[Any]:
    """A class as plain data: ``object``, its name, its own special methods, those that compare with objects of its own
    class only, and its name among the classes of builtins.

    Of exceptions ``exception``, the name, its bases by name or number, and its module if that is of the standard
    library. `number_of` gives the number of a base, whose description must come first.
    """
    module = str(getattr(kind, "__module__", ""))
    of_library = module.partition(".")[0] in sys.stdlib_module_names
    if issubclass(kind, BaseException):
        bases = [builtin_name(base) or number_of(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        known = of_library and module.partition(".")[0] not in _OWN_TESTS
        return ["exception", str(kind.__qualname__), bases, module if known else ""]
    methods = {name: own for name in SPECIALS if (own := _own_method(kind, name)) is not None}
    builtin = "type" if issubclass(kind, type) else str(kind.__name__) if module == "builtins" else ""
    is_method = builtin in ("method", "builtin_function_or_method")
    narrow = [name for name in COMPARISONS if name in methods and (is_method or _is_generated(methods[name]))]
    return ["object", str(kind.__name__), list(methods), narrow, builtin]


def _own_method(kind: Any, name: str) -> Any:
    own = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return None if own is vars(object).get(name) else own


def _is_generated(method: Any) -> bool:
    """Whether `dataclasses` made a method."""
    return getattr(getattr(method, "__code__", None), "co_filename", "") == "<string>"


def may_have_plain_instances(kind: Any) -> bool:
    """Whether objects that travel as plain data, without their class, can be instances of a class."""
    return is_plain(kind) or any(
        base.__module__ == "__main__" and "__instancecheck__" in vars(base) for base in type(kind).__mro__
    )
