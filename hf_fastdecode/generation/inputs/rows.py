"""Tells which part of a call's images, videos or audio belongs to which row.

transformers gives them in several forms: a row of numbers for each token, a part for each image (a prompt has any
number of these), or the patches of all images end to end. Features take the places of placeholder tokens in order, so
the placeholders of each row say how many images are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...errors import Unsupported
from .given import GivenInputs

_AUDIO = ("audio", "feature", "speech", "input_values")


class _Counts(NamedTuple):
    """Placeholder tokens of each row: how many, and in how many runs without a gap."""

    tokens: list[int]
    runs: list[int]


class RowImage(NamedTuple):
    """An image of a row, or all images of one kind.

    Attributes:
        places: Of the tokens that stand for it, in the row's width; int64 on the CPU.
        parts: What arguments have for it, by name.
    """

    places: Tensor
    parts: dict[str, Tensor]


class InputRows:
    """The inputs of a call's given rows.

    Attributes:
        apart: Whether the inputs of each row are known, so that rows with equal ones are one input, and inputs run in
            several passes.
        unclear: Otherwise, the name of an argument whose parts no row can be told to own.
    """

    def __init__(self, given: GivenInputs, config: PreTrainedConfig):
        assert given.ids is not None
        self._arguments, self._ids, self._config = given.arguments, given.ids, config
        self.copies, self.rows, self.width = given.copies, *given.ids.shape
        self._starts: dict[str, list[int]] = {}
        self.unclear: str | None = None
        self._counted: dict[str, _Counts | None] = {}
        if self.rows > 1:
            for name, value in self._arguments.items():
                starts = self._starts_of(name, value) if isinstance(value, Tensor) and value.dim() else None
                if starts is None:
                    self.unclear = name
                    break
                self._starts[name] = starts

    @property
    def apart(self) -> bool:
        return self.unclear is None

    def numbers(self) -> Tensor:
        """A number for each row of the call, ``[rows]`` on the CPU: equal ones of neighbours with equal inputs.

        Rows whose prompts differ may have equal ones.
        """
        number, numbers = 0, [0]
        alike = [False] * self.rows
        if self.apart and self.rows > 1:
            alike[1:] = (self._ids[1:] == self._ids[:-1]).all(1).tolist()
        for row in range(1, self.rows):
            both = ((self._part(name, row), self._part(name, row - 1)) for name in self._starts)
            number += not (alike[row] and all(torch.equal(*parts) for parts in both))
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
        parts = {name: [self._part(name, row) for row in given] for name in self._starts}
        joined = {name: torch.cat(own) if len(own) > 1 else own[0] for name, own in parts.items()}
        return {name: value for name, value in joined.items() if len(value)}

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
        """What arguments have for the images of a given row whose tokens are at these places, ``[width]`` bool."""
        stands = self._stands[given]
        if not bool((stands & here).any()):
            return
        if not bool((stands & ~here).any()):
            names = (name for name in self._arguments if name not in self._of_tokens)
            yield {name: part for name in names if len(part := self._part(name, given))}
            return
        for image in self.images_of(given):
            if bool(here[image.places].any()):
                yield image.parts

    def have_images(self, rows: Sequence[int], places: Tensor | None = None) -> bool:
        """Whether any of these rows of the call comes with an image, at these places if they are given; see `of`."""
        stands = self._stands[[row // self.copies for row in rows]]
        return bool((stands if places is None else stands.gather(1, places.clamp_min(0)) & (places >= 0)).any())

    def cuts_none(self, row: int, place: int) -> bool:
        """Whether all images of a row of the call are known to end before a place in its width, or to begin there."""
        images = (image.places >= place for image in self.images_of(row // self.copies))
        return all(bool(behind.all()) or not bool(behind.any()) for behind in images)

    def images_of(self, given: int) -> Iterator[RowImage]:
        """The images of a given row: each by itself where a grid tells how many tokens it has, else all of a kind.

        Raises:
            Unsupported: An argument is not known to belong to tokens of the row.
        """
        names: dict[str, list[str]] = {}
        for name, value in self._arguments.items():
            if self.unclear is not None or not isinstance(value, Tensor) or not value.dim():
                raise Unsupported(f"it is not known which tokens the argument {self.unclear or name!r} belongs to")
            if name not in self._of_tokens:
                names.setdefault(_kind(name), []).append(name)
        stands = torch.zeros(self.width, dtype=torch.bool, device="cpu")
        for kind, of_kind in names.items():
            token = self._token(kind)
            held = torch.zeros_like(stands) if token is None else (self._ids[given] == token).cpu()
            parts = {name: part for name in of_kind if len(part := self._part(name, given))}
            if bool(held.any()) != bool(parts):
                raise Unsupported(f"it is not known which tokens the argument {of_kind[0]!r} belongs to")
            stands |= held
            if parts:
                yield from _each(kind, held.nonzero().flatten(), parts)
        typed = (value[given].cpu() != 0 for value in self._of_tokens.values())
        if any(bool((one.flatten(1).any(1) if one.dim() > 1 else one).logical_and(~stands).any()) for one in typed):
            if not names:
                raise Unsupported(
                    f"{next(iter(self._of_tokens))!r} says that tokens are of images, and the call has none",
                    "pass all that the processor returns for the whole prompt",
                )
            raise Unsupported(
                f"the argument {next(iter(self._of_tokens))!r} says more than which tokens are of images"
            )

    def text_after(self, row: int) -> int:
        """Tokens of a row of the call behind the last one that stands for an image; all, padding included, without."""
        return self._text_after[row // self.copies]

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
        held = [self._ids == token for kind in ("image", "video", "audio") if (token := self._token(kind)) is not None]
        held += [value.to(self._ids.device) != 0 for value in self._of_tokens.values()]
        if not held:
            return torch.ones(self._ids.shape, dtype=torch.bool, device="cpu")
        return torch.stack([one.flatten(2).any(2) if one.dim() > 2 else one for one in held]).any(0).cpu()

    @cached_property
    def _of_tokens(self) -> dict[str, Tensor]:
        """Arguments with a part for each token, ``[given rows, width, ...]``."""
        return {
            name: value
            for name, value in self._arguments.items()
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == self._ids.shape
        }

    def of_tokens(self, row: int, length: int, count: int) -> list[Tensor]:
        """Of a row of the call with `length` tokens behind its padding, what arguments have for the first `count`."""
        first = self.width - length
        return [value[row // self.copies, first : first + count] for value in self._of_tokens.values()]

    def _part(self, name: str, row: int) -> Tensor:
        starts = self._starts[name] if self.rows > 1 else [0, len(self._arguments[name])]
        part: Tensor = self._arguments[name][starts[row] : starts[row + 1]]
        return part

    def _starts_of(self, name: str, value: Tensor) -> list[int] | None:
        """Where the parts of each row begin along the first dimension, and the end; None if it is not known."""
        if value.dim() > 1 and value.shape[:2] == self._ids.shape:
            return list(range(self.rows + 1))
        kind = _kind(name)
        counts = self._counts(kind)
        if counts is None:
            return None
        grid, size = self._arguments.get(f"{kind}_grid_thw"), len(value)
        if isinstance(grid, Tensor):
            patches = grid.prod(1).tolist()
            images = self._images(patches, counts)
            if images is None:
                return None
            if size == len(grid):
                return images
            first = _sums(patches)
            return [first[image] for image in images] if size == sum(patches) else None
        if size == self.rows and all(counts.tokens):  # of each row, or of its one image
            return list(range(self.rows + 1))
        if size == sum(counts.runs) and size != self.rows:
            return _sums(counts.runs)
        each, rest = divmod(sum(counts.tokens), size)
        if size != self.rows and not rest and not any(count % each for count in counts.tokens):
            return _sums([count // each for count in counts.tokens])
        return None

    @staticmethod
    def _images(patches: list[int], counts: _Counts) -> list[int] | None:
        """Where the images of each row begin, and the end, by their patches: as many stand behind each placeholder."""
        tokens = sum(counts.tokens)
        merged, rest = divmod(sum(patches), tokens) if tokens else (0, 1)
        if not rest and not any(count % merged for count in patches):
            return _cut([count // merged for count in patches], counts.tokens)
        return _sums(counts.runs) if sum(counts.runs) == len(patches) else None

    def _counts(self, kind: str) -> _Counts | None:
        if kind not in self._counted:
            self._counted[kind] = self._count(kind)
        return self._counted[kind]

    def _token(self, kind: str) -> int | None:
        """The token that stands for images of a kind."""
        names = (f"{kind}_token_id", f"{kind}_token_index")
        return next((value for name in names if isinstance(value := getattr(self._config, name, None), int)), None)

    def _count(self, kind: str) -> _Counts | None:
        token = self._token(kind)
        if token is None:
            return None
        held = self._ids == token
        begins = held[:, :1].sum(1) + (held[:, 1:] & ~held[:, :-1]).sum(1)
        tokens, runs = torch.stack((held.sum(1), begins)).tolist()
        return _Counts(tokens, runs)


def _kind(name: str) -> str:
    if "video" in name or name.startswith("second_per_grid"):
        return "video"
    return "audio" if any(part in name for part in _AUDIO) else "image"


def _each(kind: str, places: Tensor, parts: dict[str, Tensor]) -> Iterator[RowImage]:
    """The images of one kind by themselves, if that is known, see `InputRows.images_of`."""
    grid = parts.get(f"{kind}_grid_thw")
    patches = [] if grid is None else [int(count) for count in grid.prod(1).tolist()]
    merged, rest = divmod(sum(patches), len(places))
    sizes = {
        name: {len(patches): [1] * len(patches), sum(patches): patches}.get(len(part)) for name, part in parts.items()
    }
    if not patches or rest or any(count % merged for count in patches) or None in sizes.values():
        yield RowImage(places, parts)
        return
    of_images = {name: part.split(sizes[name]) for name, part in parts.items()}
    for index, own in enumerate(places.split([count // merged for count in patches])):
        yield RowImage(own, {name: split[index] for name, split in of_images.items()})


def _sums(counts: Iterable[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def _cut(sizes: Sequence[int], wanted: Sequence[int]) -> list[int] | None:
    """Where runs of items begin whose sizes add up to the wanted ones, and the end; None where they do not."""
    sums = {size: index for index, size in enumerate(_sums(sizes))}
    cuts = [sums.get(size) for size in _sums(wanted)]
    if any(cut is None for cut in cuts) or cuts[-1] != len(sizes):
        return None
    return [cut for cut in cuts if cut is not None]
