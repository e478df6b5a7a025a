"""Finds what neighbouring prompts with images begin with, up to where texts or images differ.

A model computes text that follows from stored keys and values, or states, as it does other text, if it does not attend
both ways there. It may compute images that follow too, if their tokens do not see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext
from ..inputs.image_ids import ids_of_images
from ..inputs.rows import InputRows, RowImage
from .by_rows import Rows, prefill_rows
from .packed import prefill_nodes
from .prompt_plan import FEWEST, ComparedPrompts, PromptGroup, StoredPrompts, compare_prompts

_ASKS_FOR_IMAGES: Final = (Unsupported, ValueError, TypeError, AttributeError, LookupError, NameError)
"""Errors of a model's code where there are none, such as of what is left None or unassigned then."""


class ImageBeginnings(NamedTuple):
    """What prompts of a call with images may share with each other, and reuse of a given cache.

    Attributes:
        behind: Whether prompts may have images behind what they share or reuse.
    """

    call: CallContext
    behind: bool

    def sharing(self, prompts: ComparedPrompts) -> ComparedPrompts:
        """The same prompts, of which neighbours have in common what they may share."""
        images, common = self.call.input_rows, prompts.common
        shared = [0] * len(common)
        if images is not None and any(common) and images.apart:
            pairs = list(zip(pairwise(_firsts(prompts.groups)), common, strict=True))
            with suppress(Unsupported):
                shared = [_shared(images, self.call.positions.ids, *pair, length) for pair, length in pairs]
            for index, (pair, _) in enumerate(pairs):
                if any(len(group.tokens) - images.text_after(row) > shared[index] for row, group in pair):
                    shared[index] = shared[index] if self.behind else 0
                    self.call.images_behind |= shared[index] > 0
            if any(shared) and not _continues_text(self.call, images.text_token):
                shared = [0] * len(common)
        return replace(prompts, common=shared)

    def reusing(self, prompts: ComparedPrompts) -> ComparedPrompts:
        """The same prompts, which reuse nothing where images stand behind what they would."""
        images, stored = self.call.input_rows, list(prompts.stored)
        assert images is not None
        for index, (row, group) in enumerate(_firsts(prompts.groups)):
            reused = prompts.reused_lengths[index]
            if not reused or (reused >= len(group.tokens) - images.text_after(row) and not group.gaps):
                continue
            if self.behind and not group.gaps and images.cuts_none(row, images.width - len(group.tokens) + reused):
                self.call.images_behind = True
                continue
            stored[index] = (), 0
            self.call.state.log_once(
                "a prompt is computed whole, although the given cache holds a part of it: images stand behind that"
            )
        return replace(prompts, stored=stored)


def kept_ids(call: CallContext, input_ids: Tensor) -> Tensor:
    """Ids of prompts of a call whose cache is kept or given, see `ids_of_images`.

    Raises:
        Unsupported: The call's images have no such ids, or text behind them cannot be continued.
    """
    images = call.input_rows
    assert images is not None
    ids = ids_of_images(images, input_ids, call.positions.ids)
    if not _continues_text(call, images.text_token):
        raise Unsupported(
            f"prompts come with {next(iter(call.inputs.arguments)) if call.inputs else 'images'}, and text behind "
            "them is not continued: it does not attend causally, or layers do not continue states"
        )
    return ids


def _firsts(groups: Sequence[PromptGroup]) -> Iterator[tuple[int, PromptGroup]]:
    """Each group with the first of its rows in the call."""
    return zip([0, *accumulate(group.count for group in groups[:-1])], groups, strict=True)


def _shared(
    images: InputRows,
    positions: Tensor | None,
    one: tuple[int, PromptGroup],
    other: tuple[int, PromptGroup],
    common: int,
) -> int:
    """What two prompts, each the first row of a group, may share of so many tokens that they have in common.

    It ends before the first image that they do not both have.
    """
    if any(group.gaps for _, group in (one, other)):
        return 0
    common = min(common, *(len(group.tokens) - FEWEST for _, group in (one, other)))
    of_both = [_images(images, row, len(group.tokens)) for row, group in (one, other)]
    for first, second in zip_longest(*of_both):
        starts = [image.places[0] for image in (first, second) if image is not None]
        if min(starts) >= common:
            break
        if None in (first, second) or not _equal(first, second) or int(first.places[-1]) >= common:
            common = int(min(starts))
            break
    parts = []
    for row, group in (one, other):
        parts.append(images.of_tokens(row, len(group.tokens), max(0, common)))
        if positions is not None:
            first_token = positions.shape[-1] - len(group.tokens)
            of_row = positions[..., row if positions.shape[-2] > 1 else 0, first_token:]
            parts[-1].append(of_row[..., : max(0, common)])
    return common if common > 0 and all(torch.equal(*both) for both in zip(*parts, strict=True)) else 0


def _images(images: InputRows, row: int, length: int) -> list[RowImage]:
    """The images of a row of the call, in order; places count from its first token."""
    padding = images.width - length
    found = [image._replace(places=image.places - padding) for image in images.images_of(row // images.copies)]
    return sorted(found, key=lambda image: int(image.places[0]))


def _equal(one: RowImage, other: RowImage) -> bool:
    same = one.parts.keys() == other.parts.keys() and torch.equal(one.places, other.places)
    return same and all(torch.equal(part, other.parts[name]) for name, part in one.parts.items())


def _continues_text(call: CallContext, token: Tensor) -> bool:
    """Whether the model attends causally to text, as to what continues a beginning: tried once, with a few tokens.

    Args:
        token: ``[1]``: one of text.
    """
    model, structure, limit = call.model, call.structure, call.max_prefill_tokens

    def tried() -> bool:
        cache = SharedContextCache()
        cache.state.position_planes = call.positions.planes
        tokens = token.repeat(1, 2 * FEWEST)
        plan = compare_prompts([PromptGroup(tokens[0], 1)], StoredPrompts(cache), min_shared_tokens=1).plan()
        try:
            if structure.layout.prefills_by_rows:
                prefill_rows(model, cache, plan, Rows.of(tokens, None), structure.layout, max_tokens=limit)
            else:
                prefill_nodes(model, cache, plan, max_tokens=limit)
        except _ASKS_FOR_IMAGES:
            return False
        return True

    return structure.layout.continues_states and structure.kept("text behind images", tried)
