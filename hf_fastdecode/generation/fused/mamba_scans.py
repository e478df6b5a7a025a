"""Mamba-2's scan of several tokens, which transformers' layers call by name, as one kernel.

transformers' function keeps products of all pairs of a token of a chunk and another, for each head: of Nemotron-H-8B
some megabytes for a token, which take most of a prefill's time. The kernel's memory is its output. Where a package of
kernels is installed (mamba-ssm), that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..._compat import is_of_package
from ...kernels.failures import KernelFailedError
from ...kernels.state_scans import mamba_reference
from ...kernels.state_scans.mamba import scan_segments
from .trial import close, random

_OF_OTHER_FORMS = ("z", "seq_idx", "cu_seqlens", "cu_seq_lens_q")
"""Arguments of gates and of packed rows; None where a model's own forward passes them."""

_ROWS, _LENGTH, _HEADS, _WIDTH, _GROUPS, _SIZE, _CHUNK = 2, 7, 4, 8, 2, 16, 4


def starts_of_rows(rows: int, tokens: int, device: torch.device) -> Tensor:
    """Where rows of so many tokens begin when they are packed in one, ``[rows + 1]`` int32."""
    return torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=device)


def scan_tokens(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``mamba2_chunk_scan`` of rows of tokens, as one segment each."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    if (
        len(args) == 5
        and given.keys() >= {"D", "dt_bias"}
        and given.keys().isdisjoint(_OF_OTHER_FORMS)
        and given.get("dt_softplus") is True
        and not is_of_package(own)
    ):
        with suppress(ValueError, KernelFailedError):
            out, after = _scanned(*args, **given)
            return (out, after) if given.get("return_final_states") else out
    if "segments" in given:
        raise ValueError("the kernel takes no segments like these")
    return own(*args, **kwargs)


def _scanned(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, inf),
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The kernel over ``[rows, length, heads, width]`` x, of whose memory the channels may lie along the tokens."""
    rows, length = x.shape[:2]
    starts = others["segments"].to_scan() if "segments" in others else None
    starts = starts_of_rows(rows, length, x.device) if starts is None else starts
    flat = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, B, C))
    number, given, read = (one.flatten(0, 1) for one in flat)
    before = others.get("initial_states")
    before = None if before is None else before.contiguous()
    tensors = number, dt.flatten(0, 1), A, given, read, D, dt_bias, starts, before
    out, after = scan_segments(*tensors, limits=dt_limit)
    return out.unflatten(0, (rows, length)), after


def scans_tokens(own: Callable[..., Any]) -> bool:
    """Whether a function computes what is known: with limits of steps, and with states before the first tokens."""
    x, both = _numbers(_ROWS, _LENGTH, _HEADS, _WIDTH), _numbers(_ROWS, _LENGTH, 2 * _GROUPS, _SIZE)
    steps, before = _numbers(_ROWS, _LENGTH, _HEADS), _numbers(_ROWS, _HEADS, _WIDTH, _SIZE)
    rates, skips, biases = (random(_HEADS, seed=seed, dtype=torch.float32) for seed in range(3))
    starts, (given, read) = torch.arange(0, _ROWS * _LENGTH + 1, _LENGTH, device="cpu"), both.chunk(2, 2)
    for held, limits in ((None, (0.0, inf)), (before, (0.3, 1.5))):
        named = {"D": skips, "dt_bias": biases, "dt_softplus": True, "dt_limit": limits, "initial_states": held}
        tensors = x, steps, -rates.exp(), given, read
        found, after = own(*tensors, chunk_size=_CHUNK, z=None, **named | {"return_final_states": True})
        flat = (one.flatten(0, 1) if one.dim() > 1 else one for one in tensors)
        arguments: list[Any] = [*flat, skips, biases, starts, held, limits]
        expected, then = mamba_reference.scan_segments(*arguments)
        if not close(found.flatten(0, 1), expected) or not close(after, then):
            return False
    alone = own(*tensors, chunk_size=_CHUNK, **named)
    return close(alone.flatten(0, 1), expected)


def _numbers(*shape: int) -> Tensor:
    return random(*shape, seed=sum(shape), dtype=torch.float32)
