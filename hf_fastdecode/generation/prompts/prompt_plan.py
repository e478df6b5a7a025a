"""Compares the prompts of a call with each other and with a cache, and plans the forest and what to prefill."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ...attention.forest import Forest, Path, PrefixTree, SharedRange, Span, path_slice, prefix_tree
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ...cache.state import PrefillItem

_ITEM = 8  # bytes of an int64 id

FEWEST = 2
"""Tokens that are computed from a state at once; see `StatesContinue`."""


@dataclass(frozen=True)
class PromptGroup:
    """So many neighbouring rows with the same prompt."""

    tokens: Tensor  # [length] int64 on the CPU, without padding
    count: int
    gaps: bool = False  # whether the mask hides places between the tokens


def group_prompts(
    input_ids: Tensor, attention_mask: Tensor | None, planes: Tensor | None = None, inputs: Tensor | None = None
) -> list[PromptGroup]:
    """Group neighbouring rows with equal prompts and drop the padding.

    Args:
        input_ids: ``[rows, length]``; the groups may be views of it.
        attention_mask: ``[rows, length]``, nonzero for real tokens; None when all are.
        planes: ``[(planes,) rows or 1, length]``: positions in which equal prompts must agree too, if planes differ.
        inputs: ``[rows]`` int64 on the CPU: numbers of inputs, which equal prompts must have in common.
    """
    same = (input_ids[1:] == input_ids[:-1]).all(1)
    if planes is not None and planes.shape[-2] > 1:
        same &= (planes[..., 1:, :] == planes[..., :-1, :]).all(-1).reshape(-1, len(same)).all(0)
    if inputs is not None:
        same &= (inputs[1:] == inputs[:-1]).to(same.device)
    if attention_mask is not None:
        attention_mask = attention_mask.bool()
        same &= (attention_mask[1:] == attention_mask[:-1]).all(1)
    starts = [0, *(row for row, repeats in enumerate(same.tolist(), 1) if not repeats)]
    counts = [stop - start for start, stop in pairwise([*starts, len(input_ids)])]
    ids = _selected(input_ids, starts).long()
    if attention_mask is None:
        return [PromptGroup(tokens, count) for tokens, count in zip(ids.cpu(), counts, strict=True)]
    ids, mask = torch.stack((ids, _selected(attention_mask, starts).long())).cpu()  # in one transfer
    mask = mask.bool()
    firsts = mask.byte().argmax(1)
    whole = mask.sum(1) == mask.shape[1] - firsts  # no gaps after the padding
    return [
        PromptGroup(ids[index, first:] if no_holes else ids[index][mask[index]], count, gaps=not no_holes)
        for index, (first, no_holes, count) in enumerate(zip(firsts.tolist(), whole.tolist(), counts, strict=True))
    ]


def _selected(table: Tensor, rows: list[int]) -> Tensor:
    """Select rows in order, the first one always; returns the table itself for all rows."""
    if len(rows) == len(table):
        return table
    return table[:1] if len(rows) == 1 else table[rows]


class StoredPrompts:
    """The distinct paths of a cache's rows, sorted by their tokens, to find the longest common prefix by bisection."""

    def __init__(self, cache: SharedContextCache):
        self.next_segment = len(cache.segment_tokens)
        self._paths = list(dict.fromkeys(cache.forest.paths))
        # Sorted as bytes by memcmp; any order works that makes texts with a common prefix neighbours.
        texts = [_bytes(cache.path_tokens(path)) for path in self._paths]
        self._numbers = sorted(range(len(texts)), key=texts.__getitem__)
        self._texts = [texts[number] for number in self._numbers]
        self._first: dict[tuple[int, int], int] = {}

    def longest_match(self, tokens: Tensor) -> tuple[Path, int]:
        """The cache's first path with the longest common prefix, and the length of that prefix."""
        text = _bytes(tokens)
        length = self._longest(text)
        if length == 0:
            return (), 0
        size = length * _ITEM
        head = text[:size]
        alike = (bisect_left(self._texts, head), bisect_right(self._texts, head, key=lambda other: other[:size]))
        if alike not in self._first:
            self._first[alike] = min(self._numbers[slice(*alike)])
        return self._paths[self._first[alike]], length

    def match_lengths(self, prompts: Sequence[Tensor]) -> list[int]:
        """Longest common prefix of each prompt with any path."""
        return [self._longest(_bytes(tokens)) for tokens in prompts]

    def covers(self, other: StoredPrompts) -> bool:
        """Whether every prompt of `other` is a prefix of a prompt here."""
        return all(any(near.startswith(text) for near in self._neighbours(text)) for text in other._texts)

    def _longest(self, text: bytes) -> int:
        ids = np.frombuffer(text, np.int64)
        return max((common_prefix(ids, np.frombuffer(near, np.int64)) for near in self._neighbours(text)), default=0)

    def _neighbours(self, text: bytes) -> list[bytes]:
        """The sorted texts before and after this one, one of which has the longest common prefix."""
        place = bisect_left(self._texts, text)
        return self._texts[max(0, place - 1) : place + 1]


def _bytes(tokens: Tensor) -> bytes:
    return tokens.long().numpy().tobytes()


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many numbers two arrays have in common from their first on."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    place = int(different.argmax()) if length else 0
    return place if length and different[place] else length


@dataclass(frozen=True)
class PromptPlan:
    """Nodes of a batch, and the tokens to prefill."""

    forest: Forest  # the rows' paths over stored and new spans
    items: tuple[PrefillItem, ...]  # runs of tokens to prefill, parents first, contiguous in the new segment
    new_tokens: Tensor  # [length] ids of the new segment
    ends: tuple[int | None, ...]  # index of each group's last token among the new tokens; None if it is stored
    groups: tuple[int, ...]  # for each item, the first group that has its tokens

    @property
    def last_tokens(self) -> list[int]:
        """Indices of the new tokens that prompts end with, ascending."""
        return sorted({end for end in self.ends if end is not None})


@dataclass(frozen=True)
class ComparedPrompts:
    """The prompts of a call with the prefixes that they share with each other and with a cache; see `compare_prompts`.

    Comparing tokens takes most of the time, so a call decides what it can by the lengths below before `plan`.

    Attributes:
        stored: For each group, the path in the cache that begins like it, and the number of tokens in common.
        common: Length of the common prefix of groups ``i`` and ``i + 1``.
        forgone: Where prompts begin alike and share nothing, since that takes further passes: the tokens that it would
            save, and the least that it must save.
    """

    groups: list[PromptGroup]
    stored: list[tuple[Path, int]]
    common: list[int]
    next_segment: int
    min_shared_tokens: int
    recompute: int
    forgone: tuple[int, int] | None = None

    @cached_property
    def _tree(self) -> PrefixTree:
        return prefix_tree([len(group.tokens) for group in self.groups], self.common, least=self.min_shared_tokens)

    @property
    def stored_lengths(self) -> tuple[int, ...]:
        """Tokens of each group that the cache holds."""
        return tuple(length for _, length in self.stored)

    @cached_property
    def reused_lengths(self) -> tuple[int, ...]:
        """Stored tokens of each group that are not computed again."""
        most = (max(0, len(group.tokens) - self.recompute) for group in self.groups)
        return tuple(map(min, self.stored_lengths, most))

    @property
    def unshared_lengths(self) -> list[int]:
        """Last tokens of each group that only one row has."""
        return [
            run.stop - run.start if run is not None and group.count == 1 and run.row_stop - run.row_start == 1 else 0
            for run, group in zip(self._tree.deepest, self.groups, strict=True)
        ]

    @property
    def new_length(self) -> int:
        return sum(run.stop - self._first_new(run) for run in self._tree.ranges)

    def _first_new(self, run: SharedRange) -> int:
        """The first token of a range that is computed; its end if there is none."""
        reused = min(self.reused_lengths[run.row_start : run.row_stop])  # one may end here
        return min(max(reused, run.start), run.stop)

    def without_last(self, counts: Sequence[int]) -> ComparedPrompts:
        """The prompts without the last ``counts[i]`` tokens of group ``i``."""
        lengths = [len(group.tokens) - count for group, count in zip(self.groups, counts, strict=True)]
        groups = zip(self.groups, lengths, strict=True)
        return replace(
            self,
            groups=[PromptGroup(group.tokens[:length], group.count) for group, length in groups],
            stored=[(path, min(held, length)) for (path, held), length in zip(self.stored, lengths, strict=True)],
            common=[min(shared, *both) for shared, both in zip(self.common, pairwise(lengths), strict=True)],
        )

    def apart(self) -> ComparedPrompts:
        """The prompts, none of which share anything."""
        return replace(self, min_shared_tokens=max(len(group.tokens) for group in self.groups) + 1)

    def if_it_saves(self, worth: Callable[[int], int], *, packed: bool = True) -> ComparedPrompts:
        """The prompts, or `apart` if passes of their own for what they have in common take longer than they save.

        Args:
            worth: From the number of further passes, the tokens that these must save.
            packed: Whether what remains of the prompts runs in one pass, and not in one for each length, as where it
                may have images before which no padding may be.
        """
        alone = sum(len(group.tokens) for group in self.groups) - sum(self.reused_lengths)
        lengths = ((run.depth, run.stop - self._first_new(run)) for run in self._tree.ranges)
        passes = {(depth, 0 if packed else length) for depth, length in lengths}
        saved, least = alone - self.new_length, worth(max(0, len(passes) - 1))
        if saved >= least:
            return self
        return replace(self.apart(), forgone=(saved, least) if saved > 0 else None)

    def plan(self) -> PromptPlan:
        """Plan nodes for the shared prefixes, and the prefill of what is not reused."""
        paths: dict[SharedRange | None, Path] = {None: ()}
        ends: dict[SharedRange | None, int] = {}
        items: list[PrefillItem] = []
        new_tokens: list[Tensor] = []
        firsts: list[int] = []
        length = 0
        for run in self._tree.ranges:
            stored_path, _ = self.stored[run.row_start]
            first_new = self._first_new(run)
            path = (*paths[run.parent], *path_slice(stored_path, run.start, first_new))
            if fresh := run.stop - first_new:
                span = Span(self.next_segment, length, fresh)
                items.append(PrefillItem(span, context=path))
                firsts.append(run.row_start)
                new_tokens.append(self.groups[run.row_start].tokens[first_new : run.stop])
                path = (*path, span)
                length += fresh
                ends[run] = length - 1
            paths[run] = path
        deepest = self._tree.deepest
        row_paths = [paths[run] for run, group in zip(deepest, self.groups, strict=True) for _ in range(group.count)]
        tokens = torch.cat(new_tokens) if new_tokens else torch.empty(0, dtype=torch.long, device="cpu")
        last = tuple(ends.get(run) for run in deepest)
        return PromptPlan(Forest.from_paths(row_paths), tuple(items), tokens, last, tuple(firsts))


def compare_prompts(
    groups: list[PromptGroup], stored: StoredPrompts, *, min_shared_tokens: int, recompute: int = 0
) -> ComparedPrompts:
    """Compare prompts, in row order, with each other and with a cache, whose next segment the new tokens become.

    Neighbouring prompts with a common prefix of at least `min_shared_tokens` share nodes, recursively (Hydragen,
    section 3.3). Tokens that the cache holds are reused, but for the last `recompute` of each prompt, computed for
    their logits.
    """
    return ComparedPrompts(
        groups,
        [stored.longest_match(group.tokens) for group in groups],
        [common_prefix(left, right) for left, right in pairwise(group.tokens.numpy() for group in groups)],
        stored.next_segment,
        min_shared_tokens,
        recompute,
    )


def _divided(item: PrefillItem, starts: Sequence[int]) -> list[PrefillItem]:
    """Parts of an item that begin at these of its tokens, each after those before it."""
    span, stops = item.span, (*starts[1:], item.span.length)
    befores = ((span[:start],) if start else () for start in starts)
    return [
        PrefillItem(span[start:stop], (*item.context, *before))
        for start, stop, before in zip(starts, stops, befores, strict=True)
    ]


class TokensContinue:
    """How layers continue what a cache stores: here after any token, since each has keys and values of its own.

    Attributes:
        continues: Whether passes of several tokens continue what is stored.
        scans: Whether layers compute several tokens by a scan, between which no padding may be.
    """

    continues, scans = True, False

    def reusing(
        self,
        compared: ComparedPrompts,
        cache: SharedContextCache,
        worth: Callable[[int], int],
        *,
        text: bool = True,
        alike: bool = True,
    ) -> ComparedPrompts:
        """The prompts, which reuse of a cache what layers can continue, and share what pays for its passes.

        Args:
            worth: See `ComparedPrompts.if_it_saves`.
            text: Whether prompts are of text alone.
            alike: Whether prompts that begin with the same tokens may share these.
        """
        return compared if text else compared.if_it_saves(worth)

    def parts(self, item: PrefillItem, most: int) -> list[PrefillItem]:
        """An item in parts of at most so many tokens, each of which continues what is stored of those before."""
        return _divided(item, range(0, item.span.length, most))

    def why_little(self, shortest: int, prompt: int, held: int, reused: int) -> str | None:
        """Why a prompt reuses less than half of a given cache: it diverges early, as one tokenized separately."""
        if 2 * held >= min(shortest, prompt):
            return None
        return f"{held} of the {shortest} or more tokens of the given cache; the rest of it is prefilled"

    def end_part(self, cache: SharedContextCache, path: Path) -> None:
        """Free what was stored at a path's end for the next part of a prompt alone."""


class StatesContinue(TokensContinue):
    """Layers with states, which continue where a path of the cache ends.

    Whole prompts are computed again where layers cannot continue from a state, or where one token is left: a single
    token runs by other code than several, which may round otherwise. So are those with gaps, and all if a prompt of
    the cache had gaps: states also depend on hidden places.
    """

    scans = True

    def __init__(self, *, continues: bool):
        self.continues = continues

    def reusing(
        self,
        compared: ComparedPrompts,
        cache: SharedContextCache,
        worth: Callable[[int], int],
        *,
        text: bool = True,
        alike: bool = True,
    ) -> ComparedPrompts:
        continues, fewest = self.continues and not cache.gaps, max(compared.recompute, FEWEST)
        most = [len(group.tokens) - fewest if continues and not group.gaps else 0 for group in compared.groups]
        stored = [
            (path, cache.length_with_states(path, min(held, limit)))
            for (path, held), limit in zip(compared.stored, most, strict=True)
        ]
        prompts = replace(compared, stored=stored, recompute=0)
        ends = {path_slice(path, 0, held) for path, held in stored}
        if not (alike and continues and len(ends) == 1) or any(group.gaps for group in compared.groups):
            return prompts.apart()
        # Common prefixes so short that no single token is computed from a state; all prompts reuse the same tokens.
        reused, lengths = prompts.reused_lengths[0], [len(group.tokens) - FEWEST for group in prompts.groups]
        common = [min(shared, *both) for shared, both in zip(prompts.common, pairwise(lengths), strict=True)]
        common = [shared if shared >= reused + FEWEST else min(shared, reused) for shared in common]
        least = max(prompts.min_shared_tokens, FEWEST)
        return replace(prompts, common=common, min_shared_tokens=least).if_it_saves(worth, packed=text)

    def parts(self, item: PrefillItem, most: int) -> list[PrefillItem]:
        """Parts of at least `FEWEST` tokens; whole items where no part would continue the one before."""
        length, most = item.span.length, max(most, 2 * FEWEST)
        starts = list(range(0, length, most)) if self.continues else [0]
        if len(starts) > 1 and length - starts[-1] < FEWEST:
            starts[-1] = length - FEWEST
        return _divided(item, starts)

    def why_little(self, shortest: int, prompt: int, held: int, reused: int) -> str | None:
        if 2 * reused >= held:
            return None
        why = "its layers' scans do not continue states"
        if self.continues:
            why = f"states continue where a prompt or a completion in the cache ends, by at least {FEWEST} new tokens"
        return f"{held} tokens of the given cache, of which {reused} are not computed again: {why}"

    def end_part(self, cache: SharedContextCache, path: Path) -> None:
        cache.forget_states(path)


TOKENS: Final = TokensContinue()


def continuation_of(layout: ModelLayout) -> TokensContinue:
    """How a model's layers continue what a cache stores."""
    return StatesContinue(continues=layout.continues_states) if layout.states else TOKENS
