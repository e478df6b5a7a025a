"""Which nodes with latents the steps of a call read as keys and values.

A row's step over a node of latents takes ``heads * (2 * latent + rotated)`` multiplications a token, and over its keys
and values ``heads * (key + rotated + value)``; for DeepSeek's sizes 3.4 times fewer. The latents' few bytes are read
once for all heads, the others' once for each. So keys and values pay from some rows on, which are about as many for
any number of heads: both their bytes and the latents' multiplications are proportional to it. Making them takes
``latent * heads * (key + value)`` multiplications a token, which as many rows and steps must save again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import torch

from ...attention.forest import Forest, Node, Path, Span, joined
from ...cache.layers.latent import ExpandedLayer, ExpandedNodes, LatentStorage
from ...cache.shared import SharedContextCache
from ...cache.stores import Kind
from .graph_capture import free_memory

FEWEST_ROWS: Final = 32
"""Rows of a node from which its keys and values are made.

Measured on an H200, a node of 8,192 tokens as latents (512 + 64 numbers) and as keys (128 + 64) and values (128): with
16 heads 28 and 21 us for 16 rows, 42 and 28 for 32, 71 and 23 for 64, 128 and 26 for 128; with 128 heads 129 and 127,
246 and 159, 484 and 131, 950 and 171. The merge with a partial of its own takes some microseconds more.
"""

FEWEST_ROWS_LATER: Final = 16
"""Rows of a node from which those that were made are read: finished rows leave it."""

FEWEST_TOKENS: Final = 256
"""Tokens of a node from which a partial of its own, and a merge, cost less than they save."""

FEWEST_ROW_STEPS: Final = 1024
"""Rows of a node, times the steps to come, from which its keys and values are made.

For DeepSeek's sizes 171 save as many multiplications as making them takes.
"""

MOST_STEPS_EXPECTED: Final = 1024
"""Steps that rows are expected to take where more are allowed."""

SHARE_OF_FREE_MEMORY: Final = 0.25
"""What keys and values of nodes may take of the memory that is free before the first step, but for rows' tokens."""


def expand_nodes(cache: SharedContextCache) -> None:
    """Make the keys and values of nodes for which that pays, the most read ones first, while they fit in memory."""
    state = cache.state
    state.expanded = None
    latents = {
        layer.index: layer.storage for layer in cache.attention_layers if isinstance(layer.storage, LatentStorage)
    }
    alike = all(layer.store.kind is Kind.LATENT and layer.store.window is None for layer in cache.attention_layers)
    if not latents or not alike or state.parallel is not None:
        return
    steps = MOST_STEPS_EXPECTED if state.max_suffix is None else state.max_suffix - cache.suffix_length
    wanted = paying_nodes(cache.forest, steps)
    if not wanted:
        return
    with torch.inference_mode(False), torch.no_grad(), suppress(torch.OutOfMemoryError):  # latents go without
        if runs := _that_fit(wanted, cache, list(latents.values())):
            layers = {index: ExpandedLayer.of(storage, runs) for index, storage in latents.items()}
            state.expanded = ExpandedNodes(runs, layers, min(FEWEST_ROWS_LATER, FEWEST_ROWS))


def paying_nodes(forest: Forest, steps: int) -> list[Node]:
    """The nodes whose keys and values save more time in so many steps than they take to make."""
    return [
        node
        for node in forest.nodes
        if node.row_count >= FEWEST_ROWS
        and node.row_count * min(steps, MOST_STEPS_EXPECTED) >= FEWEST_ROW_STEPS
        and node.span.length >= FEWEST_TOKENS
    ]


def runs_of(spans: Iterable[Span]) -> Path:
    """The tokens of these spans, as few runs."""
    return joined(sorted(set(spans), key=lambda span: (span.segment, span.start)))


def _that_fit(wanted: list[Node], cache: SharedContextCache, latents: list[LatentStorage]) -> Path:
    """The tokens of these nodes whose keys and values fit in memory, as runs."""
    room = _room(latents[0].segments[wanted[0].span.segment].keys.device, cache)
    per_token = len(latents) * ExpandedLayer.of(latents[0], [wanted[0].span[:1]]).nbytes  # layers are alike
    fitting = set[Span]()
    for node in sorted(wanted, key=lambda node: -node.row_count * node.span.length):
        needed = 0 if node.span in fitting else per_token * node.span.length
        if needed <= room:
            room -= needed
            fitting.add(node.span)
    return runs_of(fitting)


def _room(device: torch.device, cache: SharedContextCache) -> float:
    """Bytes that keys and values may take; any number on a CPU, whose free memory is not known."""
    if device.type != "cuda":
        return float("inf")
    tokens = min(MOST_STEPS_EXPECTED, cache.state.max_suffix or MOST_STEPS_EXPECTED)
    rows = cache.rows * tokens * sum(layer.storage.suffix_bytes_per_token for layer in cache.attention_layers)
    return SHARE_OF_FREE_MEMORY * max(0, free_memory(device) - rows)
