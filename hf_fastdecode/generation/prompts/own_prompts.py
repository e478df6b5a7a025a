"""Prefill of prompt tokens that no other row shares into the suffix of their row, where that takes fewer bytes.

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
from .prompt_tree import PromptGroup
from .sharing import Shared


@dataclass(frozen=True)
class OwnPrompts:
    """The last tokens of each prompt, those that no other row shares.

    Attributes:
        tokens: For each row its own tokens, ``[length]`` int64 on the CPU.
    """

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
        return torch.tensor([len(own) for own in self.tokens], dtype=torch.long, device="cpu")

    def of_rows(self, rows: Sequence[int]) -> OwnPrompts:
        """Those of some of the rows."""
        return OwnPrompts(tuple(self.tokens[row] for row in rows))


def own_prompts(call: CallContext, found: Shared) -> OwnPrompts | None:
    """Prompt tokens to prefill into suffixes; None if there are none, or nodes store them better.

    Nodes are better where later calls are to reuse prompts, where kernels do not read suffixes, and where suffixes,
    which all have the length of the longest, take no fewer bytes. Of a returned cache the next call makes nodes.

    Args:
        call: The call.
        found: The sharing plan.
    """
    reused = found.known or call.options.reuse_prefix or call.must_share
    layers = _own_layers(call.structure.layout)
    if reused or not layers:
        return None
    forest = found.plan.forest
    lengths = [0] * forest.rows
    for node in forest.nodes:
        if node.row_count == 1:
            lengths[node.row_start] += node.span.length
    prompts = [group.tokens for group in found.groups for _ in range(group.count)]
    own = OwnPrompts(tuple(tokens[len(tokens) - length :] for tokens, length in zip(prompts, lengths, strict=True)))
    room, backend = forest.rows * own.longest, call.options.backend
    fit = all(layer.suffixes_take_prompts(forest.rows, room, own.total, backend) for layer in layers)
    return own if own.total and fit else None


def _own_layers(layout: ModelLayout) -> list[AttendsByItself]:
    """All attention layers, if all attend by themselves to suffixes that a kernel reads; else none."""
    layers = list(layout.own.values())
    refused = not layout.attends_by_itself or any(layer.no_captured_steps for layer in layers)
    return [] if refused else layers


def without_own_tokens(groups: Sequence[PromptGroup], own: OwnPrompts) -> list[PromptGroup]:
    """The prompts without the tokens that no other row shares."""
    shared, row = [], 0
    for group in groups:
        shared.append(PromptGroup(group.tokens[: len(group.tokens) - len(own.tokens[row])], group.count))
        row += group.count
    return shared


def prefill_own_prompts(
    model: PreTrainedModel, cache: SharedContextCache, own: OwnPrompts, *, max_tokens: int
) -> dict[int, Tensor]:
    """Prefill each row's own tokens into its suffix.

    Args:
        model: The enabled model.
        cache: With the nodes of these rows, and without suffixes.
        own: The rows' own tokens.
        max_tokens: Maximum tokens per forward pass.

    Returns:
        By row, the logits ``[vocabulary]`` after its last token, for the rows that have some.
    """
    rows = [row for row, tokens in enumerate(own.tokens) if len(tokens)]
    if not rows:  # a wave of rows that share all of their prompts
        return {}
    ends = (torch.cumsum(own.lengths[rows], 0) - 1).tolist()
    tokens = torch.cat([own.tokens[row] for row in rows])
    logits: dict[int, Tensor] = {}
    with torch.no_grad(), cache.prefilling_suffixes(own.tokens) as numbers:
        items = [PrefillItem(Span(numbers[row], 0, len(own.tokens[row])), cache.forest.paths[row]) for row in rows]
        for run in packed_passes(model, cache, items, tokens, ends, max_tokens=max_tokens):
            logits |= zip(run.wanted, run.logits, strict=True)
    return {row: logits[end] for row, end in zip(rows, ends, strict=True)}
