"""Prefill by rows: each distinct prompt is a row of the pass, with the padding and the positions that stock gives it.

It serves what packed prefill, which lays all tokens end to end in one row, cannot: positions whose planes differ, or
that count padding, layers whose states depend on padding or on gaps in a mask, decoders with an encoder, whose prompts
differ where its inputs do, and prompts with images, video or audio. These run as in stock, with its masks and
attention, once for each distinct input. Every prompt is a node, shared by its samples and beams. A common prefix of
different prompts with images is a node of its own; it runs before what follows. Text that follows is packed. Where
layers have states, images that follow run without padding, which would come between the state and the next token,
hence with others of the same length only.

A pass has as many tokens as its tensors have memory for. In PyTorch, scans of several tokens keep products of all
pairs of a token and an entry of the state, where no kernel runs instead: of Nemotron-H in transformers 5.17 some 9 MB
per token. And some images have many more patches than tokens. What a pass takes is counted once per model and
dtype, over a few tokens or over the first prompt with an image, and compared with free memory before each prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from ..._compat import CACHE, keeps_logits, uncompiled_call
from ...attention.forest import begin_of
from ...cache.shared import SharedContextCache
from ...cache.state import PrefillItem
from ..call_context import CallContext
from ..decoding.waves import usable_memory
from ..forward_pass import forward_pass, input_device, takes_positions
from ..inputs.features import SharedFeatures
from ..inputs.rows import InputRows
from .packed import CapturedPasses, PrefillPass, packed_passes
from .prompt_plan import PromptGroup, PromptPlan, TokensContinue

CapturedRowPasses = Callable[[SharedContextCache, Tensor, Tensor, int], Any]
"""Prefills a cache's current items, rows of these ids and positions, by captured graphs: the model's output for so
many last positions; None to run the pass eagerly. See `RowPasses`."""


class Rows(NamedTuple):
    """The rows of a call, as its first pass is given them."""

    inputs: Tensor  # [rows, width] ids, or [rows, width, hidden] embeddings
    attention_mask: Tensor | None  # [rows, width], or None
    position_ids: Tensor  # [rows or 1, width], or [planes, rows or 1, width] where planes differ
    inputs_of: Tensor | None = None  # [rows] int64 on the CPU: which encoder input each row reads, if there are any
    numbers: Tensor | None = None  # [rows] on the CPU: which rows of the call these are; None with text alone
    images: InputRows | None = None  # the images, videos or audio of the call's rows; None for tokens after them
    # [rows, width] int64 on the CPU: where these tokens are in the call's rows, -1 for padding; None for whole rows.
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
            position_ids = (_shown(inputs, attention_mask).cumsum(1) - 1).clamp_min(0)
        numbers = None if images is None else torch.arange(len(inputs), device="cpu")
        return cls(inputs, attention_mask, position_ids, inputs_of, numbers, images)

    def distinct(self, groups: Sequence[PromptGroup]) -> Rows:
        """The first row of each group."""
        firsts = torch.tensor([0, *(group.count for group in groups[:-1])], device="cpu").cumsum(0)
        return self.part(firsts.to(self.inputs.device))

    def part(self, rows: Tensor) -> Rows:
        """Some of the rows, by their numbers ``[rows]``."""
        places, chosen = self.position_ids, rows.cpu()
        mask = None if self.attention_mask is None else self.attention_mask[rows]
        places = places if places.shape[-2] == 1 else places[..., rows.to(places.device), :]
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
        """Whether a row has an image among these tokens, counted after its padding."""
        if self.images is None or self.numbers is None:
            return False
        hidden = 0 if self.attention_mask is None else int((self.attention_mask[row] == 0).sum())
        places = torch.arange(hidden + first, hidden + first + length, device="cpu")[None]
        return self.images.have_images([int(self.numbers[row])], places)

    def packed(self) -> Rows:
        """These tokens end to end in one row, without padding."""
        mask, places = _shown(self.inputs, self.attention_mask), self.position_ids
        return self._replace(
            inputs=self.inputs[mask.to(self.inputs.device)][None],
            attention_mask=None,
            position_ids=places.expand(*places.shape[:-2], *mask.shape)[..., mask.to(places.device)][..., None, :],
        )


def prefill_passes(
    model: PreTrainedModel,
    cache: SharedContextCache,
    plan: PromptPlan,
    continuation: TokensContinue,
    *,
    rows: Rows | None,
    wanted: Sequence[int] = (),
    keep: int = 1,
    length: int | None = None,
    max_tokens: int,
    captured: CapturedPasses | None = None,
    captured_rows: CapturedRowPasses | None = None,
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """Compute the plan's nodes into the cache it was made for, as its next segment, then set its forest.

    Args:
        rows: For passes by rows the distinct ones, each a group of the plan; None for packed passes.
        wanted: Indices of the new tokens to return logits for, ascending, of packed passes.
        keep: Last positions of each row to return logits for, of passes by rows.
        length: Tokens of the longest prompt of packed passes, padding included; None for that of the nodes.
        max_tokens: Maximum positions per pass, padding included; one by rows has at least one row, and the whole
            prompt of it.
        captured: Runs packed passes by captured graphs where it can, and `captured_rows` passes by rows.
        arguments: Further ones of `packed_passes`.
    """
    cache.add_segment(plan.new_tokens)  # even if empty: the plan assumes its number
    if continuation.scans and (rows is None or rows.images is None):
        tokens = len(plan.new_tokens) if rows is None else rows.inputs.shape[1] * len(plan.items)
        max_tokens = tokens_that_fit(model, min(max_tokens, max(1, tokens)), cache.position_planes)
    if rows is None:
        given: dict[str, Any] = {"max_tokens": max_tokens, "continuation": continuation, **arguments}
        given["captured"] = None if continuation.scans else captured  # whose buffers have no states
        yield from packed_passes(model, cache, plan.items, plan.new_tokens, wanted, **given)
    else:
        yield from _row_passes(model, cache, plan, rows, continuation, keep, max_tokens, captured_rows)
        length = rows.inputs.shape[1]
    cache.set_forest(plan.forest, length)


def _row_passes(
    model: PreTrainedModel,
    cache: SharedContextCache,
    plan: PromptPlan,
    rows: Rows,
    continuation: TokensContinue,
    keep: int,
    max_tokens: int,
    captured: CapturedRowPasses | None,
) -> Iterator[PrefillPass]:
    """The passes of `prefill_passes` by rows."""
    several, width = len(plan.items) > 1, rows.inputs.shape[1]
    capacity = ImagePasses(model, max_tokens, len(plan.items) * width) if rows.images and several else None
    features = None if rows.images is None else SharedFeatures(model, rows.images.counts_in_stock)
    arguments: dict[str, Any] = {"logits_to_keep": keep} if keeps_logits(model) else {}
    for run in _runs(cache, plan, rows, continuation, max_tokens, capacity):
        items = [one.item for one in run]
        part = rows.of_run(run)
        if run[0].form is Form.PACKED:
            yield _packed_pass(model, cache, items, part.packed(), keep)
            continue
        real = _shown(part.inputs, part.attention_mask)
        counting = nullcontext() if capacity is None or not part.have_images else capacity.counting(real.numel())
        with counting, _storing(cache, part, items, real.to(input_device(model))):
            output = None
            if captured is not None and part.attention_mask is None and part.images is None:
                output = captured(cache, part.inputs, part.position_ids, keep)
            if output is None:
                output = _pass(model, cache, part, arguments, features)
        kept = real[:, -keep:].to(output.logits.device)
        yield PrefillPass(_last_tokens(items, kept.sum(1).tolist()), output.logits[:, -keep:][kept], output)


def _runs(
    cache: SharedContextCache,
    plan: PromptPlan,
    rows: Rows,
    continuation: TokensContinue,
    max_tokens: int,
    capacity: ImagePasses | None,
) -> Iterator[list[Part]]:
    """The parts of each pass by rows; with the capacity of passes with images, if several prompts have some.

    They are a single pass if it is unknown which images belong to which prompt. One that does not depend on that is
    found first, since it may take a pass of the encoder to find out.
    """
    images, width = rows.images, rows.inputs.shape[1]
    prompts = whole_prompts(plan, rows, scans=continuation.scans)
    runs = passes(prompts, width, max_tokens, capacity=capacity)
    if rows.inputs_of is not None and (inputs := cache.inputs) is not None:
        inputs.assign([begin_of((item.span,)) for item in plan.items], rows.inputs_of.tolist())
        at_once = max(1, max_tokens // max(width, inputs.tokens)), max(1, max_tokens // width)
        runs = passes_by_input(prompts, rows.inputs_of, *at_once)
    if images is None:
        return runs
    if capacity is None or capacity.settled:
        runs = iter(known := list(runs))
        if len(known) == 1:
            return runs
    return runs if images.apart else iter([prompts])


@contextmanager
def _storing(cache: SharedContextCache, part: Rows, items: Sequence[PrefillItem], real: Tensor) -> Iterator[None]:
    """Context of a pass that fills these items, `real` without padding, of the cache's next inputs if it has any."""
    storing = nullcontext() if cache.inputs is None else cache.inputs.storing_next(len(items))
    by_stock = part.images is not None and not items[0].context  # whose attention reads nothing stored
    with storing, cache.prefilling(items, real, tensors=by_stock):
        yield


def _packed_pass(
    model: PreTrainedModel, cache: SharedContextCache, items: Sequence[PrefillItem], rows: Rows, keep: int
) -> PrefillPass:
    """A pass over text, end to end in one row, that continues stored paths."""
    counts, ids, last = [min(keep, item.span.length) for item in items], rows.inputs[0], list[int]()
    for end, count in zip(accumulate(item.span.length for item in items), counts, strict=True):
        last.extend(range(end - count, end))
    (done,) = packed_passes(model, cache, items, ids, last, max_tokens=len(ids), positions=rows.position_ids)
    return PrefillPass(_last_tokens(items, counts), done.logits, done.output)


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
    device = input_device(model)
    mask = None if rows.attention_mask is None else rows.attention_mask.to(device)
    inputs, positions = rows.inputs.to(device), rows.position_ids.to(device)
    given: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
    if rows.images is None or rows.numbers is None:
        given["input_ids" if inputs.dim() == 2 else "inputs_embeds"] = inputs
        return forward_pass(model, cache, positions, **given, return_dict=True, **arguments)
    if takes_positions(model):
        given["position_ids"] = positions
    given |= {"is_first_iteration": True, CACHE: cache, **rows.images.of(rows.numbers.tolist(), rows.places)}
    prepared = model.prepare_inputs_for_generation(inputs, **given, **arguments)
    with nullcontext() if features is None else features.of_pass():
        return uncompiled_call(model, **prepared, return_dict=True)


@torch.no_grad()
def try_step(call: CallContext, cache: SharedContextCache, rows: Rows) -> None:
    """Run a step of one row, once per model, and once for rows that outgrow a window; raises `Unsupported` where steps
    cannot share context, which prefill with images does not show."""
    model, device, window = call.model, input_device(call.model), call.structure.layout.smallest_window

    def run() -> None:
        twin = cache.nodes_only(cache.forest.select_rows([0]), max_suffix=cache.state.max_suffix)
        position = rows.position_ids[..., :1, -1:] + 1
        forward_pass(model, twin, position.to(device), input_ids=rows.inputs[:1, -1:].to(device), use_cache=True)

    if rows.images is not None:
        outgrown = window is not None and cache.longest_row(1) > window
        call.structure.kept(("a step behind images", outgrown), run)


def _shown(inputs: Tensor, mask: Tensor | None) -> Tensor:
    """Which tokens are no padding: ``[rows, width]``, bool; on the CPU without a mask."""
    return torch.ones(inputs.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask.bool()


class Form(Enum):
    """How parts are laid out in a pass."""

    WHOLE = "whole prompts, with the padding that they were given"
    PADDED = "rows of any lengths, padded at the left to the longest"
    ROWS = "rows of one length"
    PACKED = "end to end in one row"


class Part(NamedTuple):
    """Tokens of a prompt that a pass computes: their item, the first group that has them, and how they run, with
    others of the same form."""

    item: PrefillItem
    group: int
    form: Form


def whole_prompts(plan: PromptPlan, rows: Rows, *, scans: bool) -> list[Part]:
    """The items of a plan of distinct rows; see `TokensContinue.scans`."""

    def form(item: PrefillItem, group: int) -> Form:
        if not item.context and plan.ends[group] == item.span.stop - 1:
            return Form.WHOLE
        if rows.images is None or (item.context and not rows.images_in(group, item.position, item.span.length)):
            return Form.PACKED
        return Form.ROWS if item.context and scans else Form.PADDED

    return [Part(item, group, form(item, group)) for item, group in zip(plan.items, plan.groups, strict=True)]


def passes_by_input(
    parts: Sequence[Part], inputs_of: Tensor, inputs_at_once: int, at_once: int
) -> Iterator[list[Part]]:
    """One prompt of each input at first, in the inputs' order, with which layers project the inputs; then others."""
    firsts = dict[int, int]()
    for index, number in enumerate(inputs_of.tolist()):
        firsts.setdefault(number, index)
    others = sorted(set(range(len(inputs_of))) - set(firsts.values()))
    for those, most in ((list(firsts.values()), inputs_at_once), (others, at_once)):
        for start in range(0, len(those), most):
            yield [parts[index] for index in those[start : start + most]]


def passes(
    parts: Sequence[Part], width: int, max_tokens: int, *, capacity: ImagePasses | None = None
) -> Iterator[list[Part]]:
    """The parts of each pass: whole prompts first, then others, those in rows of one length by length.

    A part comes after what it continues, whose context is a part of its own. A pass has at most `max_tokens`
    positions, padding included, or what its capacity for images says, but one part at least.
    """
    alike: dict[tuple[int, int, int], list[Part]] = {}
    forms = list(Form)
    for part in parts:
        depth, length = len(part.item.context), part.item.span.length
        kind = depth, forms.index(part.form), length if part.form is Form.ROWS else 0
        alike.setdefault(kind, []).append(part)
    for _, those in sorted(alike.items(), key=lambda item: item[0]):
        run, longest, tokens = list[Part](), 0, 0
        for part in those:
            limit, length = max_tokens, width if part.form is Form.WHOLE else part.item.span.length
            if capacity is not None and part.form in (Form.WHOLE, Form.PADDED):
                limit = capacity.most()
            longest, tokens = max(longest, length), tokens + length
            places = tokens if part.form is Form.PACKED else (len(run) + 1) * longest
            if run and places > limit:
                yield run
                run, longest, tokens = [], length, length
            run.append(part)
        yield run


_COUNTED = 256
"""Tokens of the pass that is counted: a chunk of most scans."""

_FEW = 1024
"""Tokens that fit anyway."""

_EMPTY = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_strided)

_USED_SHARE = 0.5
"""Share of free memory that these tensors may take: PyTorch's allocator keeps blocks of other sizes for a while."""

_bytes_per_token: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, float]] = WeakKeyDictionary()
_bytes_with_images: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, float]] = WeakKeyDictionary()


def tokens_that_fit(model: PreTrainedModel, tokens: int, planes: int = 0) -> int:
    """Tokens of so many that a pass with such positions may have at once: all, or a multiple of `_COUNTED`."""
    device = input_device(model)
    if tokens <= _FEW or (usable := usable_memory(device)) is None:
        return tokens
    known = _bytes_per_token.setdefault(model, {})
    if (needed := known.get(model.dtype)) is None:
        needed = known[model.dtype] = most_bytes(model, _COUNTED, planes) / _COUNTED
    fit = int(_USED_SHARE * usable / max(needed, 1.0))
    return tokens if fit >= tokens else max(1, fit // _COUNTED) * _COUNTED


class ImagePasses:
    """Positions that passes over prompts with images may have, of so many in all; the first pass is counted."""

    def __init__(self, model: PreTrainedModel, max_tokens: int, positions: int):
        self._max_tokens, self._dtype = max_tokens, model.dtype
        self._known = _bytes_with_images.setdefault(model, {})
        self._usable = None if positions <= _FEW else usable_memory(input_device(model))

    @property
    def settled(self) -> bool:
        return self._usable is None or self._dtype in self._known

    def most(self) -> int:
        """The number, 1 before it is known: a pass has one prompt at least."""
        if self._usable is None:
            return self._max_tokens
        needed = self._known.get(self._dtype)
        return 1 if needed is None else min(self._max_tokens, int(_USED_SHARE * self._usable / needed))

    @contextmanager
    def counting(self, positions: int) -> Iterator[None]:
        """Context of a pass of so many positions."""
        if self.settled:
            yield
            return
        with _Counted() as counted:
            yield
        self._known[self._dtype] = max(1.0, counted.most / positions)


@torch.no_grad()
def most_bytes(model: PreTrainedModel, tokens: int, planes: int = 0) -> int:
    """The most bytes that tensors of a pass over so many tokens of a row take at a time, as they run here."""
    ids, cache = torch.zeros(1, tokens, dtype=torch.long, device=input_device(model)), SharedContextCache()
    cache.kept, cache.state.position_planes = False, planes
    more: dict[str, Any] = {"logits_to_keep": 1} if keeps_logits(model) else {}
    with _Counted(empty=True) as counted:
        forward_pass(
            model, cache, torch.arange(tokens, device=ids.device)[None], input_ids=ids, use_cache=True, **more
        )
    return counted.most


class _Counted(TorchDispatchMode):
    """Counts the bytes of tensors that operators make (`most` at a time); where `empty`, also of those that kernels
    fill, and that caches keep."""

    def __init__(self, *, empty: bool = False) -> None:
        super().__init__()
        self._left_out = () if empty else _EMPTY
        self.most = self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_iter(found) if getattr(func, "overloadpacket", None) not in self._left_out else ():
            storage = one.untyped_storage() if isinstance(one, Tensor) else None
            if storage is not None and storage._cdata not in given | self._known:  # no view
                self._known.add(storage._cdata)
                self._held += storage.nbytes()
                finalize(storage, self._release, storage._cdata, storage.nbytes())
        self.most = max(self.most, self._held)
        return found

    def _release(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self._held -= size
