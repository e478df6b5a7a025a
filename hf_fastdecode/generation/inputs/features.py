"""Encodes each distinct image, video or sound of a call's prompts once, also where different prompts have it.

transformers' models encode what prompts come with in methods ``get_image_features`` and its like, once for all images
of a pass. In passes of a call they are given the distinct ones alone, and the features are repeated for the others.
Those of a pass are kept until the next one, whose prompts often have the same images.

Images are told apart by all tensors that the method is given: rows of each, or patches that a grid counts. Where parts
of an argument, or of the features, are not those of single images (features of several sounds end to end, without a
grid; rows of several images of which some are padding, which methods leave out), the method runs as ever.

Some methods drop a dimension of size one, and so raise for a single image of one token (Mistral 3). Where the call has
several images, which stock encodes together, such an image is encoded twice in one pass of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import Parameter, signature
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..._compat import setting
from ...attention.overrides import as_stock
from ...instance_methods import Change
from ..interception.switches import replaced_calls
from .items import KINDS, SHAPE_ERRORS, Items, equal_parts

_KIND: Final = {f"get_{kind}_features": kind for kind in KINDS}
"""Kind of the items that each method encodes."""

_SPARE: Final = ("last_hidden_state", "hidden_states", "attentions")
"""Fields that features are made from, which are left out where they are not those of single images."""

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Image(NamedTuple):
    """An image among one method's arguments."""

    parts: dict[str, Tensor]  # of each tensor, by name
    sums: tuple[int, ...]  # of the bits of each part, which equal ones have alike
    patches: int | None  # how many it has, where a grid counts them

    def equals(self, other: _Image) -> bool:
        """Whether they are equal bit by bit, so that features are."""
        return self.sums == other.sums and equal_parts(self.parts, other.parts)

    @property
    def has_padding(self) -> bool:
        """Whether it is a row of several images, ``[1, images, ...]``, of which some are all zeros."""
        several = [part for part in self.parts.values() if part.dim() > 4 and part.shape[1] > 1]
        return any(not bool(part.flatten(2).any(-1).all()) for part in several)


class _Item(NamedTuple):
    value: Tensor


class _Features(NamedTuple):
    """An image, and its part of each field of the method's output: rows of a tensor, a list's item, or a list of
    these by layer."""

    image: _Image
    kind: type[ModelOutput]
    fields: dict[str, Any]


class SharedFeatures:
    """The features of a call's images, of one pass and the pass before; where a lone one fails, `counts` tells the
    number of each kind in the call, as far as it is known."""

    def __init__(self, model: PreTrainedModel, counts: Callable[[], Mapping[str, int]] = dict):
        self._counts = counts
        owners = [
            (next((one for one in (model.base_model, model) if hasattr(type(one), name)), None), name)
            for name in _KIND
        ]
        self._calls = [Change(owner, name, _encoding(owner, name)) for owner, name in owners if owner is not None]
        self._known: dict[str, list[_Features]] = {}
        self._not_apart: set[str] = set()

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Context of a pass, in which images of this thread are encoded once."""
        with setting(_of_pass, self), replaced_calls.on(self._calls):
            yield

    def encode(self, method: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Any:
        """The output of a method of this name for these arguments."""
        before, images = self._known.pop(name, []), _images(_KIND[name], arguments)
        if images is None or name in self._not_apart:
            return method(**arguments)
        distinct, places = list[_Image](), list[int]()
        for image in images:
            place = next((place for place, other in enumerate(distinct) if image.equals(other)), len(distinct))
            distinct.extend([image] if place == len(distinct) else [])
            places.append(place)
        found = [next((one for one in before if image.equals(one.image)), None) for image in distinct]
        new = [image for image, one in zip(distinct, found, strict=True) if one is None]
        output, parts, whole = None, iter(list[_Features]()), len(new) == len(images)
        if new:
            try:
                output = method(**arguments | ({} if whole else _arguments_of(new)))
            except SHAPE_ERRORS as error:
                if isinstance(error, torch.OutOfMemoryError) or not self._is_lone(name, new):
                    raise
                whole, new = False, new * 2
                output = method(**arguments | _arguments_of(new))
            made = _of_images(output, new)
            if made is None:
                self._not_apart.add(name)
                return output if whole else method(**arguments)
            parts = iter(made)
        known = self._known[name] = [next(parts) if one is None else one for one in found]
        if whole:
            return output
        joined = _joined([known[place] for place in places])
        return method(**arguments) if joined is None else joined

    def _is_lone(self, name: str, images: Sequence[_Image]) -> bool:
        """Whether a single image is left of several that the call was given, of which stock encodes all."""
        return len(images) == 1 and self._counts().get(_KIND[name], 0) > 1


_of_pass: ContextVar[SharedFeatures | None] = ContextVar("hf_fastdecode_features", default=None)


def _encoding(owner: nn.Module, name: str) -> Callable[..., Any]:
    """An override of a method: in passes of `SharedFeatures` it runs once for each distinct image."""
    method = partial(getattr(type(owner), name), owner)
    parameters = signature(method)  # which `generate` compares its arguments with
    names = [one.name for one in parameters.parameters.values() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]

    def encode(*args: Any, **kwargs: Any) -> Any:
        if (features := _of_pass.get()) is None:
            return method(*args, **kwargs)
        with as_stock():
            return features.encode(method, name, dict(zip(names, args, strict=False)) | kwargs)

    encode.__signature__ = parameters  # type: ignore[attr-defined]
    return encode


def _images(kind: str, arguments: Mapping[str, Any]) -> list[_Image] | None:
    """The images among a method's arguments; None where it is not known which part is of which."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    lists = [value for value in arguments.values() if isinstance(value, list | tuple)]
    if not tensors or any(not tensor.dim() or not len(tensor) for tensor in tensors.values()):
        return None
    if any(isinstance(one, Tensor) for value in lists for one in value):
        return None
    items = Items.among(kind, tensors)
    if items is None or any(len(value) == len(items) for value in lists):  # each image's own number
        return None
    grid = tensors.get(f"{kind}_grid_thw")
    patches = None if grid is None else [int(count) for count in grid.prod(1).tolist()]
    parts, sums = list[Sequence[Tensor]](), list[list[int]]()
    for name, tensor in tensors.items():
        sizes = items.sizes[name]
        parts.append(tensor.detach().split(sizes))
        bits = tensor.detach().contiguous().view(BITS[tensor.element_size()])
        of_rows = bits.reshape(len(bits), -1).sum(1, dtype=torch.int64)
        sums.append(torch.stack([part.sum() for part in of_rows.split(sizes)]).tolist())
    return [
        _Image(dict(zip(tensors, own, strict=True)), numbers, None if patches is None else patches[index])
        for index, (own, numbers) in enumerate(zip(zip(*parts, strict=True), zip(*sums, strict=True), strict=True))
    ]


def _arguments_of(images: Sequence[_Image]) -> dict[str, Tensor]:
    return {name: torch.cat([image.parts[name] for image in images]) for name in images[0].parts}


def _of_images(output: Any, images: Sequence[_Image]) -> list[_Features] | None:
    """A method's output in parts of the images that it was given; None where it has others."""
    if not isinstance(output, ModelOutput):
        return None
    fields: list[dict[str, Any]] = [{} for _ in images]
    known = {name: value for name, value in vars(output).items() if value is not None}  # some set none of its fields
    for name, value in known.items():
        parts = _parts(value, images, of_layers=name != "pooler_output")
        if parts is None and (name not in _SPARE or "pooler_output" not in known):
            return None
        for field, part in zip(fields, parts or (), strict=False):
            field[name] = part
    return [_Features(image, type(output), field) for image, field in zip(images, fields, strict=True)]


def _parts(value: Any, images: Sequence[_Image], *, of_layers: bool) -> list[Any] | None:
    """The images' parts of a field, of which a list is `of_layers` or of images; None where it has others."""
    if isinstance(value, Tensor) and value.dim():
        if any(image.has_padding for image in images):
            return None
        if len(value) == len(images):
            return list(value.split(1))
        patches = [image.patches for image in images if image.patches is not None]
        merged, rest = divmod(sum(patches), len(value)) if len(value) else (0, 1)
        if patches and not rest and not any(count % merged for count in patches):
            return list(value.split([count // merged for count in patches]))
        return [value] if len(images) == 1 else None
    if not isinstance(value, list | tuple):
        return None
    if not of_layers:
        return [_Item(one) for one in value] if len(value) == len(images) else None
    layers = [_parts(layer, images, of_layers=False) for layer in value]
    known = [layer for layer in layers if layer is not None]
    return [list(own) for own in zip(*known, strict=True)] if len(known) == len(layers) else None


def _joined(features: Sequence[_Features]) -> ModelOutput | None:
    """The output of these images, which may be some several times; None where parts have different sizes."""
    kind, fields = features[0].kind, features[0].fields
    joined = {name: _joined_parts([one.fields.get(name) for one in features]) for name in fields}
    if any(value is None for value in joined.values()):
        return None
    output = kind(**{name: value for name, value in joined.items() if name in kind.__dataclass_fields__})
    for name in joined.keys() - kind.__dataclass_fields__.keys():
        setattr(output, name, joined[name])
    return output


def _joined_parts(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if not all(type(part) is type(first) for part in parts):
        return None
    if isinstance(first, _Item):
        return [part.value for part in parts]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if len({part.shape[1:] for part in parts}) == 1 else None
    layers = [_joined_parts(layer) for layer in zip(*parts, strict=True)]
    return layers if all(layer is not None for layer in layers) else None
