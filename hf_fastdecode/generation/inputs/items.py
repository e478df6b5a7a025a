"""The images, the videos or the sounds (items) of a call, and how many placeholder tokens each has.

transformers encodes the items of one kind in order and puts their features in the places of placeholder tokens, in
order. Which items belong to a row therefore follows from the number of tokens of each item:

1. An argument belongs to one kind, by its name; one whose name says nothing, to the only kind that there is.
2. The arguments of a kind have one entry for each item, or as many as an integer argument says (patches of a grid,
   tiles): `Items.among`.
3. `Items.counts` are numbers of tokens that are known, not estimated. Items of equal sizes (shapes, integers, masks,
   padding) have equally many; the config's ``spatial_merge_size`` says how many patches of a grid make one; of each
   other size, the model's own ``get_image_features``, or that of videos or sounds, encodes one item.
4. The counts must add up to the placeholder tokens of each row. As many items as rows, each of which has such tokens,
   are one for each row.

Where a step fails, the call's items are not known by row (None), and all of them run in one pass, as they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.overrides import as_stock
from ..structure import Structure

KINDS: Final = ("image", "video", "audio")

_MARKS: Final = {
    "video": ("video", "second_per_grid"),
    "image": ("image", "pixel", "patch", "spatial", "aspect", "tile"),
    "audio": ("audio", "feature", "speech", "input_values"),
}
"""Parts of argument names, by kind; the first kind that matches."""

_OF_TOKENS: Final = ("token_type_ids", "cross_attention_mask", "position_mask")
"""Endings of the names of arguments with one entry per prompt token."""

_FEW: Final = 64
"""Most floats of an item that count as its size, such as seconds; more are pixels or features."""

SHAPE_ERRORS: Final = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""Errors of encoders for shapes that they do not expect."""

CountTokens = Callable[[str, Hashable, dict[str, Tensor]], "int | None"]
"""Number of tokens of an item, from its kind, size and part of each argument; None if unknown."""


def counting_tokens(model: PreTrainedModel, structure: Structure, arguments: Mapping[str, Any]) -> CountTokens:
    """Count tokens by encoding one item of each size with the model's own method; kept while it is untouched.

    Model arguments of the call other than tensors are passed to the method too.
    """
    plain = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}

    def count(kind: str, size: Hashable, parts: dict[str, Tensor]) -> int | None:
        question = "tokens of an item", kind, blake2b(repr(size).encode(), digest_size=16).digest()
        return structure.kept(question, lambda: _features_made(model, structure, kind, plain, parts))

    return count


@torch.no_grad()
def _features_made(
    model: PreTrainedModel, structure: Structure, kind: str, plain: Mapping[str, Any], parts: Mapping[str, Tensor]
) -> int | None:
    """How many features the model makes of an item, or of two where one fails, see `features`; None if it cannot."""
    name = f"get_{kind}_features"
    method = next((getattr(one, name) for one in (model.base_model, model) if hasattr(type(one), name)), None)
    if method is None:
        return None
    parameters = signature(method).parameters
    for times in (1, 2):
        arguments = {**plain, **{name: torch.cat([part] * times) for name, part in parts.items()}}
        try:
            with as_stock():
                output = method(**{name: value for name, value in arguments.items() if name in parameters})
        except SHAPE_ERRORS:
            continue
        features = getattr(output, "pooler_output", output)
        if features is None:  # sounds of Qwen2.5-Omni, before transformers 5.24
            features = getattr(output, "last_hidden_state", None)
        of_items = [features] if isinstance(features, Tensor) else features
        if not isinstance(of_items, list | tuple) or not all(isinstance(one, Tensor) for one in of_items):
            return None
        size = int(structure.text_config.hidden_size) * times
        tokens, rest = divmod(sum(one.numel() for one in of_items), size)
        return None if rest else tokens
    return None


def of_tokens(name: str, value: Any, ids: Tensor) -> bool:
    """Whether an argument has a part for each token of the prompts ``[rows, width]``."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[:2] != ids.shape:
        return False
    return name.endswith(_OF_TOKENS) or _marked(name) is None


def by_kind(arguments: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], str | None]:
    """The arguments of each kind, and the name of one whose kind is not known, if there is one."""
    kinds: dict[str, dict[str, Tensor]] = {}
    unmarked = dict(arguments)
    for name in arguments:
        if (kind := _marked(name)) is not None:
            kinds.setdefault(kind, {})[name] = unmarked.pop(name)
    if unmarked and len(kinds) != 1:
        return kinds, next(iter(unmarked))
    for own in kinds.values():
        own.update(unmarked)
    return kinds, None


def _marked(name: str) -> str | None:
    return next((kind for kind, marks in _MARKS.items() if any(mark in name for mark in marks)), None)


@dataclass(frozen=True)
class Items:
    """The items of one of `KINDS`."""

    kind: str
    arguments: dict[str, Tensor]  # by name; entries of all items along the first dimension
    sizes: dict[str, list[int]] = field(repr=False)  # entries of each item, by the argument's name
    merge: int | None = None  # how many patches of a grid make a token, by the config; None where it does not say

    @classmethod
    def among(cls, kind: str, arguments: dict[str, Tensor], config: PreTrainedConfig | None = None) -> Items | None:
        """The items that these arguments hold; None where it is not clear which entries are of one item."""
        lengths = {name: len(value) if value.dim() else 0 for name, value in arguments.items()}
        grid = arguments.get(f"{kind}_grid_thw")
        counts = [value for value in arguments.values() if _holds_counts(value)] if grid is None else [grid]
        candidates = list[dict[str, list[int]]]()
        if len(set(lengths.values())) == 1:
            candidates.append({name: [1] * length for name, length in lengths.items()})
        for numbers in counts:
            of_items = numbers.reshape(len(numbers), -1).prod(1).tolist()
            ones, total = [1] * len(of_items), sum(of_items)
            if not all(length in (len(ones), total) for length in lengths.values()):
                continue
            if total == len(ones) and of_items != ones:  # entries of single items, or of as many as the numbers say
                return None
            splits = {total: of_items, len(ones): ones}
            candidates.append({name: splits[length] for name, length in lengths.items()})
        first = candidates[0] if candidates else {}
        if not first or any(one != first for one in candidates) or not next(iter(lengths.values())):
            return None
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        return cls(kind, arguments, first, merge**2 if isinstance(merge, int) else None)

    def __len__(self) -> int:
        return len(next(iter(self.sizes.values())))

    def part(self, first: int, end: int) -> dict[str, Tensor]:
        """The entries of items ``first`` to ``end``, of each argument; without arguments that have none."""
        parts = {name: self.arguments[name][begins[first] : begins[end]] for name, begins in self.begins.items()}
        return {name: part for name, part in parts.items() if len(part)}

    @cached_property
    def begins(self) -> dict[str, list[int]]:
        """Where the entries of each item begin in each argument, and the end."""
        return {name: offsets(sizes) for name, sizes in self.sizes.items()}

    def starts(self, tokens: Sequence[int], count_tokens: CountTokens) -> list[int] | None:
        """Where the items of rows with so many placeholder tokens begin, and the end; None where it is not known."""
        if len(self) == len(tokens) and all(tokens):
            return list(range(len(tokens) + 1))
        counts = self.counts(tokens, count_tokens)
        return None if counts is None else _row_starts(counts, tokens)

    def counts(self, tokens: Sequence[int], count_tokens: CountTokens) -> list[int] | None:
        """Tokens of each item, which add up to those of each row; None where that is not known."""
        for found in (self._of_equal_sizes(sum(tokens)), self._of_patches()):
            if found is not None and _row_starts(found, tokens) is not None:
                return found
        known: dict[Hashable, int | None] = {}
        for index, size in enumerate(self._item_sizes):
            if size not in known:
                known[size] = count_tokens(self.kind, size, self.part(index, index + 1))
                if known[size] is None:
                    return None
        found = [count for size in self._item_sizes if (count := known[size]) is not None]
        return found if _row_starts(found, tokens) is not None else None

    def _of_equal_sizes(self, tokens: int) -> list[int] | None:
        each, rest = divmod(tokens, len(self))
        return [each] * len(self) if not rest and len(set(self._item_sizes)) == 1 else None

    def _of_patches(self) -> list[int] | None:
        grid = self.arguments.get(f"{self.kind}_grid_thw")
        if grid is None or self.merge is None:
            return None
        patches = [int(count) for count in grid.prod(1).tolist()]
        return None if any(count % self.merge for count in patches) else [count // self.merge for count in patches]

    @cached_property
    def _item_sizes(self) -> list[Hashable]:
        """The size of each item, by which equal items of other contents have equally many tokens."""
        of_arguments = [_sizes(name, value, self.begins[name]) for name, value in self.arguments.items()]
        return list(zip(*of_arguments, strict=True))


def _holds_counts(value: Tensor) -> bool:
    whole = not value.is_floating_point() and value.dtype is not torch.bool
    return whole and value.dim() in (1, 2) and len(value) > 0 and value[0].numel() <= 3


def _sizes(name: str, value: Tensor, begins: Sequence[int]) -> list[Hashable]:
    value = value.detach()
    shape, item = (name, str(value.dtype), *value.shape[1:]), value[:1].numel()
    if value.is_floating_point() and item > _FEW:
        if value.dim() < 5:
            return [(*shape, end - first) for first, end in pairwise(begins)]
        value = value.flatten(2).any(-1)  # several images of an item, of which some may be padding
    numbers = value.cpu()
    of_items = (numbers[first:end] for first, end in pairwise(begins))
    return [(*shape, len(own), own.contiguous().view(torch.uint8).numpy().tobytes()) for own in of_items]


def equal_parts(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether arguments have equal parts for two items or rows."""
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())


def offsets(counts: Iterable[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _row_starts(counts: Sequence[int], tokens: Sequence[int]) -> list[int] | None:
    """Where the items of each row begin, and the end; None where counts do not add up to the tokens of each row."""
    if not all(count > 0 for count in counts):
        return None
    items = {total: index for index, total in enumerate(offsets(counts))}
    cuts = [items.get(total, -1) for total in offsets(tokens)]
    return cuts if min(cuts) >= 0 and cuts[-1] == len(counts) else None
