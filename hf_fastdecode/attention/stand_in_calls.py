"""What stand-ins for attention code (`own_code`) call: attention to the cache, and what a pass knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

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


def outgrows(length: int) -> bool:
    """Whether the longest row of the pass has more tokens, for stand-ins that compute something else then."""
    lengths = lengths_of_pass()
    return lengths is not None and lengths.keep_if_binding(length) is not None
