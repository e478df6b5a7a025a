"""Prompts with images: their common prefixes, up to where texts or images differ, and ids for kept ones.

A model computes text that follows from stored keys and values, or states, as it does other text, if it does not attend
both ways there. It may compute images that follow too, if their tokens do not see each other.

The tokens that stand for images have one id. In a cache that outlives its call they have negative ones, four that take
turns, made of a digest of the image's pixels, its tokens' positions, which some models count by the images of a whole
batch (HunYuan-VL), and whatever else belongs to it: kept prompts are found by tokens alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, pairwise, zip_longest
from typing import Final

import torch
from torch import Tensor

from ...cache.layers.cross import ImageInputs
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext
from ..inputs.encoded import FoundInputs
from ..inputs.given import image_mask_of
from ..inputs.rows import InputRows, RowImage
from .by_rows import Rows, row_passes
from .packed import prefill_passes
from .prompt_plan import FEWEST, ComparedPrompts, PromptGroup, StoredPrompts, compare_prompts

_ASKS_FOR_IMAGES: Final = (Unsupported, ValueError, TypeError, AttributeError, LookupError, NameError)
"""Errors of a model's code where there are none, such as of what is left None or unassigned then."""

UNCONTINUED: Final = "layers of their own attend to images, which no kept cache holds"
"""Why a call with such images takes no cache."""

_IDS = 4  # of 62 bits each


class TextPrefixes:
    """What prompts of text alone may share and reuse: whatever tokens they have in common."""

    of_text = True

    def known_ids(self, ids: Tensor) -> Tensor:
        """The ids by which prompts are compared."""
        return ids

    def sharing(self, prompts: ComparedPrompts, *, after: bool) -> ComparedPrompts:
        """The prompts, of which neighbours have in common what they may share."""
        return prompts

    def reusing(self, prompts: ComparedPrompts, *, after: bool) -> ComparedPrompts:
        """The prompts, which reuse of stored tokens what they may."""
        return prompts


TEXT: Final = TextPrefixes()


@dataclass(frozen=True)
class ImagePrefixes:
    """What prompts of a call with images may share with each other, and reuse of a given cache.

    Where `after` is set, prompts may have images after what they share or reuse.
    """

    call: CallContext

    of_text = False

    def known_ids(self, ids: Tensor) -> Tensor:
        """The ids, those of images by their digests if a cache of these prompts is kept or given.

        Raises:
            Unsupported: The call's images have no such ids, or text after them cannot be continued.
        """
        call, images = self.call, self.call.input_rows
        if not (call.must_share or call.returns_cache):
            return ids
        assert images is not None
        ids = ids_of_images(images, ids, call.positions.ids)
        if not _continues_text(call, images.text_token):
            raise Unsupported(
                f"prompts come with {next(iter(call.inputs.arguments)) if call.inputs else 'images'}, and text behind "
                "them is not continued: it does not attend causally, or layers do not continue states"
            )
        return ids

    def sharing(self, prompts: ComparedPrompts, *, after: bool) -> ComparedPrompts:
        """The prompts, of which neighbours have in common what they may share."""
        images, common = self.call.input_rows, prompts.common
        shared = [0] * len(common)
        if images is not None and any(common) and images.apart:
            pairs = list(zip(pairwise(_firsts(prompts.groups)), common, strict=True))
            with suppress(Unsupported):
                shared = [_shared(images, self.call.positions.ids, *pair, length) for pair, length in pairs]
            for index, (pair, _) in enumerate(pairs):
                follow = any(len(group.tokens) - images.text_after(row) > shared[index] for row, group in pair)
                shared[index] = 0 if follow and not after else shared[index]
            if any(shared) and not _continues_text(self.call, images.text_token):
                shared = [0] * len(common)
        return replace(prompts, common=shared)

    def reusing(self, prompts: ComparedPrompts, *, after: bool) -> ComparedPrompts:
        """The prompts, which reuse nothing where images come after what they would."""
        if not self.call.structure.layout.states:
            prompts = prompts.if_it_saves(self.call.options.worth_passes)
        images, stored = self.call.input_rows, list(prompts.stored)
        assert images is not None
        for index, (row, group) in enumerate(_firsts(prompts.groups)):
            reused = prompts.reused_lengths[index]
            if not reused or (reused >= len(group.tokens) - images.text_after(row) and not group.gaps):
                continue
            if after and not group.gaps and images.cuts_none(row, images.width - len(group.tokens) + reused):
                continue
            stored[index] = (), 0
            self.call.state.log_once(
                "a prompt is computed whole, although the given cache holds a part of it: images come after that"
            )
        return replace(prompts, stored=stored)


def prefixes_of(call: CallContext) -> ImagePrefixes | TextPrefixes:
    """What prompts of a call with images may share; nothing of images where layers attend to these.

    Raises:
        Unsupported: These cannot be in the caller's cache.
    """
    if mask_of_images(call) is None:
        return ImagePrefixes(call)
    if call.must_share:
        raise Unsupported(UNCONTINUED)
    return TEXT


def mask_of_images(call: CallContext) -> str | None:
    """As `image_mask_of`, of a call with images; None for others."""
    return None if call.inputs is None else image_mask_of(call.model)


def images_of_layers(call: CallContext, rows: Sequence[int]) -> FoundInputs | None:
    """Storage for the images of distinct prompts that layers of the model's own attend to, if there are such.

    Args:
        rows: Rows of each distinct prompt, whose images are its own.

    Raises:
        Unsupported: The call has them in another form.
    """
    if (mask := mask_of_images(call)) is None:
        return None
    assert call.inputs is not None
    pixels = call.inputs.arguments.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.dim() != 6:
        raise Unsupported("its images are not pixel_values [rows, images, tiles, channels, height, width]")
    text, vision = call.structure.text_config, call.model.config.vision_config
    tokens = pixels.shape[1] * pixels.shape[2] * ((vision.image_size // vision.patch_size) ** 2 + 1)
    layers, heads = text.cross_attention_layers, text.num_attention_heads
    of_rows = torch.arange(len(rows), device="cpu").repeat_interleave(torch.tensor(rows, device="cpu"))
    return FoundInputs(ImageInputs(len(rows), tokens, layers, heads, mask), of_rows)


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

    @torch.no_grad()
    def tried() -> bool:
        cache = SharedContextCache()
        cache.state.position_planes = call.positions.planes
        tokens = token.repeat(1, 2 * FEWEST)
        plan = compare_prompts([PromptGroup(tokens[0], 1)], StoredPrompts(cache), min_shared_tokens=1).plan()
        try:
            if structure.layout.prefills_by_rows:
                rows = Rows.of(tokens, None)
                passes = row_passes(model, cache, plan, rows, structure.layout, keep=1, max_tokens=limit)
            else:
                passes = prefill_passes(model, cache, plan, [], max_tokens=limit)
            deque(passes, maxlen=0)
        except _ASKS_FOR_IMAGES:
            return False
        return True

    return structure.layout.continues_states and structure.kept("text behind images", tried)


def ids_of_images(images: InputRows, input_ids: Tensor, positions: Tensor | None) -> Tensor:
    """Ids ``[rows, width]`` int64, where tokens that stand for images have ids of their digests.

    Args:
        images: What the prompts come with.
        input_ids: ``[rows, width]``: those of the call, samples and beams included.
        positions: ``[..., rows or 1, width]``: theirs.

    Raises:
        Unsupported: Not all inputs are tensors of single rows.
    """
    ids = input_ids.to("cpu", torch.long, copy=True)
    for given in range(images.rows):
        rows = slice(given * images.copies, (given + 1) * images.copies)
        for image in images.images_of(given):
            parts = image.parts
            if positions is not None:
                of_row = positions[..., rows.start if positions.shape[-2] > 1 else 0, :]
                parts = parts | {"positions": of_row[..., image.places.to(of_row.device)]}
            digest = _digest(parts)
            ids[rows, image.places] = digest[torch.arange(len(image.places), device="cpu") % _IDS]
    return ids.to(input_ids.device)


def _digest(parts: dict[str, Tensor]) -> Tensor:
    """``[_IDS]`` int64 on the CPU, below 0."""
    digest = blake2b(digest_size=8 * _IDS)
    for name, part in sorted(parts.items()):
        digest.update(f"{name} {part.dtype} {tuple(part.shape)} ".encode())
        digest.update(part.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    numbers = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    return -1 - (numbers & (1 << 62) - 1)
