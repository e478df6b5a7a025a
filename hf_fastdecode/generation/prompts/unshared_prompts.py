"""Prefill of prompt tokens that only one row has into its suffix, where that takes fewer bytes.

Layers that attend by themselves store suffixes in fewer bytes than nodes, which hold keys and values because their
bytes are divided by the rows that read them. A node of one row divides them by nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.forest import Span
from ...cache.layers.own import AttendsByItself
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ...cache.state import PrefillItem
from ..call_context import CallContext
from .packed import packed_passes
from .sharing import Shared


@dataclass(frozen=True)
class UnsharedPrompts:
    """For each row its last prompt tokens, those that no other row shares: ``[length]`` int64 each, on the CPU."""

    tokens: tuple[Tensor, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(map(len, self.tokens), default=0)

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row: ``[rows]`` int64, on the CPU."""
        return torch.tensor([len(tokens) for tokens in self.tokens], dtype=torch.long, device="cpu")

    def of_rows(self, rows: Sequence[int]) -> UnsharedPrompts:
        """Those of some of the rows."""
        return UnsharedPrompts(tuple(self.tokens[row] for row in rows))


def unshared_prompts(call: CallContext, found: Shared) -> UnsharedPrompts | None:
    """Prompt tokens to prefill into suffixes; None if there are none, or nodes store them better.

    Nodes are better where later calls are to reuse prompts, where kernels do not read suffixes, and where suffixes,
    which all have the length of the longest, take no fewer bytes; or divided between processes. Of a returned cache
    the next call makes nodes.
    """
    reused = found.reuses or call.options.reuse_prefix or call.must_share or call.structure.parallel is not None
    layers = _own_layers(call.structure.layout)
    if reused or not layers:
        return None
    lengths = zip(found.prompts.groups, found.prompts.unshared_lengths, strict=True)
    tokens = [group.tokens[len(group.tokens) - length :] for group, length in lengths for _ in range(group.count)]
    unshared, rows = UnsharedPrompts(tuple(tokens)), len(tokens)
    room, backend = rows * unshared.longest, call.options.backend
    fit = all(layer.suffixes_take_prompts(rows, room, unshared.total, backend) for layer in layers)
    return unshared if unshared.total and fit else None


def _own_layers(layout: ModelLayout) -> list[AttendsByItself]:
    """All attention layers, if all attend by themselves to suffixes that a kernel reads; else none."""
    layers = list(layout.own.values())
    refused = not layout.attends_by_itself or any(layer.no_captured_steps for layer in layers)
    return [] if refused else layers


def prefill_unshared(
    model: PreTrainedModel, cache: SharedContextCache, unshared: UnsharedPrompts, *, max_tokens: int
) -> dict[int, Tensor]:
    """Prefill unshared tokens into the suffixes of a cache that has the nodes of these rows.

    Returns, by row, the logits ``[vocabulary]`` after its last token, for the rows that have some.
    """
    rows = [row for row, tokens in enumerate(unshared.tokens) if len(tokens)]
    if not rows:  # a wave of rows that share all of their prompts
        return {}
    ends = (torch.cumsum(unshared.lengths[rows], 0) - 1).tolist()
    tokens = torch.cat([unshared.tokens[row] for row in rows])
    logits: dict[int, Tensor] = {}
    with torch.no_grad(), cache.prefilling_suffixes(unshared.tokens) as numbers:
        items = [
            PrefillItem(Span(numbers[row], 0, len(unshared.tokens[row])), cache.forest.paths[row]) for row in rows
        ]
        for run in packed_passes(model, cache, items, tokens, ends, max_tokens=max_tokens):
            logits |= zip(run.wanted, run.logits, strict=True)
    return {row: logits[end] for row, end in zip(rows, ends, strict=True)}
