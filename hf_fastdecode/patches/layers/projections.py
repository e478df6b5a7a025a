"""Projections of keys and values whose results the values depend on.

Projections of cached inputs are applied on whichever side of the softmax is cheaper (Slim attention, section 6, option
2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...attention.active_passes import no_autocast
from .stored_products import wide


class Projection(nn.Module):
    """Linear layer that is not an `nn.Linear`, so that quantizers and adapters leave it out.

    Rounding errors of its weight would be amplified in the values, and an adapter of keys would change the values too.
    """

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        linear = nn.Linear(in_features, out_features, bias=bias)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def as_linear(self) -> nn.Linear:
        """An `nn.Linear` that shares the parameters, which transformers knows how to initialise."""
        linear: Any = nn.Linear(1, 1, device=torch.device("meta"))
        linear.weight, linear.bias = self.weight, self.bias
        return linear

    def extra_repr(self) -> str:
        """The text of `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class KeyProjection(Projection):
    """A projection of keys whose result is not rounded to the model's dtype, which may be coarser than the cache's."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d]`` to ``[..., e]`` in fp32, or in fp64 for fp64."""
        dtype = wide(x.dtype)
        with no_autocast(x.device):
            if x.is_cuda and x.dtype == self.weight.dtype != dtype and not torch.is_grad_enabled():
                out = torch.mm(x.flatten(0, -2), self.weight.mT, out_dtype=dtype).unflatten(0, x.shape[:-1])
                return out if self.bias is None else out + self.bias
            return F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class InputProjection(Projection):
    """A projection of keys or values that is applied to cached inputs, to queries, or to averages of inputs.

    For heads that share keys and values, as in grouped-query attention, queries of a group multiply the same rows of
    the weight.
    """

    def forward(
        self, x: Tensor, kv_heads: int | None = None, *, to_inputs: bool = False, with_bias: bool = True
    ) -> Tensor:
        """Multiply.

        Args:
            x: Inputs, ``[..., d]``; with `kv_heads` averages of inputs, ``[rows, heads, queries, d]``, or queries,
                ``[rows, heads, queries, head_dim]``.
            kv_heads: Number of key and value heads, where each head of `x` is multiplied by the weight of its own.
            to_inputs: `x` are queries, to be scored against inputs: ``q W_K,i^T``, without the bias, which adds one
                number to all scores of a query.
            with_bias: Add the bias; with `kv_heads` it is always added.

        Returns:
            ``[..., e]`` in the weight's dtype; with `kv_heads` ``[rows, heads, queries, head_dim or d]``, with nothing
            rounded to less than fp32.
        """
        if kv_heads is None:
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias if with_bias else None)
        dtype = wide(x.dtype)
        weight = self.weight.to(dtype).unflatten(0, (kv_heads, -1))  # [kv_heads, head_dim, d]
        grouped = x.to(dtype).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [rows, kv_heads, group * queries, ...]
        out = grouped @ (weight if to_inputs else weight.mT)
        if self.bias is not None and not to_inputs:
            out = out + self.bias.to(dtype).unflatten(0, (kv_heads, 1, -1))
        return out.unflatten(2, (-1, x.shape[2])).flatten(1, 2)


@dataclass(frozen=True)
class InputValues:
    """Values of cached inputs, with the methods of `slim_values.SlimValues`.

    Attributes:
        projection: Projection of values.
        heads: Query heads.
        kv_heads: Key and value heads.
    """

    projection: InputProjection
    heads: int
    kv_heads: int

    def per_token(self, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values of each query head, ``[rows, tokens, e_v]``, of cached inputs ``[rows, 1, tokens, d]``."""
        return _of_query_heads(self.projection(keys[:, 0]), self.heads, self.kv_heads).flatten(-2)

    def averaged(self, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values averaged per head: inputs are averaged, and the averages are projected.

        Args:
            probabilities: ``[rows, heads, queries, tokens]``, in fp32; each row of them sums to 1.
            keys: Cached inputs, ``[rows, 1, tokens, d]``.
            coordinates: Empty, and not read.

        Returns:
            ``[rows, heads, queries, value_dim]``, fp32.
        """
        flat = probabilities.flatten(1, 2)  # [rows, heads * queries, tokens]: all heads average the same inputs
        average = (flat @ keys[:, 0].to(flat.dtype)).unflatten(1, probabilities.shape[1:3])
        values: Tensor = self.projection(average, self.kv_heads)
        return values


def score_operands(
    query: Tensor, cached: Tensor, projection: InputProjection, kv_heads: int, *, absorb: bool
) -> tuple[Tensor, Tensor]:
    """Operands of the scores against cached inputs.

    Args:
        query: ``[rows, heads, queries, head_dim]``, in fp32.
        cached: Inputs, ``[rows, 1, tokens, d]``.
        projection: Projection of keys.
        kv_heads: Key and value heads.
        absorb: Project the queries, which is less work for few, rather than all inputs.

    Returns:
        ``q W_K,i^T`` and inputs, ``[rows, 1, tokens, d]``; or queries and keys, ``[rows, heads, tokens, head_dim]``.
        Both leave the bias of keys out, so that their partials merge.
    """
    if absorb:
        return projection(query, kv_heads, to_inputs=True), cached.to(query.dtype)
    return query, input_keys(cached, projection, query.shape[1], kv_heads)


def input_keys(cached: Tensor, projection: InputProjection, heads: int, kv_heads: int) -> Tensor:
    """Keys ``[rows, heads, tokens, head_dim]`` in fp32 of inputs ``[rows, 1, tokens, d]``, without their bias."""
    keys = projection(cached[:, 0], with_bias=False)
    return _of_query_heads(keys, heads, kv_heads).transpose(1, 2).to(wide(keys.dtype))


def _of_query_heads(projected: Tensor, heads: int, kv_heads: int) -> Tensor:
    """``[rows, tokens, kv_heads * dim]`` to ``[rows, tokens, heads, dim]``."""
    return projected.unflatten(-1, (kv_heads, -1)).repeat_interleave(heads // kv_heads, -2)
