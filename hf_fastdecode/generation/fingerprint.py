"""Fingerprints of models: whether keys and values that one has computed still hold."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._compat import stored_of, stored_parts, tensor_version, without_subclasses
from ..cache.shared import FilledBy
from .snapshot import LENGTH_SEEN, ModelWalk, adapter_state, changes_frequencies, module_state, pass_settings
from .structure import Structure

_SAMPLES = 4
"""Elements sampled per parameter, evenly spaced."""
_ROWS_OF_TABLES = 16
"""Rows sampled per table of positions, evenly spaced."""

_NOT_IN_KEYS = ("training", "gradient_checkpointing", LENGTH_SEEN)
"""Attributes that do not affect keys and values: flags (training mode with dropout never shares), and a length."""

_Versions = tuple[int, ...]
_TensorState = tuple[int, _Versions, tuple[int, ...]]
"""Identity, versions and addresses."""


class Fingerprint:
    """Snapshot of a model, to tell whether it would still compute the same keys and values.

    In-place writes are detected by PyTorch's version counter (optimizers, ``load_state_dict``, any in-place op),
    replaced tensors by address or identity, replaced modules and settings directly. Writes that bypass these, such as
    in place to ``parameter.data``, are detected only if they change one of a few sampled elements per parameter. The
    samples also compare copies of a model or of a cache. Replacing a position table by a longer one with the same
    first rows is no change: passes do that.
    """

    def __init__(self, model: nn.Module, walk: ModelWalk | None = None):
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        walk = walk or ModelWalk(model)
        self._own = _own_state(walk)
        self._tables = {index: (len(table), _rows(table, len(table))) for index, table in _tables(walk).items()}
        self._adapters = adapter_state(walk)
        self._samples = _samples(walk)
        self._known: object = None

    def __getstate__(self) -> dict[str, object]:
        # Ids and addresses are valid in this process only.
        return vars(self) | {"_model": None, "_own": None, "_tables": {}, "_known": None}

    def __deepcopy__(self, memo: dict[int, object]) -> Fingerprint:
        return self  # immutable, and describes the same model

    def difference(self, model: nn.Module, walk: ModelWalk | None = None) -> str | None:
        """The kind of change: ``weights``, ``adapters`` or ``modules``; None if nothing did."""
        walk = walk or ModelWalk(model)
        return self.host_difference(model, walk) or self.sampled_difference(walk)

    def host_difference(self, model: nn.Module, walk: ModelWalk, known: object = None) -> str | None:
        """The kind of change as far as the host can tell; `known` stands for all that is not a number in a tensor:
        another object whenever any of that has changed."""
        of_model = self._model is not None and self._model() is model
        if of_model and known is not None and known is self._known:
            versions = [versions for _, versions, _ in self._own[0]]  # all else is known to be the same
            return None if versions == list(map(_versions, _tensors(walk))) else "weights"
        if self._adapters != adapter_state(walk):
            return "adapters"
        if of_model:
            tensors, modules = _own_state(walk)
            if self._own[0] != tensors and not self._only_grew(walk, tensors):
                return "weights"
            if self._own[1] != modules:
                return "modules"
            self._own, self._known = (tensors, modules), known
        return None

    def _only_grew(self, walk: ModelWalk, tensors: Sequence[_TensorState]) -> bool:
        """Whether the tensors that differ are tables of positions alone, each a longer one that begins as it did."""
        then, tables = self._own[0], _tables(walk)
        if len(then) != len(tensors):
            return False
        for index, (one, now) in enumerate(zip(then, tensors, strict=True)):
            if one == now:
                continue
            if one[0] == now[0] or index not in tables or index not in self._tables:
                return False
            length, rows = self._tables[index]
            if len(tables[index]) <= length or not torch.equal(_rows(tables[index], length), rows):
                return False
        return True

    def sampled_difference(self, walk: ModelWalk) -> str | None:
        """The kind of change by the sampled elements, for which the host waits on the current stream."""
        now, then = _samples(walk), self._samples
        if now.keys().isdisjoint(then):  # the whole model was moved or converted
            return None
        alike = now.keys() == then.keys() and all(torch.equal(now[kind], then[kind]) for kind in now)
        return None if alike else "weights"


@dataclass(frozen=True)
class ModelThen:
    """A model as it was when it computed tokens; `settings` are what these depend on beyond weights and modules."""

    fingerprint: Fingerprint
    settings: Hashable

    @classmethod
    def of(cls, model: PreTrainedModel, structure: Structure) -> ModelThen:
        return cls(Fingerprint(model, structure.walk), _settings(model, structure))

    def is_now(self, model: PreTrainedModel, structure: Structure, *, sampled: bool = True) -> bool:
        """Whether the model would still compute the same, by all that the host can tell, and if `sampled`, by that."""
        host = self.fingerprint.host_difference
        if self.settings != _settings(model, structure) or host(model, structure.walk, structure.known):
            return False
        return not sampled or self.fingerprint.sampled_difference(structure.walk) is None


def _settings(model: PreTrainedModel, structure: Structure) -> Hashable:
    return pass_settings(model, structure.configs), structure.division


class ChangedBetween:
    """In the place of a fingerprint, for a cache whose tokens a model computed before and after a change."""

    def __init__(self, what: str):
        self._what = what

    def difference(self, model: nn.Module) -> str:
        """The kind of change between passes, so that the cache is of no model."""
        return self._what


def filled_by(
    before: FilledBy | None, model: nn.Module, walk: ModelWalk, known: object = None, *, compares: bool = False
) -> FilledBy:
    """The fingerprint that a kept cache, with this one `before`, is to keep of the model that has computed its tokens.

    If it `compares`, by what the host can tell, the model may have changed since, as between passes of a user's code.
    """
    if before is None:
        return Fingerprint(model, walk)
    if compares and isinstance(before, Fingerprint) and (what := before.host_difference(model, walk, known)):
        return ChangedBetween(what)
    return before


def _tensor_state(tensor: Tensor) -> _TensorState:
    """Identity, versions and addresses of a tensor, or of what this process stores of it."""
    return id(tensor), _versions(tensor), tuple([part.data_ptr() for part in stored_parts(tensor)])


def _versions(tensor: Tensor) -> _Versions:
    """A split tensor's version counts writes to the whole, as by an optimizer, its parts' those to a part alone."""
    return tensor_version(tensor), *map(tensor_version, stored_parts(tensor))


def _own_state(walk: ModelWalk) -> tuple[tuple[_TensorState, ...], Hashable]:
    """State of tensors and modules, comparable only for the same model object."""
    return tuple(map(_tensor_state, _tensors(walk))), module_state(walk, without=_NOT_IN_KEYS)


def _tensors(walk: ModelWalk) -> list[Tensor]:
    """The parameters and buffers that keys and values are made of."""
    buffers = (
        buffer
        for module in walk.modules
        if module.__dict__["_buffers"] and not changes_frequencies(module)
        for buffer in module.buffers(recurse=False)
        if type(buffer) is Tensor and buffer.device.type != "meta"
    )
    return [*_materialized(walk), *buffers]


def _tables(walk: ModelWalk) -> dict[int, Tensor]:
    """Tables ``[positions, width]`` by their index among `_tensors`: buffers of code, which no checkpoint has."""
    made = {
        id(table)
        for module in walk.modules
        for name in module._non_persistent_buffers_set
        if (table := module._buffers.get(name)) is not None and table.dim() == 2 and table.is_floating_point()
    }
    return {index: tensor for index, tensor in enumerate(_tensors(walk)) if id(tensor) in made} if made else {}


def _rows(table: Tensor, length: int) -> Tensor:
    """Bytes of a few of the first `length` rows of a table."""
    return table.detach()[: length : max(1, length // _ROWS_OF_TABLES)].clone().view(torch.uint8)


def _materialized(walk: ModelWalk) -> Iterator[Tensor]:
    """Parameters with memory, of FSDP's the trained ones; offloaded ones, which are recreated, are left out."""
    for parameter in walk.parameters:
        stored = stored_of(parameter)
        if stored.device.type != "meta" and any(part.numel() for part in stored_parts(stored)):
            yield stored


@torch.no_grad()
def _samples(walk: ModelWalk) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """Bytes of a few elements of each parameter, by device and dtype; bytes compare equal for NaN."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with without_subclasses():  # of a packed weight a few elements are none
        for part in chain.from_iterable(map(stored_parts, _materialized(walk))):
            count = min(_SAMPLES, size := part.numel())
            step = max(1, size // _SAMPLES)
            if part.is_contiguous():  # one view instead of three
                few = torch.as_strided(part, (count,), (step,), part.storage_offset())
            else:
                few = part.reshape(-1)[::step][:count]
            found.setdefault((part.device, part.dtype), []).append(few)
        return {kind: _bytes(parts) for kind, parts in found.items()}


def _bytes(parts: list[Tensor]) -> Tensor:
    """The bytes of vectors of one dtype, end to end, in one launch where PyTorch concatenates that dtype."""
    if parts[0].dtype.itemsize == 1:  # of float8 and float4 it does not
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    return torch.cat(parts).view(torch.uint8)
