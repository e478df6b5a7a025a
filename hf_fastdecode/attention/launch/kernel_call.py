"""Calls of the prefill kernel, on tensors of any strides, and the decode kernels' tables of addresses.

The prefill kernel computes what PyTorch's fused operators leave out: a soft cap, sinks, or a window that hides tokens.
All runs of a pass are one launch, after one for each of their contexts, whose partials it merges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.failures import KernelFailedError
from ...kernels.prefill.api import prefill_attention, prefill_partial, refusal
from ..forest import Forest
from ..kv import Partial, Scoring, Segment
from ..torch_operators.prefill_ops import PackedRuns, Stored


class AddressesOfLayers:
    """Addresses of a forest's nodes in layer after layer.

    Arithmetic, because a view per node takes far longer; once for all layers whose segments have the same strides,
    which then differ in where these begin.
    """

    def __init__(self, forest: Forest):
        self._numbers, self._starts = forest.places
        used, self._index = np.unique(self._numbers, return_inverse=True)
        self._segments, self._own = used[used >= 0].tolist(), used[used < 0]
        self._offsets: dict[tuple[tuple[int, ...], ...], np.ndarray] = {}

    def of(self, segments: Sequence[Segment] | Mapping[int, Segment], suffix: Segment | None = None) -> Tensor:
        """Addresses of each node's keys and values, and stride between KV heads in elements: ``[3, nodes]`` int64.

        Own nodes, if there are any, are stored in the `suffix`, ``[rows, kv_heads, capacity, head_dim]`` each.
        """
        parts = [segments[number] for number in self._segments]
        begins = np.zeros((2, len(self._own) + len(parts)), dtype=np.int64)
        if suffix is not None and len(self._own):
            begins[:, : len(self._own)] = [[part.data_ptr()] for part in suffix]
        if parts:
            begins[:, len(self._own) :] = [[segment[column].data_ptr() for segment in parts] for column in range(2)]
        stored = [*parts, *([suffix] if suffix is not None else [])]
        strides = tuple((part.element_size(), *part.stride()) for segment in stored for part in segment)
        if strides not in self._offsets:
            self._offsets[strides] = self._offsets_of(parts, suffix)
        table = self._offsets[strides].copy()
        table[:2] += begins[:, self._index]
        return torch.from_numpy(table)

    def _offsets_of(self, parts: list[Segment], suffix: Segment | None) -> np.ndarray:
        """The table of a layer whose segments and suffixes all begin at address 0."""
        table = np.zeros((3, len(self._numbers)), dtype=np.int64)
        for number, segment in zip(self._segments, parts, strict=True):
            own = self._numbers == number
            _check_strides(segment)
            for column, part in enumerate(segment):
                table[column, own] = self._starts[own] * part.stride(1) * part.element_size()
            table[2, own] = segment.keys.stride(0)
        if suffix is not None:
            _check_strides(suffix)
            own = self._numbers < 0
            rows = -1 - self._numbers[own]  # see `own_segment`
            for column, part in enumerate(suffix):
                table[column, own] = rows * part.stride(0) * part.element_size()
            table[2, own] = suffix.keys.stride(1)
        return table


def suffix_addresses(suffix: Segment, first: int = 0) -> list[int]:
    """Addresses of the suffixes' keys and values from token `first` on, and strides of rows and KV heads."""
    _check_strides(suffix)
    begins = [part.data_ptr() + first * part.stride(2) * part.element_size() for part in suffix]
    return [*begins, *suffix.keys.stride()[:2]]


def _check_strides(segment: Segment) -> None:
    """Check that values have the strides of keys, and the elements after latents those for their width."""
    keys, values = segment
    if keys.stride() == values.stride():
        return
    if keys.shape[-1] != values.shape[-1]:
        as_wide = [stride * keys.shape[-1] // values.shape[-1] for stride in values.stride()[:-1]]
        strides = list(zip(keys.shape, keys.stride(), [*as_wide, 1]))
    else:
        strides = list(zip(keys.shape, keys.stride(), values.stride()))
    if any(size > 1 and key != value for size, key, value in strides):
        raise ValueError(
            f"keys and values need equal strides, got {keys.stride()} and {values.stride()}; store both in one layout"
        )


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
    if not _serves(scoring, window, query, keys, values, (part for name in runs.contexts for part in stored(name))):
        return None
    query, keys, values = in_rows(query, keys, values)
    own, contexts = runs.intervals(query.device, window, stored)
    options: dict[str, Any] = {"scale": scoring.scale, "soft_cap": scoring.softcap}
    try:
        earlier = _no_keys(query) if contexts else None
        for name, intervals in contexts:
            assert earlier is not None
            context_keys, context_values = in_rows(*stored(name))
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
    """`kernel_attention` for a pass that ends in padding, see `padded_causal_attention`.

    Args:
        intervals: Returns `padded_intervals` of the layer's window.
    """
    if not _serves(scoring, scoring.window, query, keys, values):
        return None
    query, keys, values = in_rows(query, keys, values)
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


def _serves(
    scoring: Scoring, window: int | None, query: Tensor, keys: Tensor, values: Tensor, stored: Iterable[Tensor] = ()
) -> bool:
    """Whether the kernel is to compute these scores, as PyTorch's fused operators do not, and does on this device.

    Args:
        window: The layer's window if it hides tokens.
        stored: Keys and values of contexts, which are looked up where all else holds.
    """
    plain = scoring.softcap is None and scoring.sinks is None and window is None
    return not plain and on_gpu(query) and refusal(query, keys, values, [*stored]) is None


def takes_windows(head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes windows that hide tokens from such heads, without gradients."""
    keys, values = (torch.empty(1, 1, width, dtype=dtype, device=device) for width in (head_dim, value_dim))
    return head_dim > 0 and on_gpu(keys) and refusal(keys, keys, values) is None


def on_gpu(query: Tensor) -> bool:
    """Whether to prefer kernels; interpreted ones take longer than PyTorch's operators."""
    return query.is_cuda


def in_rows(*parts: Tensor) -> tuple[Tensor, ...]:
    """These tensors, copied unless their last dimension is contiguous."""
    return tuple([part if part.stride(-1) == 1 else part.contiguous() for part in parts])


def _no_keys(query: Tensor) -> tuple[Tensor, Tensor]:
    """The partial of no keys, whose ``out`` is undefined."""
    heads, tokens, head_dim = query.shape
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float32, device=query.device)
    return out.transpose(0, 1), out.new_full((heads, tokens), -torch.inf)
