"""Prefixes that prompts share and reuse, by what they come with: text alone, an encoder's inputs, or images.

Prompts with images have common prefixes up to where texts or images differ. A model computes text that follows from
stored keys and values, or states, as it does other text, if it does not attend both ways there. It may compute images
that follow too, if their tokens do not see each other.

The tokens that stand for images have one id. In a cache that outlives its call they have negative ones, four that take
turns, made of a digest of the image's pixels, its tokens' positions, which some models count by the images of a whole
batch (HunYuan-VL), and whatever else belongs to it: kept prompts are found by tokens alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate, pairwise, zip_longest
from typing import Any, Final

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext
from ..inputs.distinct import FoundInputs, find_image_inputs, find_inputs
from ..inputs.given import image_mask_of
from ..inputs.rows import InputRows, RowImage
from .by_rows import Rows, prefill_passes
from .prompt_plan import (
    FEWEST,
    ComparedPrompts,
    PromptGroup,
    PromptPlan,
    StoredPrompts,
    compare_prompts,
    continuation_of,
)

_ASKS_FOR_IMAGES: Final = (Unsupported, ValueError, TypeError, AttributeError, LookupError, NameError)
"""Errors of a model's code where there are none, such as of what is left None or unassigned then."""

_IDS = 4  # of 62 bits each


class TextPrefixes:
    """Prefixes that prompts may share and reuse: with text alone, whatever tokens they have in common.

    Attributes:
        of_text: Whether tokens say what may be shared.
        rows: What comes with the prompts of each row; None with text alone.
        found: The encoder's inputs that a decoder's prompts are of; None without an encoder.
    """

    of_text = True
    rows: InputRows | None = None

    def __init__(self, found: FoundInputs | None = None):
        self.found = found

    def known_ids(self, ids: Tensor) -> Tensor:
        """The ids by which prompts are compared."""
        return ids

    def numbers(self) -> Tensor | None:
        """``[rows]`` on the CPU: numbers by which prompts that equal others in tokens must equal them too."""
        return None if self.found is None else self.found.of_rows

    def inputs(self, rows: Sequence[int]) -> FoundInputs | None:
        """Storage for what layers attend to beside tokens, of distinct prompts with so many rows."""
        return self.found

    def sharing(self, prompts: ComparedPrompts) -> ComparedPrompts:
        """The prompts, of which neighbours have in common what they may share."""
        return prompts

    def reusing(self, prompts: ComparedPrompts) -> ComparedPrompts:
        """The prompts, which reuse of stored tokens what they may."""
        return prompts

    def narrowed(self, nodes: PromptPlan, rows: Callable[[], Rows]) -> TextPrefixes | None:
        """Prefixes without what may have failed a pass over these nodes of distinct rows; None if nothing may have."""
        return None


TEXT: Final = TextPrefixes()


class _OfInputs(TextPrefixes):
    rows: InputRows

    def __init__(self, call: CallContext):
        super().__init__()
        assert call.inputs is not None and call.input_rows is not None
        self._call, self._given, self.rows = call, call.inputs, call.input_rows

    def numbers(self) -> Tensor:
        return self.rows.numbers()


class LayerImages(_OfInputs):
    """Prefixes of prompts with images that layers of the model's own attend to: text shares nothing of these.

    Raises `Unsupported` for a cache of the caller's, in which such images cannot be.
    """

    def __init__(self, call: CallContext, mask: str):
        super().__init__(call)
        self._mask = mask
        if call.must_share:
            raise Unsupported("layers of their own attend to images, which no kept cache holds")

    def inputs(self, rows: Sequence[int]) -> FoundInputs:
        text, vision = self._call.structure.text_config, self._call.model.config.vision_config
        return find_image_inputs(self._given.arguments, rows, text, vision, self._mask)


_AFTER = "images after stored tokens"
"""Whether passes may have them: where tokens of an image see each other, our attention does not compute them."""


class ImagePrefixes(_OfInputs):
    """Prefixes of prompts with images, each of which tokens stand for, also `after` what prompts share or reuse."""

    of_text = False

    def __init__(self, call: CallContext, *, after: bool):
        super().__init__(call)
        self._after = after

    def known_ids(self, ids: Tensor) -> Tensor:
        """The ids, those of images by their digests if a cache of these prompts is kept or given.

        Raises `Unsupported` if the call's images have no such ids, or text after them cannot be continued.
        """
        call = self._call
        if not (call.must_share or call.returns_cache):
            return ids
        ids = ids_of_images(self.rows, ids, call.positions.ids)
        if not _continues_text(call, self.rows.text_token):
            raise Unsupported(
                f"prompts come with {self._given.name}, and text behind them is not continued: it does not attend "
                "causally, or layers do not continue states"
            )
        return ids

    def sharing(self, prompts: ComparedPrompts) -> ComparedPrompts:
        images, common = self.rows, prompts.common
        shared = [0] * len(common)
        if any(common) and images.apart:
            pairs = list(zip(pairwise(_firsts(prompts.groups)), common, strict=True))
            with suppress(Unsupported):
                shared = [_shared(images, self._call.positions.ids, *pair, length) for pair, length in pairs]
            for index, (pair, _) in enumerate(pairs):
                follow = any(len(group.tokens) - images.text_after(row) > shared[index] for row, group in pair)
                shared[index] = 0 if follow and not self._after else shared[index]
            if any(shared) and not _continues_text(self._call, images.text_token):
                shared = [0] * len(common)
        return replace(prompts, common=shared)

    def reusing(self, prompts: ComparedPrompts) -> ComparedPrompts:
        """The prompts, which reuse nothing where images come after what they would."""
        images, stored = self.rows, list(prompts.stored)
        for index, (row, group) in enumerate(_firsts(prompts.groups)):
            reused = prompts.reused_lengths[index]
            if not reused or (reused >= len(group.tokens) - images.text_after(row) and not group.gaps):
                continue
            if self._after and not group.gaps and images.cuts_none(row, images.width - len(group.tokens) + reused):
                continue
            stored[index] = (), 0
            self._call.state.log_once(
                "a prompt is computed whole, although the given cache holds a part of it: images come after that"
            )
        return replace(prompts, stored=stored)

    def narrowed(self, nodes: PromptPlan, rows: Callable[[], Rows]) -> ImagePrefixes | None:
        """Prefixes without images after what is stored, if a pass had some; so are those of later calls."""
        distinct, parts = rows(), zip(nodes.items, nodes.groups, strict=True)
        if not any(one.context and distinct.images_in(group, one.position, one.span.length) for one, group in parts):
            return None
        self._call.structure.keep(_AFTER, False)
        return ImagePrefixes(self._call, after=False)


def prefixes_of(call: CallContext, arguments: Mapping[str, Any], rows: int, *, narrow: bool) -> TextPrefixes:
    """Prefixes of so many prompts of a call, or of a pass with these model arguments.

    If `narrow`, images may not come after what prompts share or reuse. Raises `Unsupported` where images that layers
    attend to cannot be in the caller's cache, or encoder outputs are of other rows.
    """
    if call.inputs is None:
        return TEXT if (found := find_inputs(arguments, rows)) is None else TextPrefixes(found)
    if (mask := image_mask_of(call.model)) is not None:
        return LayerImages(call, mask)
    return ImagePrefixes(call, after=not narrow and call.structure.kept(_AFTER, lambda: True))


def _firsts(groups: Sequence[PromptGroup]) -> Iterator[tuple[int, PromptGroup]]:
    return zip([0, *accumulate(group.count for group in groups[:-1])], groups, strict=True)


def _shared(
    images: InputRows,
    positions: Tensor | None,
    one: tuple[int, PromptGroup],
    other: tuple[int, PromptGroup],
    common: int,
) -> int:
    """How many of so many common tokens two prompts, each the first row of a group, may share: up to the first image
    that they do not both have."""
    if any(group.gaps for _, group in (one, other)):
        return 0
    common = min(common, *(len(group.tokens) - FEWEST for _, group in (one, other)))
    of_both = [_images(images, row, len(group.tokens)) for row, group in (one, other)]
    for first, second in zip_longest(*of_both):
        starts = [image.places[0] for image in (first, second) if image is not None]
        if min(starts) >= common:
            break
        if None in (first, second) or not first.equals(second) or int(first.places[-1]) >= common:
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


def _continues_text(call: CallContext, token: Tensor) -> bool:
    """Whether the model attends causally to text, which then continues a prefix: tried once, with a few of a token."""
    model, structure, limit = call.model, call.structure, call.max_prefill_tokens
    continuation = continuation_of(structure.layout)

    @torch.no_grad()
    def tried() -> bool:
        cache = SharedContextCache()
        cache.state.position_planes = call.positions.planes
        tokens = token.repeat(1, 2 * FEWEST)
        plan = compare_prompts([PromptGroup(tokens[0], 1)], StoredPrompts(cache), min_shared_tokens=1).plan()
        try:
            rows = None if structure.layout.packs else Rows.of(tokens, None)
            deque(prefill_passes(model, cache, plan, continuation, rows=rows, max_tokens=limit), maxlen=0)
        except _ASKS_FOR_IMAGES:
            return False
        return True

    return continuation.continues and structure.kept("text behind images", tried)


def ids_of_images(images: InputRows, input_ids: Tensor, positions: Tensor | None) -> Tensor:
    """Ids ``[rows, width]`` int64, where tokens that stand for images have ids of their digests.

    Of all rows of a call, with positions ``[..., rows or 1, width]``; raises `Unsupported` where not all inputs are
    tensors of single rows.
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
