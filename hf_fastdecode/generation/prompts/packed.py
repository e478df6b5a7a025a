"""Packed prefill: computes each node's keys and values once, all tokens end to end in long rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import keeps_logits
from ...attention.forest import Path, Span
from ...attention.overrides import no_autocast
from ...cache.shared import SharedContextCache
from ...cache.state import PrefillItem
from ..forward_pass import forward_pass, input_device
from .prompt_plan import TOKENS, TokensContinue

CapturedPasses = Callable[[SharedContextCache, Tensor, Sequence[int]], Tensor | None]
"""Prefills a cache's current items of these tokens by captured graphs: logits ``[wanted, vocabulary]`` of the tokens
with these indices; None to run the pass eagerly. See `PrefillPasses`."""


def stacked(model: PreTrainedModel, logits: Sequence[Tensor]) -> Tensor:
    """Stack as is: an inner autocast may have produced another dtype than the outer one's."""
    with no_autocast(input_device(model)):
        return torch.stack(list(logits))


@dataclass(frozen=True)
class PrefillPass:
    """One forward pass over new tokens."""

    wanted: list[int]  # indices of the new tokens that `logits`, [wanted, vocabulary], belong to
    logits: Tensor
    output: Any  # the model's output, whose logits may belong to other tokens; None of a captured pass


def packed_passes(
    model: PreTrainedModel,
    cache: SharedContextCache,
    items: Sequence[PrefillItem],
    tokens: Tensor,
    wanted: Sequence[int],
    *,
    max_tokens: int,
    continuation: TokensContinue = TOKENS,
    embeddings: Callable[[Tensor], Tensor] | None = None,
    positions: Tensor | None = None,
    captured: CapturedPasses | None = None,
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """Compute runs of tokens into the cache.

    They are packed into one row without padding, several runs per forward pass; each token attends to its own path
    only, and states begin anew at each run (`StateLayer.by_segments`). A run longer than `max_tokens` is computed in
    chunks, where layers can continue these.

    Args:
        cache: The cache, with storage for the items' spans.
        items: The runs, parents before their children.
        tokens: ``[length]`` ids of all items, in their order.
        wanted: Indices of tokens to return logits for, ascending.
        continuation: How layers continue the runs' contexts.
        embeddings: Maps ids ``[tokens]`` to ``[tokens, hidden]``, if the prompts are embeddings.
        positions: ``[..., 1, length]`` int64, where they are not those of counted tokens.
        captured: Runs passes by captured graphs where it can; not with embeddings, positions or further arguments.
        arguments: Further model arguments.
    """
    device = input_device(model)
    # Logits of a whole context would take more memory than its keys and values.
    keeps = keeps_logits(model)
    # Further arguments may ask for outputs of every token.
    whole = bool(arguments or cache.state.suffix_rows)  # so are tokens of suffixes
    most = None if whole else cache.state.division.most_of_pass(model.parameters(), max_tokens)
    divide, stop = most is not None, 0
    for items_of_pass, ended in _passes(items, max_tokens if most is None else most, continuation):
        start, stop = stop, stop + sum(item.span.length for item in items_of_pass)
        here = list(wanted[bisect_left(wanted, start) : bisect_left(wanted, stop)])
        wanted_here = [token - start for token in here]
        if captured is not None:
            with cache.prefilling(items_of_pass):
                logits = captured(cache, tokens[start:stop], wanted_here)
            if logits is not None:
                yield PrefillPass(here, logits, None)
                continue
        ids = tokens[start:stop]
        places = _positions(items_of_pass)[None] if positions is None else positions[..., start:stop]
        with cache.prefilling(items_of_pass, divide=divide):
            if (divided := cache.state.current.divided) is not None:
                ids, places = ids[divided.indices], places[..., divided.indices]
                wanted_here, indices = divided.own(wanted_here)
            keep = torch.tensor(wanted_here or [len(ids) - 1], device=device)
            given: dict[str, Any] = {"input_ids": ids[None].to(device)}
            if embeddings is not None:
                given = {"inputs_embeds": embeddings(ids)[None]}
            given |= {"use_cache": True, "return_dict": True} | ({"logits_to_keep": keep} if keeps else {})
            output = forward_pass(model, cache, places.to(device), **given, **arguments)
        for path in ended:
            continuation.end_part(cache, path)
        kept = (output.logits[0] if keeps else output.logits[0, keep])[: len(wanted_here)]
        if divided is not None and here:
            kept = divided.elements_of_all(kept, indices, len(here))
        yield PrefillPass(here, kept, output)


@dataclass(frozen=True)
class UnsharedPrompts:
    """For each row its last prompt tokens, those that no other row shares: ``[length]`` int64 each, on the CPU."""

    tokens: tuple[Tensor, ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.tokens), default=0)

    @property
    def total(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row: ``[rows]`` int64, on the CPU."""
        return torch.tensor([len(tokens) for tokens in self.tokens], dtype=torch.long, device="cpu")

    def of_rows(self, rows: Sequence[int]) -> UnsharedPrompts:
        return UnsharedPrompts(tuple(self.tokens[row] for row in rows))


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


def _positions(items: Iterable[PrefillItem]) -> Tensor:
    firsts = ((item.position, item.span.length) for item in items)
    return torch.cat([torch.arange(first, first + count, device="cpu") for first, count in firsts])


def _passes(
    items: Sequence[PrefillItem], max_tokens: int, continuation: TokensContinue = TOKENS
) -> Iterator[tuple[list[PrefillItem], list[Path]]]:
    """Items in passes of at most `max_tokens`, or one part, each a contiguous run of each segment, parents first; and
    the paths that each pass continues and that end within an item."""
    batch, ended = list[PrefillItem](), list[Path]()
    room, firsts = max_tokens, dict[int, int]()
    parts = (pair for whole in items for pair in enumerate(continuation.parts(whole, max_tokens)))
    for number, item in parts:
        reads = any(span.stop > firsts.get(span.segment, span.stop) for span in item.context)  # of the pass itself
        if batch and (reads or item.span.length > room):
            yield batch, ended
            batch, ended, room, firsts = [], [], max_tokens, {}
        batch.append(item)
        if number:
            ended.append(item.context)
        room -= item.span.length
        firsts.setdefault(item.span.segment, item.span.start)
    if batch:
        yield batch, ended
