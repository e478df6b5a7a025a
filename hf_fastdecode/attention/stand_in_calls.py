"""What stand-ins for attention code (`own_code`) call: attention to the cache, and what a pass knows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import EncoderDecoderCache

from .active_passes import lengths_of_pass
from .interface import shared_context_attention
from .placeholders import SharedKV, SlidingWindow

_positions: ContextVar[Tensor | None] = ContextVar("hf_fastdecode_positions", default=None)


@contextmanager
def at_positions(position_ids: Tensor | None) -> Iterator[None]:
    """Context of a forward pass over tokens at these positions, ``[rows or 1, queries]`` int64."""
    token = _positions.set(position_ids)
    try:
        yield
    finally:
        _positions.reset(token)


def given_positions() -> Tensor | None:
    """As `positions_of_pass`; None where the pass is given none."""
    return _positions.get()


def positions_of_pass() -> Tensor:
    """Positions of the current pass's tokens, for stand-ins whose module is not given them; see `at_positions`."""
    positions = _positions.get()
    assert positions is not None
    return positions


def attend_shared(
    module: nn.Module,
    query: Tensor,
    kv: SharedKV,
    *,
    scaling: float,
    window: int | None = None,
    distances: Tensor | None = None,
) -> Tensor:
    """Attention for stand-ins (`own_code`): causal, and within a window if given.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        kv: What the cache layer's ``update`` returned.
        distances: Biases by distance, see `Scoring.distances`.

    Returns:
        ``[batch, queries, heads, head_dim]``.
    """
    lengths = lengths_of_pass()
    binding = window if lengths is None else lengths.keep_if_binding(window)
    mask = None if binding is None else SlidingWindow(binding)
    own = {"sliding_window": window, "is_causal": True, "distances": distances}
    out, _ = shared_context_attention(module, query, kv, kv, mask, scaling, **own)
    return out


def attend_encoded(
    module: Any,
    query: Tensor,
    cache: EncoderDecoderCache,
    mask: Any,
    *,
    scaling: float,
    project: Callable[[], tuple[Tensor, Tensor]],
) -> Tensor:
    """Cross-attention for stand-ins: to an encoder's output, whose keys and values a layer's first pass stores.

    Args:
        module: The layer's attention, with its index as ``layer_idx``.
        query: ``[batch, heads, queries, head_dim]``.
        cache: What the decoder was given, see `cache.layers.cross.CrossView`.
        mask: What the mask function returned.
        project: Makes keys and values, ``[inputs, kv_heads, tokens, head_dim]`` each; called in the first pass.

    Returns:
        ``[batch, queries, heads, head_dim]``.
    """
    stored, layer = cache.cross_attention_cache, module.layer_idx
    kv: Any = stored.layers[layer].keys
    if not cache.is_updated.get(layer):
        kv, _ = stored.update(*project(), layer)
        cache.is_updated[layer] = True
    out, _ = shared_context_attention(module, query, kv, kv, mask, scaling)
    return out


def outgrows(length: int) -> bool:
    """Whether the longest row of the pass has more tokens, for stand-ins that compute something else then."""
    lengths = lengths_of_pass()
    return lengths is not None and lengths.keep_if_binding(length) is not None


def kept_for_capture(key: Hashable, make: Callable[[int], Tensor]) -> Tensor:
    """A table that a captured graph reads, and that is kept as long as the graph.

    It may be too short for the longest row, see `outgrows`: a capture serves no rows that outgrow its tables.

    Args:
        key: Tells it from other tables of the capture.
        make: Makes it, given the tokens of the longest row; called in the capture's first pass, which is not captured.
    """
    lengths = lengths_of_pass()
    assert lengths is not None
    if key not in lengths.tables:
        lengths.tables[key] = make(lengths.longest)
    return lengths.tables[key]
