"""What each pass of prefill by rows computes: whole prompts, what follows stored tokens, or parts of either.

A pass has as many tokens as its tensors have memory for. In PyTorch, scans of several tokens keep products of all
pairs of a token and an entry of the state: of Nemotron-H in transformers 5.17 some 9 MB per token. And some images
have many more patches than tokens. What a pass takes is counted once per model and dtype, over a few tokens or over
the first prompt with an image, and compared with free memory before each prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from ..._compat import keeps_logits, uncompiled_call
from ...cache.state import PrefillItem
from ..decoding.waves import usable_memory
from ..forward_pass import input_device
from .prompt_plan import FEWEST, PromptPlan

_COUNTED = 256
"""Tokens of the pass that is counted: a chunk of most scans."""

_FEW = 1024
"""Tokens that fit anyway."""

_EMPTY = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_strided)

_USED_SHARE = 0.5
"""Share of free memory that these tensors may take: PyTorch's allocator keeps blocks of other sizes for a while."""

_bytes_per_token: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, float]] = WeakKeyDictionary()

_bytes_with_images: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, float]] = WeakKeyDictionary()


def tokens_that_fit(model: PreTrainedModel, tokens: int) -> int:
    """Of so many tokens, how many a pass may have at once: all, or a multiple of `_COUNTED`."""
    device = input_device(model)
    if tokens <= _FEW or (usable := usable_memory(device)) is None:
        return tokens
    known = _bytes_per_token.setdefault(model, {})
    if (needed := known.get(model.dtype)) is None:
        needed = known[model.dtype] = most_bytes(model, _COUNTED) / _COUNTED
    fit = int(_USED_SHARE * usable / max(needed, 1.0))
    return tokens if fit >= tokens else max(1, fit // _COUNTED) * _COUNTED


class ImagePasses:
    """How many positions passes over prompts with images may have; the first, of one prompt, is counted.

    Args:
        max_tokens: The most, whatever memory is free.
        positions: Of all prompts, padding included.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int, positions: int):
        self._max_tokens, self._dtype = max_tokens, model.dtype
        self._known = _bytes_with_images.setdefault(model, {})
        self._usable = None if positions <= _FEW else usable_memory(input_device(model))

    @property
    def settled(self) -> bool:
        """Whether the number is known before the first pass."""
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
def most_bytes(model: PreTrainedModel, tokens: int) -> int:
    """The most bytes that tensors of a pass over so many tokens of a row take at a time, without its cache."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=input_device(model))
    arguments = {"logits_to_keep": 1} if keeps_logits(model) else {}
    with _Counted() as counted:
        uncompiled_call(model, input_ids=ids, use_cache=False, **arguments)
    return counted.most


class _Counted(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, but for empty ones, which caches keep.

    Attributes:
        most: The most at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_iter(found) if getattr(func, "overloadpacket", None) not in _EMPTY else ():
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


class Form(Enum):
    """How parts are laid out in a pass."""

    WHOLE = "whole prompts, with the padding that they were given"
    PADDED = "rows of any lengths, padded at the left to the longest"
    ROWS = "rows of one length"
    PACKED = "end to end in one row"


class Part(NamedTuple):
    """Tokens of a prompt that a pass computes.

    Attributes:
        item: Where they are stored, and what comes before them.
        group: The first group that has them.
        form: How they run, with others of the same form.
        number: Of a prompt's parts, which one.
    """

    item: PrefillItem
    group: int
    form: Form
    number: int = 0


def whole_prompts(plan: PromptPlan, images_in: Callable[[int, int, int], bool] | None, *, states: bool) -> list[Part]:
    """The items of a plan, undivided.

    Args:
        images_in: Of prompts that come with images, whether there are any in a prompt's tokens: of a group, from a
            token on, so many.
        states: Whether layers have states, between which and the next token no padding may be.
    """

    def form(item: PrefillItem, group: int) -> Form:
        if not item.context and plan.ends[group] == item.span.stop - 1:
            return Form.WHOLE
        if images_in is None or (item.context and states):
            return Form.ROWS
        packs = item.context and not images_in(group, item.position, item.span.length)
        return Form.PACKED if packs else Form.PADDED

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
    parts: Sequence[Part], width: int, max_tokens: int, *, divides: bool = False, capacity: ImagePasses | None = None
) -> Iterator[list[Part]]:
    """The parts of each pass: whole prompts first, then others, those in rows of one length by length.

    A part comes after what it continues, whose context is a part of its own.

    Args:
        max_tokens: Most positions of a pass, padding included; it has one part at least.
        divides: Whether parts of more tokens are divided.
        capacity: Tells how many positions the next pass with images may have.
    """
    if divides:
        parts = [one for part in parts for one in _divided(part, width, max_tokens)]
    alike: dict[tuple[int, int, int, int], list[Part]] = {}
    forms = list(Form)
    for part in parts:
        depth, length = len(part.item.context) - (part.number > 0), part.item.span.length
        kind = depth, part.number, forms.index(part.form), length if part.form is Form.ROWS else 0
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


def _divided(part: Part, width: int, max_tokens: int) -> Iterator[Part]:
    """Parts of at most `max_tokens` tokens, without padding, and of at least `FEWEST`."""
    span, context = part.item.span, part.item.context
    if (width if part.form is Form.WHOLE else span.length) <= max_tokens:
        yield part
        return
    start = number = 0
    while start < span.length:
        left = span.length - start
        count = min(left, max(max_tokens, 2 * FEWEST))
        if 0 < left - count < FEWEST:
            count = left - FEWEST
        before = (span[:start],) if start else ()
        item = PrefillItem(span[start : start + count], (*context, *before))
        yield Part(item, part.group, Form.ROWS, number)
        start, number = start + count, number + 1
