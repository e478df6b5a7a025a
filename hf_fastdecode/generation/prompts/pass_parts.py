"""What each pass of prefill by rows computes: whole prompts, rests behind what is stored, or parts of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from ...cache.state import PrefillItem
from .pass_memory import ImagePasses
from .prompt_plan import FEWEST, PromptPlan


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
    parts: Sequence[Part], width: int, max_tokens: int, *, divides: bool, room: ImagePasses | None = None
) -> Iterator[list[Part]]:
    """The parts of each pass: whole prompts first, then others, those in rows of one length by length.

    A part comes after what it continues, whose context is a part of its own.

    Args:
        max_tokens: Most positions of a pass, padding included; it has one part at least.
        divides: Whether parts of more tokens are divided.
        room: Tells how many positions the next pass with images may have.
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
            if room is not None and part.form in (Form.WHOLE, Form.PADDED):
                limit = room.most()
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
