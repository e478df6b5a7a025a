"""Prefill by rows: each distinct prompt is a row of the pass, with the padding and the positions that stock gives it.

It serves what packed prefill, which lays all tokens end to end in one row, cannot: positions whose planes differ,
layers with a state per row, and prompts that come with images, video or audio. These run as in stock, with its own
masks and attention, once for each distinct input. Every prompt is a node, shared by its samples and beams; common
beginnings of different prompts are not shared. A prompt that continues a path of a given cache runs in a pass of its
own, without padding, which would otherwise come between the state at the path's end and the prompt's next token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import CACHE, keeps_logits, uncompiled_call
from ...cache.shared import SharedContextCache
from ..call_context import CallContext
from ..forward_pass import forward_pass, input_device, takes_positions
from ..input_rows import InputRows
from .packed import PrefillPass
from .prompt_plan import PromptGroup, PromptPlan


class Rows(NamedTuple):
    """The rows of a call, as its first pass is given them.

    Attributes:
        inputs: ``[rows, width]`` ids, or ``[rows, width, hidden]`` embeddings.
        attention_mask: ``[rows, width]``, or None.
        position_ids: ``[rows or 1, width]``, or ``[planes, rows or 1, width]`` where planes differ.
        numbers: ``[rows]`` on the CPU: which rows of the call these are; None with text alone.
        images: The images, videos or audio of the call's rows.
    """

    inputs: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    numbers: Tensor | None = None
    images: InputRows | None = None

    @classmethod
    def of(
        cls,
        inputs: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        images: InputRows | None = None,
    ) -> Rows:
        """Rows whose positions, where none are given, count the tokens that the mask shows."""
        if position_ids is None:
            shown = _all_shown(inputs).long() if attention_mask is None else attention_mask.long()
            position_ids = (shown.cumsum(1) - 1).clamp_min(0)
        numbers = None if images is None else torch.arange(len(inputs), device="cpu")
        return cls(inputs, attention_mask, position_ids, numbers, images)

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
        places = places if places.shape[-2] == 1 else places[..., here, :]
        numbers = self.numbers
        if numbers is not None:
            numbers = numbers[rows.cpu() if isinstance(rows, Tensor) else rows]
        return Rows(self.inputs[rows], mask, places, numbers, self.images)

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
    width, device = rows.inputs.shape[1], input_device(model)
    at_once = max(1, max_tokens // width)
    if rows.images is not None and not rows.images.apart:
        at_once = len(plan.items)
    for run in _passes(plan, at_once):
        part, items = rows.part(run), plan.items[run]
        if items[0].context:
            part = part.last_tokens(items[0].span.length)
        mask = part.attention_mask
        real = _all_shown(part.inputs) if mask is None else mask.bool()
        if keeps_logits(model):
            arguments["logits_to_keep"] = keep
        with cache.prefilling(items, real.to(device), tensors=part.images is not None):
            output = _pass(model, cache, part, device, arguments)
        kept = real[:, -keep:].to(output.logits.device)
        # In the order of the tokens, row by row.
        wanted = [
            token
            for item, count in zip(items, kept.sum(1).tolist(), strict=True)
            for token in range(item.span.stop - count, item.span.stop)
        ]
        yield PrefillPass(wanted, output.logits[:, -keep:][kept], output)
    cache.set_forest(plan.forest, width)


def _pass(
    model: PreTrainedModel, cache: SharedContextCache, rows: Rows, device: torch.device, arguments: dict[str, Any]
) -> Any:
    """The model's output for these rows."""
    mask = None if rows.attention_mask is None else rows.attention_mask.to(device)
    inputs, positions = rows.inputs.to(device), rows.position_ids.to(device)
    if rows.images is None or rows.numbers is None:
        arguments = arguments | {"input_ids" if inputs.dim() == 2 else "inputs_embeds": inputs}
        return forward_pass(
            model, cache, positions, attention_mask=mask, use_cache=True, return_dict=True, **arguments
        )
    if takes_positions(model):
        arguments = arguments | {"position_ids": positions}
    prepared = model.prepare_inputs_for_generation(
        inputs,
        attention_mask=mask,
        use_cache=True,
        is_first_iteration=True,
        **{CACHE: cache},
        **rows.images.of(rows.numbers.tolist()),
        **arguments,
    )
    return uncompiled_call(model, **prepared, return_dict=True)


@torch.no_grad()
def try_step(call: CallContext, cache: SharedContextCache, rows: Rows) -> None:
    """Run a step of one row, once per model, and once for rows that outgrow a window: prefill with images does not
    show whether steps can share context.

    Raises `Unsupported` where they cannot.
    """
    model, device, window = call.model, input_device(call.model), call.structure.layout.smallest_window

    def run() -> None:
        twin = cache.nodes_only(cache.forest.select_rows([0]), max_suffix=cache.state.max_suffix)
        position = rows.position_ids[..., :1, -1:] + 1
        forward_pass(model, twin, position.to(device), input_ids=rows.inputs[:1, -1:].to(device), use_cache=True)

    if rows.images is not None:
        outgrown = window is not None and cache.longest_row(1) > window
        call.structure.kept(("a step behind images", outgrown), run)


def _all_shown(inputs: Tensor) -> Tensor:
    """The mask ``[rows, width]`` of inputs without padding, bool, on the CPU."""
    return torch.ones(inputs.shape[:2], dtype=torch.bool, device="cpu")


def _passes(plan: PromptPlan, at_once: int) -> Iterator[slice]:
    """The items of each pass, by index: one that continues a path alone, others together."""
    first, count = 0, len(plan.items)
    while first < count:
        stop = first + 1
        while not plan.items[first].context and stop < min(count, first + at_once) and not plan.items[stop].context:
            stop += 1
        yield slice(first, stop)
        first = stop


@torch.no_grad()
def prefill_rows(
    model: PreTrainedModel, cache: SharedContextCache, plan: PromptPlan, rows: Rows, *, max_tokens: int
) -> Tensor:
    """As `row_passes`; returns the logits after each prompt, ``[prompts, vocabulary]``."""
    passes = row_passes(model, cache, plan, rows, keep=1, max_tokens=max_tokens)
    return torch.cat([done.logits for done in passes])
