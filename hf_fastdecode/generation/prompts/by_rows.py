"""Prefill by rows: each distinct prompt is a row of the pass, with the padding and the positions that stock gives it.

It serves what packed prefill, which lays all tokens end to end in one row, cannot: positions whose planes differ, or
that count the padding of prompts, layers with a state per row, and decoders with an encoder, whose prompts differ
where its inputs do. Every prompt is a node, shared by its samples and beams. What different prompts of text begin with
is a node of its own where layers continue from its state. It runs first, and the prompts' rests, as those of prompts
that continue a path of a given cache, after it: without padding, which would come between the state and the next
token, hence together with rests of the same length only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import keeps_logits
from ...cache.layers.cross import begin_of
from ...cache.shared import SharedContextCache
from ..forward_pass import forward_pass, input_device
from .packed import PrefillPass, stacked
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

    def tokens(self, firsts: Sequence[int], count: int) -> Rows:
        """So many tokens of each row, from its token ``firsts[row]`` on; of rows with padding at the left alone."""
        at = torch.tensor(firsts, device="cpu")
        if self.attention_mask is not None:
            at = at + self.attention_mask.bool().byte().argmax(1).cpu()
        at = at[:, None] + torch.arange(count, device="cpu")  # [rows, count]
        row, places = torch.arange(len(at), device="cpu")[:, None], self.position_ids
        of_places = row if places.shape[-2] > 1 else torch.zeros_like(row)
        inputs, device = self.inputs, places.device
        return self._replace(
            inputs=inputs[row.to(inputs.device), at.to(inputs.device)],
            attention_mask=None,
            position_ids=places[..., of_places.to(device), at.to(device)],
        )


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
        plan: Of these rows, each a group.
        rows: The distinct rows.
        keep: Last positions of each row to return logits for.
        max_tokens: Maximum positions per forward pass, padding included; a pass has at least one row.
    """
    cache.add_segment(plan.new_tokens)
    device, runs = input_device(model), _passes(plan, rows.inputs.shape[1], max_tokens)
    if rows.inputs_of is not None and cache.inputs is not None:
        cache.inputs.assign([begin_of((item.span,)) for item in plan.items], rows.inputs_of.tolist())
        runs = _passes_by_input(rows.inputs_of, max(1, max_tokens // rows.inputs.shape[1]))
    for run, whole in runs:
        items = [plan.items[number] for number in run]
        part = rows.part(torch.tensor([plan.groups[number] for number in run], device=rows.inputs.device))
        if not whole:
            part = part.tokens([item.position for item in items], items[0].span.length)
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
    cache.set_forest(plan.forest, rows.inputs.shape[1])


def counted_with_padding(width: int) -> Tensor:
    """Positions of prompts that count padding: ``[1, width]`` int64, on the CPU."""
    return torch.arange(width, device="cpu")[None]


def _all_shown(inputs: Tensor) -> Tensor:
    """The mask ``[rows, width]`` of inputs without padding, bool, on the CPU."""
    return torch.ones(inputs.shape[:2], dtype=torch.bool, device="cpu")


def _passes_by_input(inputs_of: Tensor, at_once: int) -> Iterator[tuple[list[int], bool]]:
    """One prompt of each input at first, in the inputs' order, with which layers project all inputs; then others."""
    firsts = dict[int, int]()
    for index, number in enumerate(inputs_of.tolist()):
        firsts.setdefault(number, index)
    yield list(firsts.values()), True
    others = sorted(set(range(len(inputs_of))) - set(firsts.values()))
    yield from ((others[start : start + at_once], True) for start in range(0, len(others), at_once))


def _passes(plan: PromptPlan, width: int, max_tokens: int) -> Iterator[tuple[list[int], bool]]:
    """The items of each pass, by index, and whether they are whole prompts: those first, then others by length.

    An item comes after what it continues, whose context is a part of its own.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for number, (item, group) in enumerate(zip(plan.items, plan.groups, strict=True)):
        whole = not item.context and plan.ends[group] == item.span.stop - 1
        alike.setdefault((0, 0) if whole else (len(item.context), item.span.length), []).append(number)
    for (_, length), numbers in sorted(alike.items()):
        at_once = max(1, max_tokens // (length or width))
        for first in range(0, len(numbers), at_once):
            yield numbers[first : first + at_once], not length


@torch.no_grad()
def prefill_rows(
    model: PreTrainedModel, cache: SharedContextCache, plan: PromptPlan, rows: Rows, *, max_tokens: int
) -> Tensor:
    """As `row_passes`; returns the logits after each prompt, ``[prompts, vocabulary]``."""
    known: dict[int | None, Tensor] = {}
    for done in row_passes(model, cache, plan, rows, keep=1, max_tokens=max_tokens):
        known |= zip(done.wanted, done.logits, strict=True)
    return stacked(model, [known[end] for end in plan.ends])
