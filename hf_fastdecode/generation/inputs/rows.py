"""Tells which part of a call's images, videos or audio belongs to which row.

transformers gives them in several forms: a row of numbers for each token, a part for each image (a prompt has any
number of these), or the patches of all images end to end. Features take the places of placeholder tokens in order, so
the tokens of each image and of each row say which images are the row's own: `items` has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...errors import Unsupported
from .given import GivenInputs
from .items import KINDS, CountTokens, Items, by_kind, equal_parts, of_tokens


class RowImage(NamedTuple):
    """An image of a row, or all images of one kind."""

    places: Tensor  # of the tokens that stand for it, in the row's width; int64 on the CPU
    parts: dict[str, Tensor]  # what arguments have for it, by name

    def equals(self, other: RowImage) -> bool:
        return torch.equal(self.places, other.places) and equal_parts(self.parts, other.parts)


class InputRows:
    """The inputs of a call's given rows, each of which has so many `copies` in the call.

    Args:
        config: The model's, which names the placeholder tokens.
        count_tokens: Counts the tokens of an image where sizes and config do not determine them.
    """

    def __init__(self, given: GivenInputs, config: PreTrainedConfig, count_tokens: CountTokens):
        assert given.ids is not None
        self._arguments, self._ids, self._config = given.arguments, given.ids, config
        self._count_tokens = count_tokens
        self.copies, self.rows, self.width = given.copies, *given.ids.shape
        self._copies_of_features = given.copies_of_features

    @property
    def apart(self) -> bool:
        """Whether the inputs of each row are known, so that rows with equal ones are one input, and inputs run in
        several passes."""
        return self.rows == 1 or self.unclear is None

    @cached_property
    def unclear(self) -> str | None:
        """The name of an argument whose parts no row, or no token, is known to own."""
        others = (name for name, value in self._arguments.items() if not isinstance(value, Tensor) or not value.dim())
        if (unclear := next(others, self._by_kind[1])) is None and self.rows > 1:
            unknown = (next(iter(own)) for kind, own in self._kinds.items() if kind not in self._starts)
            unclear = next(unknown, None)
        return unclear

    def numbers(self) -> Tensor:
        """A number for each row of the call, ``[rows]`` on the CPU: equal ones of neighbours with equal inputs.

        Rows whose prompts differ may have equal ones.
        """
        number, numbers = 0, [0]
        alike = (self._ids[1:] == self._ids[:-1]).all(1).tolist()
        for row, same in enumerate(alike, 1):
            number += not (same and self.apart and equal_parts(self._parts(row), self._parts(row - 1)))
            numbers.append(number)
        return torch.tensor(numbers, device="cpu").repeat_interleave(self.copies)

    def of(self, rows: Sequence[int], places: Tensor | None = None) -> dict[str, Any]:
        """The arguments of some rows of the call, in order: of distinct ones, if rows are known apart, else of all.

        Args:
            places: ``[rows, tokens]`` int64: in the width of the call, those of the pass's tokens, -1 for padding;
                None for all of the width.
        """
        given = [row // self.copies for row in rows]
        if places is not None:
            return self._of_places(given, places)
        if given == list(range(self.rows)) or not self.apart:
            return dict(self._arguments)
        parts: dict[str, list[Tensor]] = {}
        for row in given:
            for name, part in self._parts(row).items():
                parts.setdefault(name, []).append(part)
        return {name: torch.cat(own) if len(own) > 1 else own[0] for name, own in parts.items()}

    def _of_places(self, given: Sequence[int], places: Tensor) -> dict[str, Any]:
        """The arguments of some of the tokens of given rows, and of the images that these stand for."""
        parts: dict[str, list[Tensor]] = {}
        for row, at in zip(given, places, strict=True):
            for name, value in self._of_tokens.items():
                own = value[row, at.clamp_min(0).to(value.device)]
                own[(at < 0).to(own.device)] = 0
                parts.setdefault(name, []).append(own[None])
            here = torch.zeros(self.width, dtype=torch.bool, device="cpu").index_fill_(0, at[at >= 0], True)
            for image in self._images_at(row, here):
                for name, part in image.items():
                    parts.setdefault(name, []).append(part)
        return {name: torch.cat(own) for name, own in parts.items()}

    def _images_at(self, given: int, here: Tensor) -> Iterator[dict[str, Tensor]]:
        """Arguments of the images of a given row whose tokens are at these positions, ``[width]`` bool."""
        stands = self._stands[given]
        if not bool((stands & here).any()):
            return
        if not bool((stands & ~here).any()):
            yield {name: part for name, part in self._parts(given).items() if name not in self._of_tokens}
            return
        yield from (image.parts for image in self.images_of(given) if bool(here[image.places].any()))

    def have_images(self, rows: Sequence[int], places: Tensor | None = None) -> bool:
        """Whether any of these rows of the call comes with an image, at these places if they are given; see `of`."""
        stands = self._stands[[row // self.copies for row in rows]]
        return bool((stands if places is None else stands.gather(1, places.clamp_min(0)) & (places >= 0)).any())

    def cuts_none(self, row: int, place: int) -> bool:
        """Whether all images of a row of the call are known to end before a place in its width, or to begin there."""
        images = (image.places >= place for image in self.images_of(row // self.copies))
        return all(bool(behind.all()) or not bool(behind.any()) for behind in images)

    def images_of(self, given: int) -> Iterator[RowImage]:
        """The images of a given row: each by itself where it is known how many tokens it has, else all of a kind.

        Raises `Unsupported` if an argument is not known to belong to tokens of the row.
        """
        if self.unclear is not None:
            raise Unsupported(f"it is not known which tokens the argument {self.unclear!r} belongs to")
        stands = torch.zeros(self.width, dtype=torch.bool, device="cpu")
        for kind, arguments in self._kinds.items():
            own = self._held[kind][given] if kind in self._held else torch.zeros_like(stands)
            images = list(self._images_of(kind, given, own.nonzero().flatten()))
            if bool(own.any()) != bool(images):
                raise Unsupported(f"it is not known which tokens the argument {next(iter(arguments))!r} belongs to")
            stands |= own
            yield from images
        typed = (value[given].cpu() != 0 for value in self._of_tokens.values())
        if any(bool((one.flatten(1).any(1) if one.dim() > 1 else one).logical_and(~stands).any()) for one in typed):
            name = next(iter(self._of_tokens))
            if not self._kinds:
                raise Unsupported(
                    f"{name!r} says that tokens are of images, and the call has none",
                    "pass all that the processor returns for the whole prompt",
                )
            raise Unsupported(f"the argument {name!r} says more than which tokens are of images")

    def text_after(self, row: int) -> int:
        """Tokens of a row of the call after the last one that stands for an image; all, padding included, without."""
        return self._text_after[row // self.copies]

    def counts_in_stock(self) -> dict[str, int]:
        """How many images of each kind stock makes features of at once, where they are known."""
        copies = {kind: self.copies if kind == "audio" else self._copies_of_features for kind in KINDS}
        return {kind: len(items) * copies[kind] for kind, items in self._items.items()}

    @property
    def text_token(self) -> Tensor:
        """``[1]`` int64 on the CPU: a token that stands for no image."""
        text = self._ids.cpu()[~self._stands]
        return text[-1:].long() if len(text) else torch.zeros(1, dtype=torch.long, device="cpu")

    @cached_property
    def _text_after(self) -> list[int]:
        behind = self._stands.flip(1).byte().argmax(1)
        return torch.where(self._stands.any(1), behind, self.width).tolist()

    @cached_property
    def _stands(self) -> Tensor:
        """Which tokens stand for images, ``[given rows, width]`` bool on the CPU; all of them if it is not known."""
        held = [*self._held.values(), *(value.cpu() != 0 for value in self._of_tokens.values())]
        if not held:
            return torch.ones(self._ids.shape, dtype=torch.bool, device="cpu")
        return torch.stack([one.flatten(2).any(2) if one.dim() > 2 else one for one in held]).any(0)

    @cached_property
    def _of_tokens(self) -> dict[str, Tensor]:
        """Arguments with a part for each token, ``[given rows, width, ...]``."""
        return {name: value for name, value in self._arguments.items() if of_tokens(name, value, self._ids)}

    def of_tokens(self, row: int, length: int, count: int) -> list[Tensor]:
        """Arguments of the first `count` tokens of a row of the call, which has `length` after its padding."""
        first = self.width - length
        return [value[row // self.copies, first : first + count] for value in self._of_tokens.values()]

    def _parts(self, given: int) -> dict[str, Tensor]:
        """Arguments of a given row, whose part of each is known."""
        if self.rows == 1:
            return {name: value for name, value in self._arguments.items() if isinstance(value, Tensor)}
        parts = {name: value[given : given + 1] for name, value in self._of_tokens.items()}
        for kind, starts in self._starts.items():
            parts |= self._items[kind].part(*starts[given : given + 2])
        return parts

    def _images_of(self, kind: str, given: int, places: Tensor) -> Iterator[RowImage]:
        """The images of one kind of a given row, whose tokens are at these places, see `images_of`."""
        if kind not in self._starts:  # of the only row
            yield RowImage(places, self._kinds[kind])
            return
        items, (first, end) = self._items[kind], self._starts[kind][given : given + 2]
        if end - first > 1 and (counts := self._counts[kind]) is not None:
            for index, own in enumerate(places.split(counts[first:end]), first):
                yield RowImage(own, items.part(index, index + 1))
        elif end > first:
            yield RowImage(places, items.part(first, end))

    @cached_property
    def _by_kind(self) -> tuple[dict[str, dict[str, Tensor]], str | None]:
        """Arguments without those of tokens, see `by_kind`."""
        found = {name: value for name, value in self._arguments.items() if name not in self._of_tokens}
        return by_kind({name: value for name, value in found.items() if isinstance(value, Tensor) and value.dim()})

    @property
    def _kinds(self) -> dict[str, dict[str, Tensor]]:
        return self._by_kind[0]

    @cached_property
    def _items(self) -> dict[str, Items]:
        found = {kind: Items.among(kind, arguments, self._config) for kind, arguments in self._kinds.items()}
        return {kind: items for kind, items in found.items() if items is not None}

    @cached_property
    def _starts(self) -> dict[str, list[int]]:
        """Which image of a kind is the first of each row, and the number of images, by kind, where that is known."""
        if self.rows == 1:
            return {kind: [0, len(items)] for kind, items in self._items.items()}
        found = {kind: items.starts(self._tokens(kind), self._count_tokens) for kind, items in self._items.items()}
        return {kind: starts for kind, starts in found.items() if starts is not None}

    @cached_property
    def _counts(self) -> dict[str, list[int] | None]:
        return {kind: items.counts(self._tokens(kind), self._count_tokens) for kind, items in self._items.items()}

    def _tokens(self, kind: str) -> list[int]:
        return self._held[kind].sum(1).tolist() if kind in self._held else [0] * self.rows

    @cached_property
    def _held(self) -> dict[str, Tensor]:
        """Which tokens stand for images of each kind whose token is known, ``[given rows, width]`` bool on the CPU."""
        ids = self._ids.cpu()
        held = {kind: ids == token for kind in KINDS if (token := self._token(kind)) is not None}
        seen = [kind for kind, places in held.items() if bool(places.any())]
        if len(self._kinds) == len(seen) == 1:  # in GLM-4V, the token of images may stand for videos
            held[next(iter(self._kinds))] = held[seen[0]]
        return held

    def _token(self, kind: str) -> int | None:
        names = (f"{kind}_token_id", f"{kind}_token_index")
        return next((value for name in names if isinstance(value := getattr(self._config, name, None), int)), None)
