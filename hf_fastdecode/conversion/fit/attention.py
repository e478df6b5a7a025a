"""Reference (the specification): one attention layer in fp64 (Slim attention, equations 1.1 to 1.3), and its weights.

Slim caches are measured against it. Scores are materialised as ``[heads, queries, keys]``, for calibration texts of
about a thousand tokens. RoPE and its inverse are for keys that are cached before or after it (section 4).

A constant part of all tokens' values passes the softmax unchanged, since attention weights sum to 1, and folds into
the bias of the output projection (section 5). That needs weights that do sum to 1: no attention sinks, no small
weights dropped without renormalising. A bias of the keys adds one number to all scores of a query, which the softmax
ignores unless RoPE or QK-norm stands between projection and scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one multi-head attention layer, in `torch.nn.Linear`'s layout ``[out, in]``, any floating dtype.

    The properties `W_Q`, `W_K`, `W_V` and `W_O` have the papers' layout ``[in, out]``, ``K = X W_K``, in fp64; all
    mathematics of this folder is written with them.

    Attributes:
        query: ``[heads * head_dim, d]``.
        key: ``[heads * head_dim, key_d]``; ``key_d`` is the width of the encoder for cross-attention, else ``d``.
        value: ``[heads * value_dim, key_d]``.
        output: ``[d_out, heads * value_dim]``.
        query_bias, key_bias, value_bias, output_bias: ``[out]`` of each projection, or None.
        scale: Factor on the scores; ``head_dim ** -0.5`` when None.
        query_norm, key_norm: QK-norm of a whole projection ``[tokens, heads * head_dim]``, before RoPE (OLMo-2), or
            None. Slim caches keep keys from before it, where they are linear in the inputs.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    heads: int
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    scale: float | None = None
    query_norm: Callable[[Tensor], Tensor] | None = None
    key_norm: Callable[[Tensor], Tensor] | None = None

    @property
    def W_Q(self) -> Tensor:
        return self.query.double().mT

    @property
    def W_K(self) -> Tensor:
        return self.key.double().mT

    @property
    def W_V(self) -> Tensor:
        return self.value.double().mT

    @property
    def W_O(self) -> Tensor:
        return self.output.double().mT

    def keys(self, inputs: Tensor) -> Tensor:
        """Keys of inputs ``[tokens, key_d]`` with their bias, before norm and RoPE: ``[tokens, e]``, fp64."""
        return inputs.double() @ self.W_K + bias_or_zero(self.key_bias, self.W_K)

    def values(self, inputs: Tensor) -> Tensor:
        """Values of inputs ``[tokens, key_d]`` with their bias: ``[tokens, e_v]``, fp64."""
        return inputs.double() @ self.W_V + bias_or_zero(self.value_bias, self.W_V)

    @property
    def head_dim(self) -> int:
        return self.key.shape[0] // self.heads

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


def bias_or_zero(bias: Tensor | None, weight: Tensor) -> Tensor:
    """A projection's bias in fp64, zeros when it has none; `weight` is ``[in, out]``."""
    if bias is None:
        return torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    return bias.double()


def value_constant(from_keys: Tensor, key_offset: Tensor, key_bias: Tensor, value_bias: Tensor) -> Tensor:
    """Constant part of the values, equal for all tokens: ``(c - b_K) M + b_V``, ``[e_v]`` in fp64.

    Keys ``K = X W_K + b_K`` are cached minus an offset c. Then ``X W_K = (K - c) + (c - b_K)``, of which only the
    first term is in the cache. M, ``[e, e_v]``, is the matrix from ``X W_K`` to values; c and ``b_K`` are ``[e]``.
    """
    return (key_offset.double() - key_bias.double()) @ from_keys.double() + value_bias.double()


def require_linear_scores(weights: AttentionWeights, rotation: object | None) -> None:
    """Raise ValueError where scores are not bilinear in the inputs (Slim attention, section 6, option 2)."""
    between = "RoPE" if rotation is not None else "QK-norm"
    if rotation is not None or weights.query_norm is not None or weights.key_norm is not None:
        raise ValueError(
            f"a cache of inputs needs scores x_n W_Q W_K^T x_m^T, but {between} stands between the projections and "
            "the scores; cache keys from before it, or keys and values"
        )


Tables = tuple[Tensor, Tensor]
"""cos and sin of tokens, ``[..., tokens, rotated]``, with an entry per coordinate, as transformers makes them."""


def rotate(x: Tensor, tables: Tables, *, interleaved: bool) -> Tensor:
    """RoPE of the first coordinates of ``[..., heads, tokens, head_dim]``, as many as the tables have.

    Tables broadcast with `x`; a single row or token is rotated to all positions. Pairs are coordinates i and i + n of
    2 n (Llama), or interleaved 2 i and 2 i + 1 (GPT-J, Cohere).
    """
    cos, sin = tables
    rotated = cos.shape[-1]
    first = x[..., :rotated]
    # Each pair of coordinates, rotated by a right angle.
    if interleaved:
        turned = torch.stack([-first[..., 1::2], first[..., ::2]], -1).flatten(-2)
    else:
        low, high = first.chunk(2, -1)
        turned = torch.cat([-high, low], -1)
    first = first * cos.unsqueeze(-3) + turned * sin.unsqueeze(-3)
    if rotated == x.shape[-1]:
        return first
    return torch.cat([first, x[..., rotated:].to(first.dtype).expand(*first.shape[:-1], -1)], -1)


def unrotate(x: Tensor, tables: Tables, *, interleaved: bool) -> Tensor:
    """Inverse of `rotate`; dividing by ``cos² + sin²`` undoes attention factors in the tables, as YaRN's."""
    dtype = torch.promote_types(x.dtype, tables[0].dtype)
    cos, sin = (table.to(dtype) for table in tables)
    norm = cos.square() + sin.square()
    return rotate(x, (cos / norm, -sin / norm), interleaved=interleaved)


@dataclass(frozen=True)
class Rotation:
    """RoPE of the tokens of a text: tables ``[tokens, rotated]``, and the order of pairs, as `rotate` takes them."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def tokens(self, part: slice) -> Rotation:
        return Rotation(self.cos[part], self.sin[part], self.interleaved)

    def rotate(self, x: Tensor) -> Tensor:
        return rotate(x, (self.cos, self.sin), interleaved=self.interleaved)

    def unrotate(self, y: Tensor) -> Tensor:
        return unrotate(y, (self.cos, self.sin), interleaved=self.interleaved)


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one attention on a text: ``[tokens, d]``, of cross-attention those of queries.

    Self-attention is causal; cross-attention sees the whole encoder's output `encoded`, ``[keys, key_d]``. `rotation`
    is RoPE of these tokens, `score_bias` ``[heads, tokens, tokens]`` is added to the scaled scores (ALiBi, T5), and
    `unrotate` says whether slim caches keep keys after RoPE, beside their positions.
    """

    inputs: Tensor
    encoded: Tensor | None = None
    rotation: Rotation | None = None
    score_bias: Tensor | None = None
    unrotate: bool = False

    @property
    def key_inputs(self) -> Tensor:
        """Inputs of the projections of keys and values, ``[keys, key_d]``."""
        return self.inputs if self.encoded is None else self.encoded

    @property
    def stored_rotation(self) -> Rotation | None:
        """RoPE that keys are cached after, if they are."""
        return self.rotation if self.unrotate else None

    def part(self, keys: slice) -> AttentionInputs:
        """A part of the text: these keys, and for self-attention these tokens alone."""
        if self.encoded is not None:
            return replace(self, encoded=self.encoded[keys])
        return replace(
            self,
            inputs=self.inputs[keys],
            rotation=None if self.rotation is None else self.rotation.tokens(keys),
            score_bias=None if self.score_bias is None else self.score_bias[:, keys, keys],
        )


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[tokens, heads * head_dim]`` to ``[heads, tokens, head_dim]``."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def join_heads(x: Tensor) -> Tensor:
    """``[heads, tokens, head_dim]`` to ``[tokens, heads * head_dim]``."""
    return x.transpose(0, 1).flatten(1)


def query_heads(weights: AttentionWeights, inputs: Tensor, rotation: Rotation | None = None) -> Tensor:
    """Queries as scores use them, after bias, QK-norm and RoPE: ``[heads, tokens, head_dim]``, fp64."""
    projected = inputs.double() @ weights.W_Q + bias_or_zero(weights.query_bias, weights.W_Q)
    normed = projected if weights.query_norm is None else weights.query_norm(projected)
    heads = split_heads(normed, weights.heads)
    return heads if rotation is None else rotation.rotate(heads)


def key_heads(weights: AttentionWeights, keys: Tensor, rotation: Rotation | None = None) -> Tensor:
    """Keys ``[tokens, e]`` as scores use them, after QK-norm and RoPE: ``[heads, tokens, head_dim]``."""
    heads = split_heads(keys if weights.key_norm is None else weights.key_norm(keys), weights.heads)
    return heads if rotation is None else rotation.rotate(heads)


def attention_weights(
    query: Tensor, key: Tensor, scale: float, *, causal: bool = True, score_bias: Tensor | None = None
) -> Tensor:
    """The softmax of the scores: ``[heads, queries, keys]``; each row sums to 1.

    With `causal`, each query sees keys up to its position, and the last query the last key. `score_bias` is added to
    the scaled scores (ALiBi, T5's position bias).
    """
    scores = query @ key.mT * scale
    if score_bias is not None:
        scores = scores + score_bias
    if causal:
        queries, keys = scores.shape[-2:]
        future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        scores = scores.masked_fill(future, -torch.inf)
    return torch.softmax(scores, -1)


def weighted_values(probabilities: Tensor, values: Tensor) -> Tensor:
    """Average values ``[keys, heads * value_dim]`` by probabilities ``[heads, queries, keys]``, for each query."""
    return join_heads(probabilities @ split_heads(values, len(probabilities)))
