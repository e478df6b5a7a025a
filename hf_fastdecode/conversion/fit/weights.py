"""The weights of one attention layer, what slim caches require of them, and biases where keys are cached alone.

A constant part of all tokens' values passes the softmax unchanged, since attention weights sum to 1, and folds into
the bias of the output projection (Slim attention, section 5). That needs weights that do sum to 1: no attention sinks,
no small weights dropped without renormalising. A bias of the keys adds one number to all scores of a query, which the
softmax ignores unless RoPE or QK-norm stands between projection and scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one attention layer, in `torch.nn.Linear`'s layout ``[out, in]``, any floating dtype.

    The properties `W_Q`, `W_K`, `W_V` and `W_O` have the papers' layout ``[in, out]``, ``K = X W_K``, in fp64; all
    mathematics of this folder is written with them.

    Attributes:
        query: ``[heads * head_dim, d]``.
        key: ``[kv_heads * head_dim, key_d]``; ``key_d`` is the width of the encoder for cross-attention, else ``d``.
        value: ``[kv_heads * value_dim, key_d]``.
        output: ``[d_out, heads * value_dim]``.
        heads: Query heads.
        kv_heads: Key and value heads.
        query_bias, key_bias, value_bias, output_bias: ``[out]`` of each projection, or None.
        scale: Factor on the scores; ``head_dim ** -0.5`` when None.
        query_norm, key_norm: QK-norm, from a whole projection ``[tokens, heads * head_dim]`` to the same shape, before
            RoPE (OLMo-2); None without. Slim caches keep keys from before it, where they are linear in the inputs.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    heads: int
    kv_heads: int
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    scale: float | None = None
    query_norm: Callable[[Tensor], Tensor] | None = None
    key_norm: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        """Check that heads divide the projections, and that these fit each other; else ValueError."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        for name, weight, heads in (
            ("query", self.query, self.heads),
            ("key", self.key, self.kv_heads),
            ("value", self.value, self.kv_heads),
            ("output", self.output.mT, self.heads),
        ):
            if weight.shape[0] % heads:
                raise ValueError(f"the {name} projection has {weight.shape[0]} coordinates, not divisible by {heads}")
        if self.query.shape[0] // self.heads != self.key.shape[0] // self.kv_heads:
            raise ValueError(
                f"heads of query and key must have one width, got {self.query.shape[0]} / {self.heads} and "
                f"{self.key.shape[0]} / {self.kv_heads}; weights are [out, in], as in torch.nn.Linear"
            )
        if self.output.shape[1] // self.heads != self.value.shape[0] // self.kv_heads:
            raise ValueError(
                f"heads of value and output must have one width, got {self.value.shape[0]} / {self.kv_heads} and "
                f"{self.output.shape[1]} / {self.heads}; weights are [out, in], as in torch.nn.Linear"
            )
        if self.key.shape[1] != self.value.shape[1]:
            raise ValueError(f"key and value must read one input, got {self.key.shape[1]} and {self.value.shape[1]}")

    @property
    def W_Q(self) -> Tensor:
        """``[d, heads * head_dim]``, fp64."""
        return self.query.double().mT

    @property
    def W_K(self) -> Tensor:
        """``[key_d, kv_heads * head_dim]``, fp64."""
        return self.key.double().mT

    @property
    def W_V(self) -> Tensor:
        """``[key_d, kv_heads * value_dim]``, fp64."""
        return self.value.double().mT

    @property
    def W_O(self) -> Tensor:
        """``[heads * value_dim, d_out]``, fp64."""
        return self.output.double().mT

    def keys(self, inputs: Tensor) -> Tensor:
        """Keys of inputs ``[tokens, key_d]`` with their bias, before norm and RoPE: ``[tokens, e]``, fp64."""
        return inputs.double() @ self.W_K + bias_or_zero(self.key_bias, self.W_K)

    def values(self, inputs: Tensor) -> Tensor:
        """Values of inputs ``[tokens, key_d]`` with their bias: ``[tokens, e_v]``, fp64."""
        return inputs.double() @ self.W_V + bias_or_zero(self.value_bias, self.W_V)

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self.key.shape[0] // self.kv_heads

    @property
    def score_scale(self) -> float:
        """The factor on the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


def bias_or_zero(bias: Tensor | None, weight: Tensor) -> Tensor:
    """A projection's bias in fp64, zeros when it has none; `weight` is ``[in, out]``."""
    if bias is None:
        return torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    return bias.double()


def value_constant(from_keys: Tensor, key_offset: Tensor, key_bias: Tensor, value_bias: Tensor) -> Tensor:
    """Constant part of the values, equal for all tokens: ``(c - b_K) M + b_V``, ``[e_v]`` in fp64.

    Keys ``K = X W_K + b_K`` are cached minus an offset c. Then ``X W_K = (K - c) + (c - b_K)``, of which only the
    first term is in the cache: ``c = 0`` caches whole keys, ``c = b_K`` keys without their bias. M, ``[e, e_v]``, is
    the matrix from ``X W_K`` to values; c and ``b_K`` are ``[e]``.
    """
    return (key_offset.double() - key_bias.double()) @ from_keys.double() + value_bias.double()


def score_offset(weights: AttentionWeights, key_offset: Tensor, rotation: object | None) -> Tensor | None:
    """Offset ``[e]`` to add to keys that were cached without it, before norm, rotation and scores.

    None where scores without it differ by a constant per query, so that it can be left out.
    """
    return None if rotation is None and weights.key_norm is None else key_offset


def require_multi_head(weights: AttentionWeights) -> None:
    """Refuse layers whose keys do not determine the inputs, so that values cannot follow (Slim attention, section 1).

    Raises ValueError where ``kv_heads != heads``, or keys have fewer coordinates than the inputs.
    """
    if weights.kv_heads != weights.heads:
        raise ValueError(
            f"a cache of keys alone needs num_key_value_heads == num_attention_heads, got {weights.kv_heads} != "
            f"{weights.heads}: keys have fewer coordinates than the inputs and do not determine the values; "
            "keep keys and values, or cache the encoder's output for cross-attention"
        )
    coordinates, inputs = weights.key.shape
    if coordinates < inputs:
        raise ValueError(
            f"keys of {coordinates} coordinates do not determine inputs of {inputs}; a cache of keys alone needs at "
            f"least {inputs}; keep keys and values for this layer"
        )


def require_linear_scores(weights: AttentionWeights, rotation: object | None) -> None:
    """Refuse layers whose scores are not bilinear in the inputs (Slim attention, section 6, option 2).

    Raises ValueError where RoPE or QK-norm stands between the projections and the scores.
    """
    between = "RoPE" if rotation is not None else "QK-norm"
    if rotation is not None or weights.query_norm is not None or weights.key_norm is not None:
        raise ValueError(
            f"a cache of inputs needs scores x_n W_Q W_K^T x_m^T, but {between} stands between the projections and "
            "the scores; cache keys from before it, or keys and values"
        )
