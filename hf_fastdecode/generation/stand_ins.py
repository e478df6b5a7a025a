"""Installs the methods that stand in for code of an architecture's own, see `attention.own_code`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from .._compat import COMPILED_CALL, uncompiled_call
from ..attention.active_passes import lengths_of_pass
from ..attention.own_code import Method, stand_ins_of
from ..errors import Unsupported
from .foreign_code import is_capturable, is_of_transformers
from .replaced_calls import ReplacedCall, replaced_calls

_KNOWN = ("transformers.", "hf_fastdecode.")
"""Where classes are defined that change nothing of a base's attention, or attend to a shared-context cache."""


class Found(NamedTuple):
    """A method with a stand-in: the number of its module among the model's, and its name."""

    number: int
    name: str
    method: Method


def find_stand_ins(modules: Sequence[nn.Module], *, in_captures: bool = False) -> list[Found]:
    """The methods of a model's modules that have stand-ins, in all passes or in captured ones alone.

    Raises Unsupported for a class derived from one with stand-ins: what it changes, they would leave out.
    """
    kinds = {kind: stand_ins_of(kind, in_captures=in_captures) for kind in set(map(type, modules))}
    for kind in kinds:
        base = next((base for base in kind.__mro__[1:] if stand_ins_of(base, in_captures=in_captures)), None)
        if base is not None and not kind.__module__.startswith(_KNOWN):
            raise Unsupported(
                f"{kind.__name__} derives from {base.__name__}, whose attention has code of its own here, which would "
                "leave out what it changes"
            )
    return [
        Found(number, name, method)
        for number, module in enumerate(modules)
        for name, method in kinds[type(module)].items()
    ]


class StandIns:
    """The stand-ins of a model, and the context in which they run.

    Args:
        modules: The model's modules.
        found: Of these modules.
    """

    def __init__(self, modules: Sequence[nn.Module], found: Sequence[Found]):
        self._modules, self._found = modules, found

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which passes over a shared-context cache, of this thread, run them.

        Raises:
            Unsupported: A module has a hook or a method of its own, or a compiled call, which would not run.
        """
        if not self._found:
            yield
            return
        for one in self._found:
            _require_plain(self._modules[one.number], one.name)
        replaced_calls.enter(self._calls)
        try:
            yield
        finally:
            replaced_calls.leave(self._calls)

    @cached_property
    def _calls(self) -> list[ReplacedCall]:
        return [_replacement(self._modules[one.number], one.name, one.method) for one in self._found]


def _require_plain(module: nn.Module, name: str) -> None:
    """Check that nothing of the user's runs in the method's calls."""
    kind, own = type(module), vars(module)
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    if {"_hf_hook", "_call_impl", "forward"} & own.keys() or not all(map(is_capturable, hooks)):
        raise Unsupported(f"{kind.__name__} has a hook or a forward of its own, which would not run")
    if replaced_calls.is_taken(module, _attribute(name)):
        what = "compiled call" if name == "forward" else f"{name} of its own"
        raise Unsupported(f"{kind.__name__} has a {what}, which would not run")
    if name != "forward" and not is_of_transformers(getattr(kind, name)):  # `check_code` has seen the classes' forward
        raise Unsupported(f"{kind.__name__}.{name} is not transformers' own, and would not run")


def _attribute(name: str) -> str:
    """The attribute of a module in which calls of a method are replaced."""
    return COMPILED_CALL if name == "forward" else name


def _replacement(module: nn.Module, name: str, method: Method) -> ReplacedCall:
    """The call of a stand-in; passes of other threads run the module's own method."""
    own: Callable[..., Any] = uncompiled_call if name == "forward" else getattr(type(module), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if lengths_of_pass() is None else method)(module, *args, **kwargs)

    return ReplacedCall(module, _attribute(name), call)
