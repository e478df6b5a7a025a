"""Attention modules that rotate queries and keys by their file's ``apply_rotary_pos_emb``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.failures import KernelFailedError
from ...kernels.pointwise import reference
from ...kernels.pointwise.api import RotaryForm
from ...kernels.pointwise.gradients import rotate
from .head_norms import waiting_head_norms
from .trial import (
    TRIED_IN,
    FusedKind,
    by_copy,
    calling,
    function_key,
    global_named,
    matching,
    names_in,
    random,
    runs_fused,
    tried,
)

_NAME = "apply_rotary_pos_emb"

Forms = dict[tuple[torch.dtype, bool], tuple[RotaryForm, bool]]
"""By the dtype of cosines and sines, since PyTorch computes in theirs where they are wider than queries, and by
whether they are as long as a head: the form, and whether cosines and sines are half as long as what is rotated."""


def may_be(module: type[nn.Module]) -> bool:
    return _NAME in names_in(module)


def key(module: nn.Module) -> Hashable | None:
    function = global_named(_NAME, type(module).forward)
    if (key := function_key(function)) is None:
        return None
    return type(module), function_key(type(module).forward), key


def form_of(module: nn.Module) -> Forms | None:
    """In which forms the function rotates; None if in none of them, or if no copy of `forward` can call another."""
    function = global_named(_NAME, type(module).forward)
    if calling(type(module).forward, {_NAME: function}) is None:
        return None
    queries, keys = (random(2, 5, heads, 32, seed=heads).transpose(1, 2) for heads in (4, 2))
    forms = Forms()
    for (width, halves), dtype in product(((32, False), (16, False), (16, True)), (TRIED_IN, torch.float32)):
        angles = 10 * random(2, 5, width if halves else width // 2, seed=7, dtype=torch.float32)
        angles = angles if halves else angles.repeat(1, 1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        if (found := tried(function, queries.clone(), keys.clone(), cos, sin)) is None:
            continue
        rotated = partial(reference.rotate, queries, keys, cos, sin, halves=halves)
        expected = ((form, _joined(rotated(form=form))) for form in RotaryForm)
        if (form := matching(_joined(found), expected)) is not None:
            forms.setdefault((dtype, width == 32), (form, halves))
    return forms or None


def _rotate(function: Any, forms: Forms, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 4 and not kwargs and {*map(type, args)} == {Tensor}:
        queries, keys, cos, sin = args
        if (
            queries.dim() == 4
            and cos.dim() == 3
            and runs_fused(queries, differentiable=True)
            and keys.dtype == queries.dtype
        ):
            wide = cos.dtype == torch.float32
            found = forms.get((torch.float32 if wide else TRIED_IN, cos.shape[-1] == queries.shape[-1]))
            if found is not None and (wide or cos.dtype == queries.dtype) and sin.dtype == cos.dtype:
                form, halves = found
                heads = waiting_head_norms()
                given = queries, keys, cos, sin
                if heads is not None and (rotated := heads.rotate(*given, form, halves=halves)) is not None:
                    return rotated
                try:
                    return rotate(*given, form=form, halves=halves)
                except (ValueError, KernelFailedError):
                    pass
    return function(*args, **kwargs)


def _joined(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat(pair, dim=1)


def _others(forward: Callable[..., Any], forms: Forms) -> dict[str, Callable[..., Any]]:
    return {_NAME: partial(_rotate, global_named(_NAME, forward), forms)}


ROTARY = FusedKind(
    "rotary embeddings", may_be, key, form_of, by_copy(_others, partial(runs_fused, differentiable=True))
)
