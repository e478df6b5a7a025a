"""What each pass of prefill by rows computes: whole prompts, rests behind what is stored, or parts of either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ...cache.state import PrefillItem
from .prompt_plan import FEWEST, PromptPlan


class Part(NamedTuple):
    """Tokens of a prompt that a pass computes.

    Attributes:
        item: Where they are stored, and what comes before them.
        group: The first group that has them.
        whole: Whether they are a whole prompt, which runs with its padding.
        number: Of a prompt's parts, which one.
    """

    item: PrefillItem
    group: int
    whole: bool
    number: int = 0


def whole_prompts(plan: PromptPlan) -> list[Part]:
    """The items of a plan, undivided."""
    items = zip(plan.items, plan.groups, strict=True)
    return [Part(item, group, not item.context and plan.ends[group] == item.span.stop - 1) for item, group in items]


def passes_by_input(parts: Sequence[Part], inputs_of: Tensor, at_once: int) -> Iterator[list[Part]]:
    """One prompt of each input at first, in the inputs' order, with which layers project all inputs; then others."""
    firsts = dict[int, int]()
    for index, number in enumerate(inputs_of.tolist()):
        firsts.setdefault(number, index)
    yield [parts[index] for index in firsts.values()]
    others = sorted(set(range(len(inputs_of))) - set(firsts.values()))
    for start in range(0, len(others), at_once):
        yield [parts[index] for index in others[start : start + at_once]]


def passes(parts: Sequence[Part], width: int, max_tokens: int, *, divides: bool) -> Iterator[list[Part]]:
    """The parts of each pass: whole prompts first, then others by length.

    A part comes after what it continues, whose context is a part of its own.
    """
    if divides:
        parts = [one for part in parts for one in _divided(part, width, max_tokens)]
    alike: dict[tuple[int, int, int], list[Part]] = {}
    for part in parts:
        depth = len(part.item.context) - (part.number > 0)
        alike.setdefault((depth, part.number, 0 if part.whole else part.item.span.length), []).append(part)
    for (_, _, length), those in sorted(alike.items()):
        at_once = max(1, max_tokens // (length or width))
        for first in range(0, len(those), at_once):
            yield those[first : first + at_once]


def _divided(part: Part, width: int, max_tokens: int) -> Iterator[Part]:
    """Parts of at most `max_tokens` tokens, without padding, and of at least `FEWEST`."""
    span, context = part.item.span, part.item.context
    if (width if part.whole else span.length) <= max_tokens:
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
        yield Part(item, part.group, False, number)
        start, number = start + count, number + 1
