"""Prefill by rows: each distinct prompt is a row of the pass, with the padding and the positions that stock gives it.

It serves what packed prefill, which lays all tokens end to end in one row, cannot: positions whose planes differ, or
that count the padding of prompts, layers with a state per row, decoders with an encoder, whose prompts differ
where its inputs do, and prompts that come with images, video or audio. These run as in stock, with its own masks and
attention, once for each distinct input. Every prompt is a node, shared by its samples and beams. What different
prompts of text begin with is a node of its own where layers continue from its state. It runs first, and the prompts'
rests, as those of prompts that continue a path of a given cache, after it: without padding, which would come between
the state and the next token, hence together with rests of the same length only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import CACHE, keeps_logits, uncompiled_call
from ...cache.layers.cross import begin_of
from ...cache.shared import SharedContextCache
from ..call_context import CallContext
from ..forward_pass import forward_pass, input_device, takes_positions
from ..inputs.features import SharedFeatures
from ..inputs.rows import InputRows
from .packed import PrefillPass, stacked
from .prompt_plan import PromptGroup, PromptPlan


class Rows(NamedTuple):
    """The rows of a call, as its first pass is given them.

    Attributes:
        inputs: ``[rows, width]`` ids, or ``[rows, width, hidden]`` embeddings.
        attention_mask: ``[rows, width]``, or None.
        position_ids: ``[rows or 1, width]``, or ``[planes, rows or 1, width]`` where planes differ.
        inputs_of: ``[rows]`` int64 on the CPU: which encoder input each row reads, if there are any.
        numbers: ``[rows]`` on the CPU: which rows of the call these are; None with text alone.
        images: The images, videos or audio of the call's rows.
    """

    inputs: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    inputs_of: Tensor | None = None
    numbers: Tensor | None = None
    images: InputRows | None = None

    @classmethod
    def of(
        cls,
        inputs: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        inputs_of: Tensor | None = None,
        images: InputRows | None = None,
    ) -> Rows:
        """Rows whose positions, where none are given, count the tokens that the mask shows."""
        if position_ids is None:
            shown = _all_shown(inputs).long() if attention_mask is None else attention_mask.long()
            position_ids = (shown.cumsum(1) - 1).clamp_min(0)
        numbers = None if images is None else torch.arange(len(inputs), device="cpu")
        return cls(inputs, attention_mask, position_ids, inputs_of, numbers, images)

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
        chosen = rows.cpu() if isinstance(rows, Tensor) else rows
        inputs_of, numbers = (None if part is None else part[chosen] for part in (self.inputs_of, self.numbers))
        return Rows(self.inputs[rows], mask, places, inputs_of, numbers, self.images)

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
    features = None if rows.images is None else SharedFeatures(model)
    if rows.images is not None and not rows.images.apart:
        runs = iter([(list(range(len(plan.items))), True)])
    for run, whole in runs:
        items = [plan.items[number] for number in run]
        part = rows.part(torch.tensor([plan.groups[number] for number in run], device=rows.inputs.device))
        if not whole:
            part = part.tokens([item.position for item in items], items[0].span.length)
        mask = part.attention_mask
        real = _all_shown(part.inputs) if mask is None else mask.bool()
        if keeps_logits(model):
            arguments["logits_to_keep"] = keep
        with cache.prefilling(items, real.to(device), tensors=part.images is not None):
            output = _pass(model, cache, part, device, arguments, features)
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


def _pass(
    model: PreTrainedModel,
    cache: SharedContextCache,
    rows: Rows,
    device: torch.device,
    arguments: dict[str, Any],
    features: SharedFeatures | None,
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
    with nullcontext() if features is None else features.of_pass():
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
