"""Attention over what a slim layer caches, in PyTorch's operators, with softmax sparsity where a config asks for it.

Sparsity (Slim attention, section 3): tokens whose attention weight is below a threshold add nothing, and the other
weights are not renormalised. PyTorch's operators multiply zeros as any number, so this saves no time here; it shows
what a kernel that skips tokens could save, and at which error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention.active_passes import no_autocast
from ...conversion.fit.cached_numbers import EIGHT_BITS
from ..slim_layers import SlimLayer, check_threshold


class CachedValues(Protocol):
    """Values that follow from what a layer caches: `slim_values.SlimValues` or `projections.InputValues`."""

    def per_token(self, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values, ``[rows, tokens, e_v]``, of cached keys (or inputs) and V-coordinates."""

    def averaged(self, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values averaged per head, ``[rows, heads, queries, e_v / heads]``, with weights in fp32 that sum to 1."""


QUERIES_AT_ONCE: Final = 256
"""Queries whose attention weights are in memory at a time, where a threshold needs these."""

_below: ContextVar[list[Tensor] | None] = ContextVar("weights_below_threshold", default=None)


@contextmanager
def counted() -> Iterator[list[Tensor]]:
    """Collect the number of weights below the threshold at each use, with the zeros of masked tokens."""
    counts: list[Tensor] = []
    token = _below.set(counts)
    try:
        yield counts
    finally:
        _below.reset(token)


def without_small(probabilities: Tensor, threshold: float) -> Tensor:
    """Attention weights, ``[rows, heads, queries, tokens]``, with zeros for those below a threshold."""
    small = probabilities < threshold
    if (counts := _below.get()) is not None:
        counts.append(small.sum())
    return probabilities.masked_fill(small, 0)


def averaged(values: CachedValues, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
    """As `CachedValues.averaged`, for weights that need not sum to 1: constants of the values are weighted too."""
    total = probabilities.sum(-1, keepdim=True)
    shares = probabilities / total.clamp(min=torch.finfo(total.dtype).tiny)
    return values.averaged(shares, keys, coordinates) * total


def cache_dtype(model_dtype: torch.dtype, layer: SlimLayer) -> torch.dtype:
    """Dtype of a layer's cache: `SlimLayer.cache_dtype`, or by default the model's, in which inputs are exact.

    Keys of bf16 models are by default cached in fp16 where their range allows: less error in the same bytes.
    """
    if layer.cache_dtype is not None:
        dtype: torch.dtype = getattr(torch, layer.cache_dtype)
        return dtype
    if layer.plan in ("x", "e"):
        return model_dtype
    return torch.float16 if model_dtype == torch.bfloat16 and layer.float16 else model_dtype


def check_trainable(dtype: torch.dtype, layer_idx: int) -> None:
    """Raise ValueError for training a layer that caches in 8 bits."""
    if dtype in EIGHT_BITS:
        raise ValueError(
            f"layer {layer_idx} caches in {str(dtype).removeprefix('torch.')}, through which no gradients flow; call "
            "eval(), or train a model converted with cache dtype auto"
        )


def slim_attention(
    query: Tensor,
    rotated_keys: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    values: CachedValues,
    mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    threshold: float = 0.0,
    dtype: torch.dtype,
    weights_wanted: bool = False,
    causal: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attend.

    For few queries, keys are averaged and the averages are multiplied by the matrix M that maps keys to values. For
    many, the values of all tokens are made first, at the cost of an ordinary value projection, and PyTorch's fused
    attention runs.

    Args:
        query: ``[rows, heads, queries, head_dim]`` after RoPE, in fp32.
        rotated_keys: ``[rows, heads or 1, tokens, head_dim]`` after RoPE, in fp32.
        keys: ``[rows, 1, tokens, heads * head_dim]`` as cached, dequantised from 8 bits; or cached inputs,
            ``[rows, 1, tokens, d]``.
        coordinates: ``[rows, 1, tokens, r]``, likewise.
        values: Makes the values of `keys` and `coordinates`.
        mask: ``[rows, 1 or heads, queries, tokens]`` of bool, or to be added to scores; None for `causal_mask`, or
            with ``causal=False`` for all tokens.
        scaling: Factor on the scores.
        dropout: Share of the weights that is dropped.
        threshold: Weights below it count as 0; 0 turns this off.
        dtype: Dtype of fused attention and of the result.
        weights_wanted: Whether to return the attention weights, which fused attention does not give.
        causal: Whether `causal_mask` applies without a mask.

    Returns:
        ``[rows, queries, heads * value_dim]``, and the weights ``[rows, heads, queries, tokens]`` in fp32 or None.
    """
    check_threshold(threshold)
    heads, queries, head_dim = query.shape[1:]
    with no_autocast(query.device):
        average_first = queries < head_dim and not dropout  # weights that were dropped no longer sum to 1
        per_head = None
        if not average_first:
            per_head = values.per_token(keys, coordinates).unflatten(-1, (heads, -1)).transpose(1, 2)
            if not weights_wanted and not threshold:
                out = F.scaled_dot_product_attention(
                    query.to(dtype),
                    rotated_keys.to(dtype),
                    per_head.to(dtype),
                    attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(dtype),
                    dropout_p=dropout,
                    is_causal=causal and mask is None and queries > 1,
                    scale=scaling,
                )
                return out.transpose(1, 2).flatten(2), None
        if mask is None and causal:
            mask = causal_mask(queries, keys.shape[2], query.device)
        outs, weights = [], []
        at_once = QUERIES_AT_ONCE if threshold else queries
        for part, hidden in zip(query.split(at_once, 2), _split_mask(mask, queries, at_once)):
            probabilities = _probabilities(part, rotated_keys, hidden, scaling)
            if threshold:
                probabilities = without_small(probabilities, threshold)
            probabilities = F.dropout(probabilities, dropout)
            if per_head is not None:
                outs.append(probabilities @ per_head.to(probabilities.dtype))
            elif threshold:
                outs.append(averaged(values, probabilities, keys, coordinates))
            else:
                outs.append(values.averaged(probabilities, keys, coordinates))
            if weights_wanted:
                weights.append(probabilities)
    out = torch.cat(outs, 2).transpose(1, 2).flatten(2).to(dtype)
    return out, torch.cat(weights, 2) if weights_wanted else None


def causal_mask(queries: int, tokens: int, device: torch.device) -> Tensor:
    """Tokens that each query sees where transformers gives no mask, ``[queries, tokens]`` of bool.

    One query sees all tokens. Several are the first tokens; behind them are free slots of a static cache.
    """
    return torch.ones(queries, tokens, dtype=torch.bool, device=device).tril(0 if queries > 1 else tokens)


def attention_scores(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Scores, ``[rows, heads, queries, tokens]``, of queries against keys or inputs."""
    if keys.shape[1] == 1:  # one product for all heads, rather than a copy of the keys for each
        return (query.flatten(1, 2) @ keys[:, 0].mT).unflatten(1, query.shape[1:3]) * scaling
    return query @ keys.mT * scaling


def _probabilities(query: Tensor, keys: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = attention_scores(query, keys, scaling)
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:  # a row of padding sees nothing, and must not become NaN
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return (scores + mask).softmax(-1)


def _split_mask(mask: Tensor | None, queries: int, at_once: int) -> Iterable[Tensor | None]:
    """A mask ``[..., queries or 1, tokens]``, split like the queries."""
    if mask is None or mask.shape[-2] == 1:
        return [mask] * -(-queries // at_once)
    return mask.split(at_once, -2)
