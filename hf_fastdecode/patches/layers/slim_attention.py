"""Cached tokens of slim layers, their keys and values, and attention to them in PyTorch's operators.

Softmax sparsity, where a config asks for it (Slim attention, section 3): tokens whose attention weight is below a
threshold add nothing, and the other weights are not renormalised. PyTorch's operators multiply zeros as any number, so
it saves no time; it shows what a kernel that skips tokens could save, and at which error.

Projections of cached inputs are applied on whichever side of the softmax is cheaper (section 6, option 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._compat import setting
from ...attention.kv import Segment
from ...attention.overrides import no_autocast
from ...conversion.fit.attention import Tables, rotate, unrotate
from ...conversion.fit.cached_numbers import (
    DIGITS,
    EIGHT_BITS,
    load,
    store,
    stored_bytes,
    with_positions,
    without_positions,
)
from ..config_base import SlimLayer, check_threshold
from .rotation import Rotation
from .slim_values import SlimValues, wide


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
    """A projection of keys or values that is applied to cached inputs, to queries, or to averages of inputs."""

    def forward(
        self, x: Tensor, heads: int | None = None, *, to_inputs: bool = False, with_bias: bool = True
    ) -> Tensor:
        """Multiply inputs ``[..., d]``, to ``[..., e]`` in the weight's dtype.

        With `heads`, each head of `x` is multiplied by the weight of that head, and nothing is rounded to less than
        fp32: averages of inputs, ``[rows, heads, queries, d]``, always with the bias; or with `to_inputs` queries,
        ``[rows, heads, queries, head_dim]``, to be scored against inputs: ``q W_K,i^T``, without the bias, which adds
        one number to all scores of a query.
        """
        if heads is None:
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias if with_bias else None)
        dtype = wide(x.dtype)
        weight = self.weight.to(dtype).unflatten(0, (heads, -1))  # [heads, head_dim, d]
        if to_inputs:
            return x.to(dtype) @ weight
        out = x.to(dtype) @ weight.mT
        return out if self.bias is None else out + self.bias.to(dtype).unflatten(0, (heads, 1, -1))


@dataclass(frozen=True)
class InputValues:
    """Values of cached inputs ``[rows, 1, tokens, d]`` by their projection: inputs are averaged, then projected.

    It has the methods of `slim_values.SlimValues`.
    """

    projection: InputProjection
    heads: int

    def per_token(self, keys: Tensor, coordinates: Tensor) -> Tensor:
        return self.projection(keys[:, 0])

    def averaged(self, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
        flat = probabilities.flatten(1, 2)  # [rows, heads * queries, tokens]: all heads average the same inputs
        average = (flat @ keys[:, 0].to(flat.dtype)).unflatten(1, probabilities.shape[1:3])
        return self.projection(average, self.heads)


CachedValues = SlimValues | InputValues
"""Values that follow from what a layer caches."""


QUERIES_AT_ONCE: Final = 256
"""Queries whose attention weights are in memory at a time, where a threshold needs these."""

_below: ContextVar[list[Tensor] | None] = ContextVar("weights_below_threshold", default=None)


@contextmanager
def counted() -> Iterator[list[Tensor]]:
    """Collect the number of weights below the threshold at each use, with the zeros of masked tokens."""
    counts: list[Tensor] = []
    with setting(_below, counts):
        yield counts


def without_small(probabilities: Tensor, threshold: float) -> Tensor:
    """Attention weights, ``[rows, heads, queries, tokens]``, with zeros for those below a threshold."""
    small = probabilities < threshold
    if (counts := _below.get()) is not None:
        counts.append(small.sum())
    return probabilities.masked_fill(small, 0)


def averaged(values: CachedValues, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
    """`SlimValues.averaged` of weights that need not sum to 1: constants of the values are weighted too."""
    total = probabilities.sum(-1, keepdim=True)
    shares = probabilities / total.clamp(min=torch.finfo(total.dtype).tiny)
    return values.averaged(shares, keys, coordinates) * total


def cache_dtype(model_dtype: torch.dtype, layer: SlimLayer) -> torch.dtype:
    """Dtype of a layer's cache: `SlimLayer.cache_dtype`, or by default the model's, in which inputs are exact.

    Keys of bf16 models are by default cached in fp16 where their range allows: less error in the same bytes.
    """
    if layer.cache_dtype is not None:
        return getattr(torch, layer.cache_dtype)
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

    Few queries average keys and multiply the averages by the matrix M that maps keys to values. For many, the values
    of all tokens are made first, at the cost of an ordinary value projection, and PyTorch's fused attention runs.

    Args:
        query: ``[rows, heads, queries, head_dim]`` after RoPE, in fp32.
        rotated_keys: ``[rows, heads or 1, tokens, head_dim]`` after RoPE, in fp32.
        keys: ``[rows, 1, tokens, heads * head_dim]`` as cached, dequantised from 8 bits; or cached inputs,
            ``[rows, 1, tokens, d]``.
        coordinates: ``[rows, 1, tokens, r]``, likewise.
        mask: ``[rows, 1 or heads, queries, tokens]`` of bool, or to be added to scores; None for `causal_mask`, or
            with ``causal=False`` for all tokens.
        dropout, threshold: Share of the weights that is dropped, and bound below which they count as 0; 0 for neither.
        dtype: Dtype of fused attention and of the result.
        weights_wanted: Whether to return the attention weights, which fused attention does not give.

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

    One query sees all tokens. Several are the first tokens; after them are free slots of a static cache.
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
    if mask is None or mask.shape[-2] == 1:
        return [mask] * -(-queries // at_once)
    return mask.split(at_once, -2)


_TOKENS_AT_ONCE = 8192
"""Cached tokens whose keys and values are made at a time: their intermediate results are in fp32."""


class CachedTokens(NamedTuple):
    """Tokens as they are read from a cache.

    Keys are ``[rows, 1, tokens, heads * head_dim]`` before norm and RoPE, less the offset, or inputs; coordinates
    ``[rows, 1, tokens, r]``; tables are of the tokens' positions, None without RoPE. `rotated` are keys after RoPE,
    less the rotated offset, where they were cached so and need no norm.
    """

    keys: Tensor
    coordinates: Tensor
    tables: Tables | None
    rotated: Tensor | None = None


class SlimTokens(nn.Module):
    """Base class of slim attention layers: their cached tokens, and the keys and values computed from them.

    With plans ``x`` and ``e`` inputs ``[rows, 1, tokens, d]`` are in the place of keys, beside V-coordinates of width
    0; such layers have neither norm nor RoPE.

    Attributes:
        projections: Names of the projections of queries, keys and values.
        norms: Names of the modules of QK-norm, of queries and of keys, which layers need not have.
        interleaved: Whether RoPE pairs coordinates 2 i and 2 i + 1 (GPT-J, Cohere), not i and i + n of 2 n (Llama).
        tables: Makes the tables of positions ``[rows or 1, tokens]``; set by decoders with RoPE.
        layer: Cache layout of the layer.
        heads: Number of heads, the same for queries and for keys and values.
        slim: Values of cached keys and V-coordinates.
    """

    projections: ClassVar[tuple[str, str, str]] = ("q_proj", "k_proj", "v_proj")
    norms: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    interleaved: ClassVar[bool] = False
    tables: Callable[[Tensor], Tables]
    config: Any
    layer_idx: int
    heads: int
    head_dim: int
    scaling: float
    caches_inputs: bool
    read_dtype: torch.dtype
    q_proj: nn.Linear
    k_proj: Any  # a KeyProjection, or an InputProjection where inputs are cached
    layer: SlimLayer
    slim: SlimValues

    def make_projections(self, heads: int, inputs: int, width: int, *, key_bias: bool, value_bias: bool) -> None:
        """Make the projection of keys, and that of values, which only caches of inputs need, or its replacement."""
        _, key, value = self.projections
        self.heads, self.caches_inputs = heads, self.layer.plan in ("x", "e")
        self.read_dtype = getattr(torch, self.layer.cache_dtype or "float32")  # which matters for 8 bits alone
        if self.caches_inputs:
            setattr(self, key, InputProjection(inputs, width, bias=key_bias))
            setattr(self, value, InputProjection(inputs, width, bias=value_bias))
        else:
            setattr(self, key, KeyProjection(inputs, width, bias=key_bias))
            matrix_dtype = getattr(torch, self.config.slim_matrix_dtype)
            self.slim = SlimValues(inputs, width, width, self.layer.rank, matrix_dtype)

    @property
    def values(self) -> CachedValues:
        if self.caches_inputs:
            return InputValues(getattr(self, self.projections[2]), self.heads)
        return self.slim

    def to_cache(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and V-coordinates of inputs ``[rows, tokens, d]``, or the inputs, before any rounding."""
        if self.caches_inputs:
            return inputs[:, None], inputs[:, None, :, :0]
        return self.slim.to_cache(inputs, getattr(self, self.projections[1])(inputs))

    def stored(self, keys: Tensor, coordinates: Tensor, dtype: torch.dtype, rotation: Rotation | None) -> Segment:
        """Tokens as they are cached: rounded, and with ``unrotate`` rotated, with positions beside the coordinates.

        Of keys ``[rows, 1, tokens, heads * head_dim]`` before RoPE, or inputs, coordinates ``[rows, 1, tokens, r]``,
        and the tables of a pass that begins with these tokens. In 8 bits scales follow the elements.
        """
        if rotation is None or not self.config.unrotates:
            return Segment(store(keys, dtype, self.head_dim), store(coordinates, dtype, self.head_dim))
        count = keys.shape[2]
        cos, sin = (table[:, :count] for table in rotation.tokens)
        keys = rotate(self._heads(keys[:, 0]), (cos, sin), interleaved=self.interleaved)
        beside = with_positions(store(coordinates, dtype, self.head_dim), rotation.positions[:, :count])
        return Segment(store(self._joined(keys), dtype, self.head_dim), beside)

    def require_layout(self, cached: Tensor) -> None:
        """Raise ValueError for a cache of another `slim_rope` or model, by its tensor in the place of values."""
        dtype = cache_dtype(getattr(self, self.projections[1]).weight.dtype, self.layer)
        width = stored_bytes(self.layer.rank, dtype, self.head_dim) // dtype.itemsize + DIGITS * self.config.unrotates
        if (cached.shape[1], cached.shape[-1]) != (1, width):
            raise ValueError(
                f"layer {self.layer_idx} caches {width} elements per token beside keys with slim_rope "
                f"{self.config.slim_rope!r}, and the cache holds {cached.shape[1]} * {cached.shape[-1]}; begin a new "
                "cache where slim_rope changes, and for each model"
            )

    def read(self, keys: Tensor, coordinates: Tensor, tables: Tables | None) -> CachedTokens:
        """Inverse of `stored`; `tables` are of the tokens' positions, where these are not cached."""
        keys, dtype = load(keys, self.read_dtype, self.head_dim), self.read_dtype
        if not (self.config.rotary and self.config.unrotates):
            return CachedTokens(keys, load(coordinates, dtype, self.head_dim), tables)
        coordinates, positions = without_positions(coordinates)
        tables = self.tables(positions)
        rotated = self._heads(keys[:, 0].to(wide(keys.dtype)))
        plain = self._joined(unrotate(rotated, tables, interleaved=self.interleaved))
        decoded = load(coordinates, dtype, self.head_dim)
        return CachedTokens(plain, decoded, tables, None if self.normalizes else rotated)

    @property
    def normalizes(self) -> bool:
        """Whether there is QK-norm; keys are cached before it."""
        return self.norms[0] in self._modules

    def norm(self, module: Any, x: Tensor) -> Tensor:
        """QK-norm of a whole projection, ``[rows, tokens, heads * head_dim]``."""
        return module(x)

    def scored_query(self, query: Tensor, tables: Tables | None) -> Tensor:
        """Normalise and rotate projected queries, ``[rows, tokens, heads * head_dim]``.

        Returns ``[rows, heads, tokens, head_dim]`` in fp32.
        """
        if (norm := self._modules.get(self.norms[0])) is not None:
            query = self.norm(norm, query)
        query = self._heads(query.to(wide(query.dtype)))
        return query if tables is None else rotate(query, tables, interleaved=self.interleaved)

    def scored_keys(self, tokens: CachedTokens) -> Tensor:
        """Keys, normalised and rotated: ``[rows, heads, tokens, head_dim]`` in fp32, or as cached without RoPE."""
        keys, _, tables, rotated = tokens
        if self.caches_inputs:  # without their bias, as queries over inputs
            return self._heads(getattr(self, self.projections[1])(keys[:, 0], with_bias=False))
        if tables is None:  # the key offset may be left out: it adds one number to all scores of a query
            return keys[:, 0].unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if rotated is not None:
            offset = self._heads(self.slim.key_offset[None, None])
            return rotated + rotate(offset, tables, interleaved=self.interleaved)
        exact = keys[:, 0].to(wide(keys.dtype)) + self.slim.key_offset
        if (norm := self._modules.get(self.norms[1])) is not None:
            exact = self.norm(norm, exact)
        return rotate(self._heads(exact), tables, interleaved=self.interleaved)

    def score_operands(self, query: Tensor, tokens: CachedTokens, *, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
        """Queries and keys, as `slim_attention` takes them, from queries ``[rows, heads, queries, head_dim]``.

        For few queries over cached inputs ``q W_K,i^T`` and the inputs, ``[rows, 1, tokens, d]``, which is less work.
        Dropout of attention weights needs the values of each token.
        """
        few = query.shape[2] < min(query.shape[-1], tokens.keys.shape[-1])
        if self.caches_inputs and few and not dropout:
            return getattr(self, self.projections[1])(query, self.heads, to_inputs=True), tokens.keys.to(query.dtype)
        return query, self.scored_keys(tokens).to(query.dtype)

    def attend_to(
        self, query: Tensor, cached: Segment, tables: Tables | None, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of normalised and rotated queries to what is cached, by PyTorch's operators, see `slim_attention`.

        Queries are ``[rows, heads, queries, head_dim]``, tables of the cached tokens' positions.
        """
        with no_autocast(query.device):
            tokens = self.read(*cached, tables)
            query, scored = self.score_operands(query, tokens, dropout=options["dropout"])
        options |= {"scaling": self.scaling, "threshold": self.config.slim_sparsity_threshold}
        return slim_attention(query, scored, tokens.keys, tokens.coordinates, self.values, mask, **options)

    def keys_and_values(self, tokens: CachedTokens, dtype: torch.dtype) -> Segment:
        """Make the keys and values that an ordinary layer caches, ``[rows, heads, tokens, head_dim]``."""
        scored = self.scored_keys(tokens)
        values = (self.values if self.caches_inputs else self.slim).per_token(tokens.keys, tokens.coordinates)
        return Segment(scored.to(dtype), values.unflatten(-1, (scored.shape[1], -1)).transpose(1, 2).to(dtype))

    def as_nodes(self, keys: Tensor, coordinates: Tensor, positions: Tensor, dtype: torch.dtype | None) -> Segment:
        """Make keys and values of cached tokens, see `AttendsByItself.as_nodes` and `require_layout`."""
        self.require_layout(coordinates)
        dtype, made = dtype or getattr(self, self.projections[1]).weight.dtype, None
        for start in range(0, max(1, keys.shape[2]), _TOKENS_AT_ONCE):
            part = slice(start, start + _TOKENS_AT_ONCE)
            rotates = self.config.rotary and not self.config.unrotates
            tables = self.tables(positions[:, part]) if rotates else None
            new = self.keys_and_values(self.read(keys[:, :, part], coordinates[:, :, part], tables), dtype)
            if keys.shape[2] <= _TOKENS_AT_ONCE:
                return new
            if made is None:
                made = Segment(*(one.new_empty(*one.shape[:2], keys.shape[2], one.shape[-1]) for one in new))
            for whole, one in zip(made, new, strict=True):
                whole[:, :, part] = one
        assert made is not None
        return made

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _joined(self, x: Tensor) -> Tensor:
        """``[rows, heads, tokens, head_dim]`` to ``[rows, 1, tokens, heads * head_dim]``."""
        return x.transpose(1, 2).flatten(2)[:, None]
