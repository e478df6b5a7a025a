"""Trials: whether code of a model computes a known formula, found on random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Form = TypeVar("Form")

_SCALARS = frozenset({bool, int, float, str, type(None)})
_OF_A_LAYER = frozenset({"layer_idx", "layer_id", "training"})
"""Attributes that differ between layers, or calls, that compute the same."""

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
    vars(small).update({name: value for name, value in vars(module).items() if name not in vars(small)})
    small.training = module.training
    for name, part in parts.items():
        setattr(small, name, part if isinstance(part, nn.Module) else nn.Parameter(part, requires_grad=False))
    return small


def settings(module: nn.Module) -> Hashable:
    """What a module computes depends on: its class and plain attributes."""
    plain = [
        (name, value)
        for name, value in vars(module).items()
        if type(value) in _SCALARS and name[:1] != "_" and name not in _OF_A_LAYER
    ]
    return type(module), *plain


def names_in(module: type[nn.Module]) -> tuple[str, ...]:
    """Global names and attributes that the `forward` of a class reads; () where it is no Python function."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code.co_names if code is not None else ()


def matching(found: Tensor, expected: Iterable[tuple[Form, Tensor]]) -> Form | None:
    """The form whose numbers are those found, but for sums in another order: one in a hundred may round away."""
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
