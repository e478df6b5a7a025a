"""Attention modules that rotate queries and keys by their file's ``apply_rotary_pos_emb``.

The function is a global name of the model's file, so the module runs a copy of its ``forward`` in which that name is
another function; the file itself, and other models and threads, keep theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import uncompiled_call
from ...kernels.failures import KernelFailedError
from ...kernels.pointwise import reference
from ...kernels.pointwise.api import rotate
from ...kernels.pointwise.forms import RotaryForm
from .runs import runs_fused
from .trial import TRIED_IN, matching, names_in, random

WHAT = "rotary embeddings"

_NAME = "apply_rotary_pos_emb"

Forms = dict[torch.dtype, RotaryForm]
"""By the dtype of cosines and sines: where they are wider than queries, PyTorch computes in theirs."""


def may_be(module: type[nn.Module]) -> bool:
    """Whether modules of a class may call the function."""
    return _NAME in names_in(module)


def kind(module: nn.Module) -> Hashable | None:
    """What tells modules apart that rotate differently; None where the file has no function of that name."""
    function = inspect.unwrap(type(module).forward).__globals__.get(_NAME)
    return (type(module), function) if callable(function) else None


def form_of(module: nn.Module) -> Forms | None:
    """In which forms the function rotates; None if in none of them."""
    function = inspect.unwrap(type(module).forward).__globals__[_NAME]
    queries, keys = (random(2, 5, heads, 32, seed=heads).transpose(1, 2) for heads in (4, 2))
    angles, forms = 10 * random(2, 5, 16, seed=7, dtype=torch.float32).repeat(1, 1, 2), Forms()
    for dtype in (TRIED_IN, torch.float32):
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        found = _joined(function(queries.clone(), keys.clone(), cos, sin))
        expected = ((form, _joined(reference.rotate(queries, keys, cos, sin, form))) for form in RotaryForm)
        if (form := matching(found, expected)) is not None:
            forms[dtype] = form
    return forms or None


def replacement(module: nn.Module, forms: Forms) -> Any:
    """What runs in the place of the module."""
    forward = inspect.unwrap(type(module).forward)
    names = {**forward.__globals__, _NAME: partial(_rotate, forward.__globals__[_NAME], forms)}
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return partial(_run, module, copied)


def _run(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden, Tensor) or not runs_fused(hidden):
        return uncompiled_call(module, *args, **kwargs)
    return forward(module, *args, **kwargs)


def _rotate(
    function: Any, forms: Forms, queries: Any, keys: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any
) -> Any:
    given = (queries, keys, cos, sin)
    plain = not args and not kwargs and all(isinstance(one, Tensor) for one in given)
    if plain and queries.dim() == 4 and cos.dim() == 3 and runs_fused(queries) and keys.dtype == queries.dtype:
        form = forms.get(torch.float32 if cos.dtype == torch.float32 else TRIED_IN)
        if form is not None and cos.dtype in (queries.dtype, torch.float32):
            try:
                return rotate(queries, keys, cos, sin, form)
            except (ValueError, KernelFailedError):
                pass
    return function(*given, *args, **kwargs)


def _joined(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat(pair, dim=1)
