"""Which nodes with latents the steps of a call read as keys and values.

A row's step over a node of latents takes ``heads * (2 * latent + rotated)`` multiplications a token, and over its keys
and values ``heads * (key + rotated + value)``; for DeepSeek's sizes 3.4 times fewer. The latents' few bytes are read
once for all heads, the others' once for each. So keys and values pay from some rows on, which are about as many for
any number of heads: both their bytes and the latents' multiplications are proportional to it. Making them takes
``latent * heads * (key + value)`` multiplications a token, which as many rows and steps must save again.
"""

from __future__ import annotations

from typing import Final

import torch

from ...attention.forest import Node, Path, Span, joined
from ...cache.expanded import ExpandedLayer, ExpandedNodes
from ...cache.layers.latent import LatentStorage
from ...cache.shared import SharedContextCache
from .capture_memory import free_memory

FEWEST_ROWS: Final = 32
"""Rows of a node from which its keys and values are made."""

FEWEST_ROWS_LATER: Final = 16
"""Rows of a node from which those that were made are read: finished rows leave it."""

FEWEST_TOKENS: Final = 256
"""Tokens of a node from which a partial of its own, and a merge, cost less than they save."""

FEWEST_ROW_STEPS: Final = 1024
"""Rows of a node, times the steps to come, from which these save more than its keys and values take to make."""

_MOST_STEPS_EXPECTED: Final = 1024
"""Steps that rows are expected to take where more are allowed."""

SHARE_OF_FREE_MEMORY: Final = 0.25
"""Of the memory that is free before the first step, what keys and values of nodes may take."""


def expand_nodes(cache: SharedContextCache) -> None:
    """Make the keys and values of nodes for which that pays, the most read ones first, while they fit in memory."""
    state = cache.state
    state.expanded = None
    latents = {
        layer.index: layer.storage for layer in cache.attention_layers if isinstance(layer.storage, LatentStorage)
    }
    if not latents or len(latents) < len(cache.attention_layers) or state.parallel is not None:
        return
    steps = _MOST_STEPS_EXPECTED
    if state.max_suffix is not None:
        steps = min(steps, state.max_suffix - cache.suffix_length)
    wanted = [node for node in cache.forest.nodes if _pays(node, steps)]
    if not wanted:
        return
    with torch.inference_mode(False), torch.no_grad():
        if runs := _that_fit(wanted, list(latents.values())):
            layers = {index: ExpandedLayer.of(storage, runs) for index, storage in latents.items()}
            state.expanded = ExpandedNodes(runs, layers, min(FEWEST_ROWS_LATER, FEWEST_ROWS))


def _pays(node: Node, steps: int) -> bool:
    """Whether the keys and values of a node save more time in so many steps than they take to make."""
    rows, tokens = node.row_count, node.span.length
    return rows >= FEWEST_ROWS and rows * steps >= FEWEST_ROW_STEPS and tokens >= FEWEST_TOKENS


def _room(device: torch.device) -> float:
    """Bytes that keys and values may take; any number on a CPU, whose free memory is not known."""
    return SHARE_OF_FREE_MEMORY * free_memory(device) if device.type == "cuda" else float("inf")


def _that_fit(wanted: list[Node], latents: list[LatentStorage]) -> Path:
    """The tokens of these nodes whose keys and values fit in memory, as runs."""
    room = _room(latents[0].segments[wanted[0].span.segment].keys.device)
    per_token = len(latents) * ExpandedLayer.of(latents[0], [wanted[0].span[:1]]).nbytes  # layers are alike
    fitting = set[Span]()
    for node in sorted(wanted, key=lambda node: -node.row_count * node.span.length):
        needed = 0 if node.span in fitting else per_token * node.span.length
        if needed <= room:
            room -= needed
            fitting.add(node.span)
    return joined(sorted(fitting, key=lambda span: (span.segment, span.start)))
