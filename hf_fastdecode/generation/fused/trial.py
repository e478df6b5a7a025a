"""Trials: whether code of a model computes a known formula, found on random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from ..model_walk import attributes

Form = TypeVar("Form")

_SCALARS = frozenset({bool, int, float, str, type(None)})
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_is_hf_initialized"}
"""Attributes that are no settings."""

_OF_A_LAYER = frozenset({"layer_idx", "layer_id"})
"""Attributes that differ between layers, which compute the same unless their `forward` reads them."""

_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_WITH_CONTENTS = (Tensor, list, dict, set)

TRIED_IN = torch.bfloat16
"""What numbers are tried in: its roundings tell the forms of a formula apart."""


def random(*shape: int, seed: int, dtype: torch.dtype = TRIED_IN) -> Tensor:
    """Random numbers on the CPU, which leave the global generators as they are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(dtype)


def linear(inputs: int, outputs: int, *, seed: int) -> nn.Linear:
    """A linear layer of random weights."""
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(random(outputs, inputs, seed=seed), requires_grad=False)
    return layer


def twin(module: nn.Module, **parts: nn.Module | Tensor) -> nn.Module:
    """A small module of the same class and settings, with these parts in the place of its own."""
    small: nn.Module = object.__new__(type(module))
    nn.Module.__init__(small)
    vars(small).update({name: value for name, value in attributes(module).items() if name not in vars(small)})
    small.training = module.training
    for name, part in parts.items():
        setattr(small, name, part if isinstance(part, nn.Module) else nn.Parameter(part, requires_grad=False))
    return small


def settings(module: nn.Module) -> Hashable | None:
    """What a module computes depends on: its class, that class's `forward`, and attributes.

    None where attributes are tensors or collections, which may differ between modules that look alike.
    """
    read = names_in(type(module)) if not _OF_A_LAYER.isdisjoint(vars(module)) else ()
    found: list[Any] = [type(module), function_key(type(module).forward)]
    own = attributes(module)
    for name in _names_of_settings(tuple(own), read):
        value = own[name]
        kind = type(value)  # not `isinstance`, which asks a config for its `__class__`
        if kind in _SCALARS:
            found.append((name, value))
        elif issubclass(kind, _FUNCTIONS):
            found.append((name, function_key(value)))
        elif issubclass(kind, _WITH_CONTENTS):
            return None
    return tuple(found)


@lru_cache(maxsize=1024)
def _names_of_settings(names: tuple[str, ...], read: tuple[str, ...]) -> tuple[str, ...]:
    """The names of attributes that may be settings: a few, the same for most modules of a class."""
    others = _OF_EVERY_MODULE | (_OF_A_LAYER - set(read))
    return tuple(name for name in names if name not in others)


def function_key(function: Any) -> Hashable | None:
    """Tells functions apart without keeping them, and what they refer to, alive; None for other callables."""
    return ref(function) if isinstance(function, _FUNCTIONS) else None


def names_in(module: type[nn.Module]) -> tuple[str, ...]:
    """Global names and attributes that the `forward` of a class reads; () where it is no Python function."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code.co_names if code is not None else ()


def matching(found: Tensor, expected: Iterable[tuple[Form, Tensor]]) -> Form | None:
    """The form whose numbers are those found. One in a hundred may round otherwise, from sums in another order."""
    for form, numbers in expected:
        same = found.shape == numbers.shape and found.dtype == numbers.dtype
        if same and bool((found != numbers).float().mean() <= 0.01) and torch.allclose(found, numbers, rtol=0.02):
            return form
    return None


def tried(trial: Any, *args: Any) -> Any:
    """The result of a trial, or None where the code cannot be run this way."""
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            return trial(*args)
    except Exception:  # a model's own code, on inputs that are not its own
        return None
