"""Plans the forest of a batch of prompts: which tokens are shared, which are cached, which to prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...attention.forest import Forest, Path, Span, path_slice
from ...attention.prefix_tree import SharedRange, prefix_tree
from ...cache.state import PrefillItem
from .stored_prompts import StoredPrompts, common_prefix


@dataclass(frozen=True)
class PromptGroup:
    """Neighbouring rows with the same prompt.

    Attributes:
        tokens: ``[length]`` int64 on the CPU, without padding.
        count: Number of rows.
    """

    tokens: Tensor
    count: int


@dataclass(frozen=True)
class PromptPlan:
    """Nodes of a batch, and the tokens to prefill.

    Attributes:
        forest: The rows' paths over stored and new spans.
        items: Runs of tokens to prefill, parents first, contiguous in the new segment.
        new_tokens: ``[length]`` ids of the new segment.
        matched_lengths: Number of tokens of each group that the cache holds.
        known_lengths: Of these, the number that are not computed again.
        ends: Index of each group's last token among the new tokens; None if it is cached.
    """

    forest: Forest
    items: tuple[PrefillItem, ...]
    new_tokens: Tensor
    matched_lengths: tuple[int, ...]
    known_lengths: tuple[int, ...]
    ends: tuple[int | None, ...]


def group_prompts(input_ids: Tensor, attention_mask: Tensor | None, planes: Tensor | None = None) -> list[PromptGroup]:
    """Group neighbouring rows with equal prompts and drop the padding.

    Args:
        input_ids: ``[rows, length]``; the groups may be views of it.
        attention_mask: ``[rows, length]``, nonzero for real tokens; None when all are.
        planes: ``[planes, rows or 1, length]``: positions in which equal prompts must agree too, if planes differ.
    """
    same = (input_ids[1:] == input_ids[:-1]).all(1)
    if planes is not None and planes.shape[1] > 1:
        same &= (planes[:, 1:] == planes[:, :-1]).all(0).all(1)
    if attention_mask is not None:
        attention_mask = attention_mask.bool()
        same &= (attention_mask[1:] == attention_mask[:-1]).all(1)
    starts = [0, *((~same).nonzero().flatten() + 1).tolist()]
    counts = [stop - start for start, stop in pairwise([*starts, len(input_ids)])]
    ids = _rows(input_ids, starts).long().cpu()
    if attention_mask is None:
        return [PromptGroup(tokens, count) for tokens, count in zip(ids, counts, strict=True)]
    mask = _rows(attention_mask, starts).cpu()
    firsts = mask.byte().argmax(1)
    whole = mask.sum(1) == mask.shape[1] - firsts  # no gaps after the padding
    return [
        PromptGroup(ids[index, first:] if no_holes else ids[index][mask[index]], count)
        for index, (first, no_holes, count) in enumerate(zip(firsts.tolist(), whole.tolist(), counts, strict=True))
    ]


def _rows(table: Tensor, rows: list[int]) -> Tensor:
    """Select rows in order; returns the table itself for all rows."""
    return table if len(rows) == len(table) else table[rows]


def plan_prompts(
    groups: Sequence[PromptGroup], stored: StoredPrompts, *, min_shared_tokens: int, recompute: int = 0
) -> PromptPlan:
    """Plan nodes for the prefixes that prompts share with each other and with a cache.

    Neighbouring prompts with a common prefix of at least `min_shared_tokens` share nodes, recursively (Hydragen,
    section 3.3). Tokens that the cache holds are reused.

    Args:
        groups: The prompts in row order.
        stored: The cache's prompts; the new tokens become its next segment.
        min_shared_tokens: Minimum length of a shared node, at any depth.
        recompute: Number of last tokens per prompt to compute even if cached, for their logits.
    """
    prompts = [group.tokens for group in groups]
    matches = [stored.longest_match(tokens) for tokens in prompts]
    known = [
        (path, min(matched, max(0, len(tokens) - recompute)))
        for (path, matched), tokens in zip(matches, prompts, strict=True)
    ]
    shared = [common_prefix(left, right) for left, right in pairwise(tokens.numpy() for tokens in prompts)]
    tree = prefix_tree([len(tokens) for tokens in prompts], shared, least=min_shared_tokens)
    paths: dict[SharedRange | None, Path] = {None: ()}
    ends: dict[SharedRange | None, int] = {}
    items: list[PrefillItem] = []
    new_tokens: list[Tensor] = []
    length = 0
    for run in tree.ranges:
        known_path, _ = known[run.row_start]
        known_length = min(length for _, length in known[run.row_start : run.row_stop])  # one may end here
        fresh_start = min(max(known_length, run.start), run.stop)
        path = (*paths[run.parent], *path_slice(known_path, run.start, fresh_start))
        if fresh := run.stop - fresh_start:
            span = Span(stored.next_segment, length, fresh)
            items.append(PrefillItem(span, context=path))
            new_tokens.append(prompts[run.row_start][fresh_start : run.stop])
            path = (*path, span)
            length += fresh
            ends[run] = length - 1
        paths[run] = path
    row_paths = [paths[run] for run, group in zip(tree.deepest, groups, strict=True) for _ in range(group.count)]
    tokens = torch.cat(new_tokens) if new_tokens else torch.empty(0, dtype=torch.long, device="cpu")
    return PromptPlan(
        forest=Forest.from_paths(row_paths),
        items=tuple(items),
        new_tokens=tokens,
        matched_lengths=tuple(matched for _, matched in matches),
        known_lengths=tuple(known_length for _, known_length in known),
        ends=tuple(ends.get(run) for run in tree.deepest),
    )
