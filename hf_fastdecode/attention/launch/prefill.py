"""Prefill attention by this package's kernel, of layers with what PyTorch's fused operators leave out.

That is a soft cap, sinks, or a window that hides tokens. All runs of a pass are one launch, after one for each of
their contexts, whose partials it merges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.failures import KernelFailedError
from ...kernels.prefill.config import refusal
from ..kv import Scoring
from ..partial import Partial
from ..runs import PackedRuns, Stored


def kernel_attention(
    query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, runs: PackedRuns, stored: Stored
) -> Tensor | None:
    """Attention of each run of tokens over its context and, causally, over itself.

    Args:
        query: ``[heads, tokens, head_dim]``, all runs concatenated.
        keys: ``[kv_heads, tokens, head_dim]``.
        values: ``[kv_heads, tokens, value_dim]``.
        runs: Their lengths add up to ``tokens``.

    Returns:
        ``[heads, tokens, value_dim]`` in the query's dtype; None where PyTorch's operators are to compute it: without
        score options, off a GPU, in other dtypes than half precision, for gradients, or after a failure.
    """
    window = scoring.window if scoring.window is not None and runs.outgrow(scoring.window, stored) else None
    if _is_plain(scoring, window) or not on_gpu(query):
        return None
    if refusal(query, keys, values, [part for name in runs.contexts for part in stored(name)]) is not None:
        return None
    query, keys, values = _in_rows(query, keys, values)
    own, contexts = runs.intervals(query.device, window, stored)
    options: dict[str, Any] = {"scale": scoring.scale, "soft_cap": scoring.softcap}
    from ...kernels.prefill.api import prefill_attention, prefill_partial  # they import triton, which may be missing

    try:
        earlier = _no_keys(query) if contexts else None
        for name, intervals in contexts:
            assert earlier is not None
            context_keys, context_values = _in_rows(*stored(name))
            prefill_partial(query, context_keys, context_values, intervals, earlier=earlier, **options)
        return prefill_attention(query, keys, values, own, earlier=earlier, sinks=scoring.sinks, **options)
    except KernelFailedError:
        return None


def padded_kernel_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
    intervals: Callable[[], Tensor],
    context: Partial | None,
) -> Tensor | None:
    """The same for a pass that ends in padding, see `padded_causal_attention`.

    Args:
        intervals: Returns `padded_intervals` of the layer's window.
    """
    if _is_plain(scoring, scoring.window) or not on_gpu(query) or refusal(query, keys, values) is not None:
        return None
    from ...kernels.prefill.api import prefill_attention

    query, keys, values = _in_rows(query, keys, values)
    options: dict[str, Any] = {"scale": scoring.scale, "soft_cap": scoring.softcap, "sinks": scoring.sinks}
    try:
        return prefill_attention(query, keys, values, intervals(), earlier=context, **options)
    except KernelFailedError:
        return None


def padded_intervals(tokens: int, runs: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """``[3, tokens]`` int32: every token, and the first and the last token of its own run that it sees.

    Args:
        runs: ``[tokens]`` int64: number of each token's run, as for `separating_bias`; None if there is one run.
    """
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    first = torch.zeros_like(token)
    if runs is not None:
        first[1:] = torch.where(runs[1:] != runs[:-1], token[1:], 0).cummax(0).values
    return torch.stack([token, first if window is None else torch.maximum(first, token - window + 1), token])


def _is_plain(scoring: Scoring, window: int | None) -> bool:
    """Whether PyTorch's fused operators compute such scores, where a window hides tokens if given."""
    return scoring.softcap is None and scoring.sinks is None and window is None


def takes_windows(head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes windows that hide tokens from such heads, without gradients."""
    keys, values = (torch.empty(1, 1, width, dtype=dtype, device=device) for width in (head_dim, value_dim))
    return head_dim > 0 and on_gpu(keys) and refusal(keys, keys, values) is None


def on_gpu(query: Tensor) -> bool:
    """Whether to prefer kernels; interpreted ones take longer than PyTorch's operators."""
    return query.is_cuda


def _in_rows(*parts: Tensor) -> tuple[Tensor, ...]:
    """Tensors whose last dimension is contiguous."""
    return tuple(part if part.stride(-1) == 1 else part.contiguous() for part in parts)


def _no_keys(query: Tensor) -> tuple[Tensor, Tensor]:
    """The partial of no keys, whose ``out`` is undefined."""
    heads, tokens, head_dim = query.shape
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float32, device=query.device)
    return out.transpose(0, 1), out.new_full((heads, tokens), -torch.inf)
