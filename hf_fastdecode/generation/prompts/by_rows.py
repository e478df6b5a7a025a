"""Prefill by rows: each distinct prompt is a row of the pass, with the padding and the positions that stock gives it.

It serves what packed prefill, which lays all tokens end to end in one row, cannot: positions whose planes differ, or
that count padding, layers with a state per row, decoders with an encoder, whose prompts differ where its inputs do,
and prompts with images, video or audio. These run as in stock, with its masks and attention, once for each distinct
input. Every prompt is a node, shared by its samples and beams. A common prefix of different prompts is a node of its
own where layers continue from its state; it runs before what follows, as of prompts that continue a given cache.
Layers with states run that without padding, which would come between the state and the next token, hence with others
of the same length only; so do the parts of a prompt longer than a pass. Without states, what follows images is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import CACHE, keeps_logits, uncompiled_call
from ...attention.forest import begin_of
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ...cache.state import PrefillItem
from ..call_context import CallContext
from ..forward_pass import forward_pass, input_device, takes_positions
from ..inputs.features import SharedFeatures
from ..inputs.rows import InputRows
from .packed import PrefillPass
from .pass_parts import Form, ImagePasses, Part, passes, passes_by_input, tokens_that_fit, whole_prompts
from .prompt_plan import PromptGroup, PromptPlan

CapturedRowPasses = Callable[[SharedContextCache, Tensor, Tensor, int], Any]
"""Prefills a cache's current items, rows of these ids and positions, by captured graphs: the model's output for so
many last positions; None to run the pass eagerly. See `RowPasses`."""


class Rows(NamedTuple):
    """The rows of a call, as its first pass is given them.

    Attributes:
        inputs: ``[rows, width]`` ids, or ``[rows, width, hidden]`` embeddings.
        attention_mask: ``[rows, width]``, or None.
        position_ids: ``[rows or 1, width]``, or ``[planes, rows or 1, width]`` where planes differ.
        inputs_of: ``[rows]`` int64 on the CPU: which encoder input each row reads, if there are any.
        numbers: ``[rows]`` on the CPU: which rows of the call these are; None with text alone.
        images: The images, videos or audio of the call's rows; None for tokens behind them.
        places: ``[rows, width]`` int64 on the CPU: where these tokens are in the call's rows, -1 for padding; None
            for whole rows.
    """

    inputs: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    inputs_of: Tensor | None = None
    numbers: Tensor | None = None
    images: InputRows | None = None
    places: Tensor | None = None

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

    def tokens(self, firsts: Sequence[int], counts: Sequence[int]) -> Rows:
        """``counts[row]`` tokens of each row, from its token ``firsts[row]`` on, padded at the left to the longest.

        Of rows with padding at the left alone, which end in text.
        """
        longest, first = max(counts), torch.tensor(firsts, device="cpu")
        if self.attention_mask is not None:
            first = first + self.attention_mask.bool().byte().argmax(1).cpu()
        before = torch.arange(longest, device="cpu") - longest + torch.tensor(counts, device="cpu")[:, None]
        at = first[:, None] + before  # [rows, longest]
        mask, at = before >= 0, at.where(before >= 0, self.inputs.shape[1] - 1)  # padding has the last token's id
        row, places = torch.arange(len(at), device="cpu")[:, None], self.position_ids
        of_places = row if places.shape[-2] > 1 else torch.zeros_like(row)
        inputs, device = self.inputs, places.device
        return self._replace(
            inputs=inputs[row.to(inputs.device), at.to(inputs.device)],
            attention_mask=None if bool(mask.all()) else mask.long(),
            position_ids=places[..., of_places.to(device), at.to(device)],
            places=at.where(mask, -1),
        )

    def of_run(self, run: Sequence[Part]) -> Rows:
        """The tokens that these parts have of the rows; without images where none come after stored tokens."""
        items = [one.item for one in run]
        part = self.part(torch.tensor([one.group for one in run], device=self.inputs.device))
        if run[0].form is not Form.WHOLE:
            part = part.tokens([item.position for item in items], [item.span.length for item in items])
        if items[0].context and not part.have_images:
            part = part._replace(numbers=None, images=None)
        return part

    @property
    def have_images(self) -> bool:
        """Whether any of the rows comes with an image."""
        if self.images is None or self.numbers is None:
            return False
        return self.images.have_images(self.numbers.tolist(), self.places)

    def images_in(self, row: int, first: int, length: int) -> bool:
        """Whether a row has an image among these tokens, counted behind its padding."""
        hidden = 0 if self.attention_mask is None else int((self.attention_mask[row] == 0).sum())
        places = torch.arange(hidden + first, hidden + first + length, device="cpu")[None]
        return self.part(slice(row, row + 1))._replace(places=places).have_images

    def packed(self) -> Rows:
        """The same tokens end to end in one row, without padding."""
        if self.attention_mask is None:
            positions = self.position_ids.flatten(-2)[..., None, :]
            return self._replace(inputs=self.inputs.flatten(0, 1)[None], position_ids=positions)
        mask = self.attention_mask.bool()
        return self._replace(
            inputs=self.inputs[mask.to(self.inputs.device)][None],
            attention_mask=None,
            position_ids=self.position_ids[..., mask.to(self.position_ids.device)][..., None, :],
        )


def row_passes(
    model: PreTrainedModel,
    cache: SharedContextCache,
    plan: PromptPlan,
    rows: Rows,
    layout: ModelLayout,
    *,
    keep: int,
    max_tokens: int,
    captured: CapturedRowPasses | None = None,
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """Compute the plan's nodes into the cache, pass by pass, then set its forest.

    Args:
        cache: The cache the plan was made for; the tokens become its next segment.
        plan: Of these rows, each a group.
        rows: The distinct rows.
        layout: The model's.
        keep: Last positions of each row to return logits for.
        max_tokens: Maximum positions per forward pass, padding included; a pass has at least one row, and the whole
            prompt of it unless layers continue from states.
        captured: Runs passes by captured graphs where it can.
    """
    cache.add_segment(plan.new_tokens)
    several, width = len(plan.items) > 1, rows.inputs.shape[1]
    capacity = ImagePasses(model, max_tokens, len(plan.items) * width) if rows.images and several else None
    features = None if rows.images is None else SharedFeatures(model, rows.images.encoded_together)
    if keeps_logits(model):
        arguments["logits_to_keep"] = keep
    for run in _runs(model, cache, plan, rows, layout, max_tokens, capacity):
        items = [one.item for one in run]
        part = rows.of_run(run)
        if run[0].form is Form.PACKED:
            yield _packed_pass(model, cache, items, part.packed(), keep)
            continue
        mask = part.attention_mask
        real = _all_shown(part.inputs) if mask is None else mask.bool()
        counting = nullcontext() if capacity is None or not part.have_images else capacity.counting(real.numel())
        with counting, _storing(cache, part, items, real.to(input_device(model))):
            output = None
            if captured is not None and mask is None and part.images is None:
                output = captured(cache, part.inputs, part.position_ids, keep)
            if output is None:
                output = _pass(model, cache, part, arguments, features)
        kept = real[:, -keep:].to(output.logits.device)
        yield PrefillPass(_last_tokens(items, kept.sum(1).tolist()), output.logits[:, -keep:][kept], output)
        for one in run:
            if one.number:
                cache.forget_states(one.item.context)
    cache.set_forest(plan.forest, width)


def _runs(
    model: PreTrainedModel,
    cache: SharedContextCache,
    plan: PromptPlan,
    rows: Rows,
    layout: ModelLayout,
    max_tokens: int,
    capacity: ImagePasses | None,
) -> Iterator[list[Part]]:
    """The parts of each pass, see `row_passes`.

    Args:
        capacity: Of passes with images, if prompts come with these and are several.
    """
    images, states, width = rows.images, bool(layout.states), rows.inputs.shape[1]
    prompts = whole_prompts(plan, None if images is None else rows.images_in, states=states)
    if states and images is None:
        max_tokens = tokens_that_fit(model, min(max_tokens, width * max(1, len(plan.items))))
    divides = states and layout.continues_states and images is None and not _has_gaps(rows.attention_mask)
    runs = passes(prompts, width, max_tokens, divides=divides, capacity=capacity)
    if rows.inputs_of is not None and (inputs := cache.inputs) is not None:
        inputs.assign([begin_of((item.span,)) for item in plan.items], rows.inputs_of.tolist())
        at_once = max(1, max_tokens // max(width, inputs.tokens)), max(1, max_tokens // width)
        runs = passes_by_input(prompts, rows.inputs_of, *at_once)
    return runs if images is None else _runs_of_known(images, runs, prompts, capacity)


@contextmanager
def _storing(cache: SharedContextCache, part: Rows, items: Sequence[PrefillItem], real: Tensor) -> Iterator[None]:
    """Context of a pass that fills these items, `real` without padding, of the cache's next inputs if it has any."""
    inputs = cache.inputs
    storing = nullcontext() if inputs is None else inputs.storing_next(len(items))
    by_stock = part.images is not None and not items[0].context  # whose attention reads nothing stored
    with storing, cache.prefilling(items, real, tensors=by_stock):
        yield


def _runs_of_known(
    images: InputRows, runs: Iterator[list[Part]], prompts: list[Part], capacity: ImagePasses | None
) -> Iterator[list[Part]]:
    """The runs, or a single one of all prompts if it is unknown which images belong to which prompt.

    A single run does not depend on that, which may take a pass of the encoder to find out.
    """
    if capacity is None or capacity.settled:
        runs = iter(known := list(runs))
        if len(known) == 1:
            return runs
    return runs if images.apart else iter([prompts])


def _packed_pass(
    model: PreTrainedModel, cache: SharedContextCache, items: Sequence[PrefillItem], rows: Rows, keep: int
) -> PrefillPass:
    """A pass over text, end to end in one row, that continues stored paths."""
    device, counts, last = input_device(model), [min(keep, item.span.length) for item in items], list[int]()
    for end, count in zip(accumulate(item.span.length for item in items), counts, strict=True):
        last.extend(range(end - count, end))
    kept, keeps = torch.tensor(last, device=device), keeps_logits(model)
    given: dict[str, Any] = {"input_ids": rows.inputs.to(device)} | ({"logits_to_keep": kept} if keeps else {})
    with cache.prefilling(items):
        output = forward_pass(*(model, cache, rows.position_ids.to(device)), use_cache=True, return_dict=True, **given)
    return PrefillPass(_last_tokens(items, counts), output.logits[0] if keeps else output.logits[0, kept], output)


def _last_tokens(items: Sequence[PrefillItem], counts: Sequence[int]) -> list[int]:
    """The last ``counts[i]`` new tokens of each item, in order."""
    spans = ((item.span, count) for item, count in zip(items, counts, strict=True))
    return [token for span, count in spans for token in range(span.stop - count, span.stop)]


def _pass(
    model: PreTrainedModel,
    cache: SharedContextCache,
    rows: Rows,
    arguments: dict[str, Any],
    features: SharedFeatures | None,
) -> Any:
    """The model's output for these rows."""
    device = input_device(model)
    mask = None if rows.attention_mask is None else rows.attention_mask.to(device)
    inputs, positions = rows.inputs.to(device), rows.position_ids.to(device)
    if rows.images is None or rows.numbers is None:
        arguments = arguments | {"input_ids" if inputs.dim() == 2 else "inputs_embeds": inputs}
        return forward_pass(
            model, cache, positions, attention_mask=mask, use_cache=True, return_dict=True, **arguments
        )
    if takes_positions(model):
        arguments = arguments | {"position_ids": positions}
    given = {"attention_mask": mask, "use_cache": True, "is_first_iteration": True, CACHE: cache}
    given |= rows.images.of(rows.numbers.tolist(), rows.places)
    prepared = model.prepare_inputs_for_generation(inputs, **given, **arguments)
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


def _has_gaps(mask: Tensor | None) -> bool:
    return mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any())
