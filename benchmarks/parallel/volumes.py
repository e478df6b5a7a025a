"""What Tree Attention's paper says of memory and of communication: its equations 8 to 14, in bytes of one layer.

The paper counts elements, for multi-head attention with a context for each of `b` rows. Where KV heads are fewer, and
rows share one context, the keys and values of its equations are narrower and are there once: ``2 t d`` has the width
of the KV heads here, and ``b`` stands with queries and partials alone. Nothing here needs torch.
"""

from __future__ import annotations

from .cases import AttentionCase

_PARTIAL = 4
"""Bytes of a partial's element: fp32."""


def stored_bytes(case: AttentionCase, itemsize: int) -> int:
    """``2 t d``: keys and values of one rank's part in one layer (equation 11)."""
    return 2 * case.tokens_here * case.kv_heads * case.head_dim * itemsize


def ring_memory(case: AttentionCase, itemsize: int) -> int:
    """``4 t d + 2 b d`` (equation 8)."""
    return 2 * stored_bytes(case, itemsize) + 2 * _queries(case) * itemsize


def tree_memory(case: AttentionCase, itemsize: int) -> int:
    """``2 t d + 2 b d + 2 b n_h`` (equation 9)."""
    partials = _queries(case) + 2 * case.rows * case.heads
    return stored_bytes(case, itemsize) + _queries(case) * itemsize + partials * _PARTIAL


def ring_volume(case: AttentionCase, itemsize: int) -> int:
    """``2 t d p`` (equation 10)."""
    return stored_bytes(case, itemsize) * case.ranks


def tree_volume(case: AttentionCase) -> int:
    """``2 (p - 1) / p (b d + 2 b n_h)`` (equation 14)."""
    elements = _queries(case) + 2 * case.rows * case.heads
    return 2 * (case.ranks - 1) * elements * _PARTIAL // case.ranks


def _queries(case: AttentionCase) -> int:
    """``b d``."""
    return case.rows * case.heads * case.head_dim
