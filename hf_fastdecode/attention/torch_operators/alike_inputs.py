"""Cross-attention to inputs of one length, each of as many neighbouring rows, by one call of PyTorch's operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from ..forest import Node
from ..kv import Segment
from .decode_ops import as_batch


class AlikeInputs(NamedTuple):
    """Inputs of one length, each read by as many neighbouring rows: ``[inputs, kv_heads, tokens, head_dim]``."""

    rows: slice
    stored: Segment

    @classmethod
    def of(cls, segment: Segment, nodes: Sequence[Node]) -> AlikeInputs:
        """Those of neighbouring nodes of a segment."""
        rows = slice(nodes[0].row_start, nodes[-1].row_stop)
        return cls(rows, Segment(*(as_batch(part, nodes) for part in segment)))


def attend_alike(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of ``[rows, heads, queries, head_dim]`` to alike inputs; returns ``[rows, queries, heads, head_dim]``.

    All queries of an input are those of one sequence, which reads it once. Nothing is merged, so that no log-sum-exp
    is needed.
    """
    rows, heads, queries, head_dim = query.shape
    inputs, kv_heads = keys.shape[:2]
    per_kv_head = heads // kv_heads
    packed = query.reshape(inputs, rows // inputs, kv_heads, per_kv_head * queries, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(packed.flatten(2, 3), keys, values, scale=scale)
    width = values.shape[-1]
    by_head = out.reshape(inputs, kv_heads, rows // inputs, per_kv_head, queries, width)
    return by_head.permute(0, 2, 4, 1, 3, 5).reshape(rows, queries, heads, width)
