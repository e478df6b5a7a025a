"""Slim attention layers, which cache no values, and their attention over a shared-context cache.

Over a shared-context cache, nodes hold rotated keys and values, as for ordinary layers; suffixes are stored slim. Both
give partials, which merge by their log-sum-exp. In a captured step, kernels read lengths and nodes on the device.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import QuantizedCache

from ..._compat import takes_cache
from ...attention.kv import ForestKV, Partial, Scoring, Segment, SlidingWindow, merge
from ...attention.overrides import no_autocast
from ...attention.torch_operators.operators import cannot_run
from ...cache.captured import CapturedCache
from ...cache.handles import DecodeKV, PrefillKV
from ...cache.layers.attention import require_dtype
from ...cache.shared import SharedContextCache
from ...conversion.fit.attention import Tables
from ...errors import Unsupported
from ...kernels.failures import KernelFailedError
from ..config_base import SlimLayer
from .kernel_attention import (
    attend_in_few_launches,
    averages_by_kernel,
    cached_attention,
    captured_attention,
    kernel_refusal,
    layer_refusal,
    partial_of,
)
from .rotation import ROTATION, Rotation, takes_kernels
from .slim_attention import CachedTokens, SlimTokens, attention_scores, cache_dtype, check_trainable


class SlimAttention(SlimTokens):
    """Attention that caches keys from before QK-norm, and V-coordinates instead of keys and values.

    Keys are cached before RoPE, or after it, beside their positions (`SlimConfig.slim_rope`). Without norm and RoPE,
    plan ``x`` caches the layer's inputs instead, with all weights as in the ordinary layer. Precedes an architecture's
    class among base classes, of which it keeps output projection, dropouts and scale; the plan is not ``kv``.

    Attributes:
        values_from: Name of the ordinary layer's value projection. If it is fused with those of queries and keys, the
            slim layer has separate ones, so that keys leave their accumulator in fp32.
        output_projection: Name of the output projection.

    Architectures also override `interleaved`, `norms`, `output`, `dropout_share` where they differ.
    """

    values_from: ClassVar[str] = "v_proj"
    output_projection: ClassVar[str] = "o_proj"
    attends_by_itself: ClassVar[bool] = True  # see `AttendsByItself`
    suffixes_read: ClassVar[str] = "slim suffixes by slim_decode"
    attention_dropout: float

    def __init__(self, config: Any, layer_idx: int, layer: SlimLayer) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.config, self.layer = config, layer
        bias = getattr(self, self.values_from).bias is not None
        delattr(self, self.values_from)
        inputs, width = config.hidden_size, config.num_attention_heads * self.head_dim
        if not hasattr(self, "q_proj"):
            self.q_proj = nn.Linear(inputs, width, bias=bias)
        self.make_projections(config.num_attention_heads, inputs, width, key_bias=bias, value_bias=bias)

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the ordinary layer's arguments, but `ROTATION` in the place of `position_embeddings`.

        Raises ValueError where the layer is not called by a slim model, which gives it `ROTATION`; it caches in 8 bits
        and is being trained; a `QuantizedCache` would round positions; or the cache holds tokens of another
        `slim_rope` or model. Unsupported as `check_shared`.
        """
        rotation: Rotation | None = kwargs.get(ROTATION)
        if self.config.rotary and rotation is None:
            raise ValueError(f"a slim attention layer needs {ROTATION}; call it through a slim model")
        if isinstance(cache, SharedContextCache | CapturedCache):
            check_shared(self.config, attention_mask)
        if isinstance(cache, CapturedCache):
            out = attend_in_few_launches(self, hidden_states, cache, rotation)
            if out is not None:
                return self.output(out), None
        query = self.q_proj(hidden_states)
        dtype = query.dtype  # under autocast that of its products
        stored_dtype = cache_dtype(dtype, self.layer)
        if self.training:
            check_trainable(stored_dtype, self.layer_idx)
        if self.config.unrotates and isinstance(cache, QuantizedCache):
            raise ValueError(
                "a QuantizedCache rounds the positions that slim_rope 'unrotate' caches; set slim_rope of the config "
                "to 'raw', or convert with cache dtype int8"
            )
        exact = self.to_cache(hidden_states)
        if isinstance(cache, SharedContextCache):
            return self.output(shared_attention(self, query, *exact, cache, rotation)), None
        if isinstance(cache, CapturedCache):
            return self.output(captured_attention(self, query, exact, cache, rotation)), None
        cached = self._update(cache, exact, stored_dtype, rotation)
        dropout, weights_wanted = self.dropout_share() if self.training else 0.0, self.weights_wanted(kwargs)
        query = self.scored_query(query, rotation and rotation.tokens)
        if not dropout and not weights_wanted and not self.config.slim_sparsity_threshold:
            with no_autocast(query.device):
                by_kernel = cached_attention(self, query, cached, rotation, attention_mask)
            if by_kernel is not None:
                return self.output(by_kernel.transpose(1, 2).flatten(2).to(dtype)), None
        given = {"dtype": dtype, "dropout": dropout, "weights_wanted": weights_wanted}
        out, weights = self.attend_to(query, cached, rotation and rotation.keys, attention_mask, **given)
        return self.output(out), weights

    def _update(
        self, cache: Any, exact: tuple[Tensor, Tensor], dtype: torch.dtype, rotation: Rotation | None
    ) -> Segment:
        """Append tokens to a cache of transformers, if there is one, and return all cached tokens."""
        with no_autocast(exact[0].device):  # which does not concatenate fp16
            new = self.stored(*exact, dtype, rotation)
            if cache is None:
                return new
            layers = getattr(cache, "layers", ())
            held = getattr(layers[self.layer_idx], "values", None) if self.layer_idx < len(layers) else None
            if held is not None and held.dim() == 4:
                self.require_layout(held)
            return Segment(*cache.update(*new, self.layer_idx))

    @property
    def no_captured_steps(self) -> str | None:
        if (reason := layer_refusal(self)) is not None:
            return f"slim_decode does not attend to what layer {self.layer_idx} caches: {reason}"
        kind = (getattr(self.config, "rope_parameters", None) or {}).get("rope_type")
        if self.config.rotary and kind in ("dynamic", "longrope"):
            return f"RoPE of type {kind!r} changes its frequencies with the length"
        return None

    def suffixes_take_prompts(self, rows: int, room: int, tokens: int, backend: str) -> bool:
        weight = self.k_proj.weight
        if not takes_kernels(backend, weight.device):
            return False
        empty = weight.new_empty(1, 1, 0, self.heads * self.head_dim)
        suffix = self.stored(empty, empty[..., : self.layer.rank], cache_dtype(weight.dtype, self.layer), None)
        bytes_of_nodes = tokens * 2 * empty.shape[-1] * weight.element_size()
        if room * sum(part.shape[-1] * part.element_size() for part in suffix) >= bytes_of_nodes:
            return False
        return kernel_refusal(self, weight.new_empty(rows, self.heads, 1, self.head_dim), suffix) is None

    def output(self, out: Tensor) -> Tensor:
        """Output projection, and residual dropout in architectures whose attention has it."""
        return getattr(self, self.output_projection)(out)

    def dropout_share(self) -> float:
        return self.attention_dropout

    def weights_wanted(self, kwargs: dict[str, Any]) -> bool:
        """Whether a pass with these arguments may be asked for its attention weights."""
        return bool(self.config._attn_implementation == "eager")


def shared_attention(
    layer: SlimTokens,
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    cache: SharedContextCache,
    rotation: Rotation | None,
) -> Tensor:
    """Append a pass's tokens to the cache, and attend to each row's path of nodes and suffix.

    Queries are ``[rows, tokens, heads * head_dim]`` as projected, keys (or inputs) ``[rows, 1, tokens, width]`` and
    coordinates ``[rows, 1, tokens, r]``, not yet rounded to the cache's dtype. Returns ``[rows, tokens, heads *
    value_dim]`` in the query's dtype. Raises ValueError where the cache holds another dtype or number of rows,
    BackendError where the backend ``triton`` is forced, and the kernel cannot attend to the suffixes.
    """
    dtype = query.dtype
    # Prefill of nodes stores nothing slim: the layout alone is needed.
    new = slice(0 if cache.state.current.items and not cache.state.suffix_rows else None)
    with no_autocast(query.device):
        stored_dtype = cache_dtype(dtype, layer.layer)
        stored = layer.stored(keys[:, :, new], coordinates[:, :, new], stored_dtype, rotation)
        to_nodes = layer.scored_query(query, rotation and rotation.tokens).to(dtype)
        if cache.state.current.items:
            new_kv = layer.keys_and_values(CachedTokens(keys, coordinates, rotation and rotation.keys), dtype)
            handle, _ = cache.update(*new_kv, layer.layer_idx, suffix_parts=stored)
            return cast(PrefillKV, handle).attend(to_nodes, Scoring(layer.scaling, None, None, None)).flatten(2)
        handle, _ = cache.update(*stored, layer.layer_idx)
        require_dtype(dtype, handle.layer.storage.node_example)  # suffixes may have another one
        kv = cast(DecodeKV, handle).append()
        to_suffix = layer.scored_query(query, rotation and rotation.own_tokens)
        by_kernel = _by_kernel(layer, to_suffix, kv, rotation, cache)
        merged = by_kernel or _suffix_partial(layer, to_suffix, kv, rotation and rotation.keys)
        if kv.forest.nodes:
            merged = merge(merged, handle.layer.attend_nodes(to_nodes, layer.scaling))
        merged = cache.state.division.merge(merged)
    nodes, pytorch = f"{len(kv.forest.nodes)} node(s)", "PyTorch's operators"
    by = f" and slim suffixes by {pytorch}" if by_kernel is None else f" by {pytorch}, slim suffixes by slim_decode"
    handle.layer.report("decode", nodes + by)
    return merged.out.transpose(1, 2).flatten(2).to(dtype)


def check_shared(config: Any, mask: object) -> None:
    """Raise Unsupported where attention to nodes and to suffixes does not merge: with a window or a threshold."""
    if isinstance(mask, SlidingWindow):
        raise Unsupported(f"slim layers do not share context where a window of {mask.size} tokens hides some")
    if threshold := config.slim_sparsity_threshold:
        raise Unsupported(f"a sparsity threshold ({threshold:g}) is for weights of nodes and suffix together")


def _by_kernel(
    layer: SlimTokens, query: Tensor, kv: ForestKV, rotation: Rotation | None, cache: SharedContextCache
) -> Partial | None:
    """Attention to the suffixes by `slim_decode`; None where it cannot run and the backend is not forced."""
    if not takes_kernels(cache.state.backend, query.device):
        return None
    reason = kernel_refusal(layer, query, kv.suffix)
    if reason is None:
        _, longest = kv.suffix_bounds
        used = Segment(*(part[:, :, :longest] for part in kv.suffix))
        lengths = torch.tensor(kv.lengths(), dtype=torch.int32, device=query.device)
        try:
            return partial_of(layer, averages_by_kernel(layer, query, used, lengths, rotation and rotation.kernel))
        except KernelFailedError as error:  # from now on a reason
            reason = str(error)
    if cache.state.backend == "triton":
        raise cannot_run("triton", reason)
    return None


def _suffix_partial(layer: SlimTokens, query: Tensor, kv: ForestKV, tables: Tables | None) -> Partial:
    """Attention of each row's queries, ``[rows, heads, queries, head_dim]``, to its suffix, causal among them."""
    shortest, longest = kv.suffix_bounds
    keys, coordinates = (part[:, :, :longest] for part in kv.suffix)
    if tables is not None:  # longer than needed, where only the device knew the lengths
        tables = tables[0][:, :longest], tables[1][:, :longest]
    visible = kv.seen_by(query.shape[2]).to(query.device)
    slot = torch.arange(longest, device=query.device)
    if shortest < longest:  # slots after a suffix are undefined, and 0 * NaN is NaN
        lengths = torch.tensor(kv.lengths(), device=query.device)
        used = (slot < lengths[:, None])[:, None, :, None]
        keys, coordinates = keys.where(used, 0), coordinates.where(used, 0)
    tokens = layer.read(keys, coordinates, tables)
    scores = attention_scores(*layer.score_operands(query, tokens), layer.scaling)
    scores = scores.masked_fill(slot >= visible[:, None, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp()  # of a query without a token, 0
    return Partial(layer.values.averaged(weights, tokens.keys, tokens.coordinates), lse)
