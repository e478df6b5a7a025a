"""Keys and values from the cached tokens of slim layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.kv import Segment
from ...attention.overrides import no_autocast
from ...conversion.fit.attention import Tables, rotate, unrotate
from ...conversion.fit.cached_numbers import DIGITS, load, store, stored_bytes, with_positions, without_positions
from ..config_base import SlimLayer
from .rotation import Rotation
from .slim_attention import CachedValues, InputProjection, InputValues, KeyProjection, cache_dtype, slim_attention
from .slim_values import SlimValues, wide

_TOKENS_AT_ONCE = 8192
"""Cached tokens whose keys and values are made at a time: their intermediate results are in fp32."""


class CachedTokens(NamedTuple):
    """Tokens as they are read from a cache.

    Attributes:
        keys: ``[rows, 1, tokens, heads * head_dim]`` before norm and RoPE, less the offset; or inputs.
        coordinates: ``[rows, 1, tokens, r]``.
        tables: Tables of the tokens' positions; None without RoPE.
        rotated: Keys after RoPE, less the rotated offset, where they were cached so and need no norm.
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
        """Module that makes values of cached tokens."""
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
