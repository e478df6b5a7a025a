"""Prefill by rows: each distinct prompt is a row of the pass, with the padding and the positions that stock gives it.

It serves what packed prefill, which lays all tokens end to end in one row, cannot: positions whose planes differ,
layers with a state per row, and decoders with an encoder, whose prompts differ where its inputs do. Every prompt is a
node, shared by its samples and beams; common beginnings of different prompts are not shared. A prompt that continues a
path of a given cache runs in a pass of its own, without padding, which would otherwise come between the state at the
path's end and the prompt's next token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import keeps_logits
from ...cache.layers.cross import begin_of
from ...cache.shared import SharedContextCache
from ..forward_pass import forward_pass, input_device
from .packed import PrefillPass
from .prompt_plan import PromptGroup, PromptPlan


class Rows(NamedTuple):
    """The rows of a call, as its first pass is given them.

    Attributes:
        inputs: ``[rows, width]`` ids, or ``[rows, width, hidden]`` embeddings.
        attention_mask: ``[rows, width]``, or None.
        position_ids: ``[rows or 1, width]``, or ``[planes, rows or 1, width]`` where planes differ.
        inputs_of: ``[rows]`` int64 on the CPU: which encoder input each row reads, if there are any.
    """

    inputs: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    inputs_of: Tensor | None = None

    @classmethod
    def of(
        cls,
        inputs: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        inputs_of: Tensor | None = None,
    ) -> Rows:
        """Rows whose positions, where none are given, count the tokens that the mask shows."""
        if position_ids is None:
            shown = _all_shown(inputs).long() if attention_mask is None else attention_mask.long()
            position_ids = (shown.cumsum(1) - 1).clamp_min(0)
        return cls(inputs, attention_mask, position_ids, inputs_of)

    def distinct(self, groups: Sequence[PromptGroup]) -> Rows:
        """The first row of each group."""
        firsts = torch.tensor([0, *(group.count for group in groups[:-1])], device="cpu").cumsum(0)
        firsts = firsts.to(self.inputs.device)
        return self.part(firsts)

    def part(self, rows: slice | Tensor) -> Rows:
        """Some of the rows."""
        places = self.position_ids
        mask = None if self.attention_mask is None else self.attention_mask[rows]
        here = rows.to(places.device) if isinstance(rows, Tensor) else rows
        inputs_of = self.inputs_of
        if inputs_of is not None:
            inputs_of = inputs_of[rows.cpu() if isinstance(rows, Tensor) else rows]
        return Rows(self.inputs[rows], mask, places if places.shape[-2] == 1 else places[..., here, :], inputs_of)

    def last_tokens(self, count: int) -> Rows:
        """The last tokens of one row, without padding."""
        mask, width = self.attention_mask, self.inputs.shape[1]
        shown = torch.arange(width, device="cpu") if mask is None else mask[0].nonzero().flatten()
        last = shown[-count:]
        places = self.position_ids[..., last.to(self.position_ids.device)]
        return Rows(self.inputs[:, last.to(self.inputs.device)], None, places)


def row_passes(
    model: PreTrainedModel,
    cache: SharedContextCache,
    plan: PromptPlan,
    rows: Rows,
    *,
    keep: int,
    max_tokens: int,
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """Compute the plan's nodes into the cache, pass by pass, then set its forest.

    Args:
        cache: The cache the plan was made for; the tokens become its next segment.
        plan: With a node for each prompt.
        rows: The distinct rows, one for each of the plan's items.
        keep: Last positions of each row to return logits for.
        max_tokens: Maximum positions per forward pass, padding included; a pass has at least one row.
    """
    cache.add_segment(plan.new_tokens)
    at_once = max(1, max_tokens // rows.inputs.shape[1])
    if rows.inputs_of is None or cache.inputs is None:
        yield from _row_passes(model, cache, plan, rows, _passes(plan, at_once), keep=keep, **arguments)
    else:
        begins = [begin_of((*item.context, item.span)) for item in plan.items]
        cache.inputs.assign(begins, rows.inputs_of.tolist())
        runs = _passes_by_input(rows.inputs_of, at_once)
        done = list(_row_passes(model, cache, plan, rows, runs, keep=keep, **arguments))
        wanted = torch.tensor([token for one in done for token in one.wanted], device="cpu")
        wanted, order = wanted.sort()
        logits = torch.cat([one.logits for one in done])
        yield PrefillPass(wanted.tolist(), logits.index_select(0, order.to(logits.device)), done[-1].output)
    cache.set_forest(plan.forest, rows.inputs.shape[1])


def _row_passes(
    model: PreTrainedModel,
    cache: SharedContextCache,
    plan: PromptPlan,
    rows: Rows,
    runs: Iterable[list[int]],
    *,
    keep: int,
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """The passes over these items, by index."""
    device = input_device(model)
    for run in runs:
        part, items = rows.part(torch.tensor(run, device=rows.inputs.device)), [plan.items[index] for index in run]
        if items[0].context:
            part = part.last_tokens(items[0].span.length)
        mask = part.attention_mask
        real = _all_shown(part.inputs) if mask is None else mask.bool()
        name = "input_ids" if part.inputs.dim() == 2 else "inputs_embeds"
        with cache.prefilling(items, real.to(device)):
            output = forward_pass(
                model,
                cache,
                part.position_ids.to(device),
                **{name: part.inputs.to(device)},
                attention_mask=None if mask is None else mask.to(device),
                use_cache=True,
                return_dict=True,
                **({"logits_to_keep": keep} if keeps_logits(model) else {}),
                **arguments,
            )
        kept = real[:, -keep:].to(output.logits.device)
        # In the order of the tokens, row by row.
        wanted = [
            token
            for item, count in zip(items, kept.sum(1).tolist(), strict=True)
            for token in range(item.span.stop - count, item.span.stop)
        ]
        yield PrefillPass(wanted, output.logits[:, -keep:][kept], output)


def _all_shown(inputs: Tensor) -> Tensor:
    """The mask ``[rows, width]`` of inputs without padding, bool, on the CPU."""
    return torch.ones(inputs.shape[:2], dtype=torch.bool, device="cpu")


def _passes_by_input(inputs_of: Tensor, at_once: int) -> Iterator[list[int]]:
    """One prompt of each input at first, in the inputs' order, with which layers project all inputs; then others."""
    firsts = dict[int, int]()
    for index, number in enumerate(inputs_of.tolist()):
        firsts.setdefault(number, index)
    yield list(firsts.values())
    others = sorted(set(range(len(inputs_of))) - set(firsts.values()))
    yield from (others[start : start + at_once] for start in range(0, len(others), at_once))


def _passes(plan: PromptPlan, at_once: int) -> Iterator[list[int]]:
    """The items of each pass, by index: one that continues a path alone, others together."""
    first, count = 0, len(plan.items)
    while first < count:
        stop = first + 1
        while not plan.items[first].context and stop < min(count, first + at_once) and not plan.items[stop].context:
            stop += 1
        yield list(range(first, stop))
        first = stop


@torch.no_grad()
def prefill_rows(
    model: PreTrainedModel, cache: SharedContextCache, plan: PromptPlan, rows: Rows, *, max_tokens: int
) -> Tensor:
    """As `row_passes`; returns the logits after each prompt, ``[prompts, vocabulary]``."""
    passes = row_passes(model, cache, plan, rows, keep=1, max_tokens=max_tokens)
    return torch.cat([done.logits for done in passes])
