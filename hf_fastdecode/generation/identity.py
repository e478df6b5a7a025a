"""What a model is at a moment: whether keys, values and captured steps of it still hold."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .._compat import ATTENTION_FIELD, EXPERTS_FIELD, tensor_version
from ..attention.autocast import autocast_dtype
from ..cache.shared import FilledBy
from ..parallel.groups import local_part
from .forward_pass import input_device
from .model_walk import ModelWalk, attributes

_SAMPLES = 4
"""Elements sampled per parameter, evenly spaced."""

ADAPTER_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""Host attributes by which PEFT layers select adapters and their scaling."""

_BAKED_IN = frozenset({bool, int, float, str, type(None), torch.dtype, tuple, Tensor})
"""Types of module attributes that can affect what a module computes."""

_FUNCTIONS = frozenset({FunctionType, BuiltinFunctionType})
"""Types of functions that a module may call, such as activations; those of the model itself are methods."""

_EXACT = _BAKED_IN - {float, tuple, Tensor}
"""Those of which equal values are the same."""

_NOT_IN_KEYS = ("training", "gradient_checkpointing", "max_seq_len_cached")
"""What does not affect keys and values: flags (training mode with dropout never shares), and a length that RoPE of
type ``dynamic`` has seen, which no cache is used beyond."""


SET_BY_CALLS = ("rope_deltas",)
"""Attributes that each call sets anew, of models whose positions have planes; passes are given their positions."""


class Fingerprint:
    """Snapshot of a model, to tell whether it would still compute the same keys and values.

    In-place writes are detected by PyTorch's version counter (optimizers, ``load_state_dict``, any in-place op),
    replaced tensors by address or identity, replaced modules and settings directly. Writes that bypass these, such as
    in place to ``parameter.data``, are detected only if they change one of a few sampled elements per parameter. The
    samples also compare copies of a model or of a cache.
    """

    def __init__(self, model: nn.Module, walk: ModelWalk | None = None):
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        walk = walk or ModelWalk(model)
        self._own = _own_state(walk)
        self._adapters = adapter_state(walk)
        self._samples = _samples(walk)
        self._known: object = None

    def __getstate__(self) -> dict[str, object]:
        # Ids and addresses are valid in this process only.
        return vars(self) | {"_model": None, "_own": None, "_known": None}

    def __deepcopy__(self, memo: dict[int, object]) -> Fingerprint:
        return self  # immutable, and describes the same model

    def difference(self, model: nn.Module, walk: ModelWalk | None = None) -> str | None:
        """What changed: ``weights``, ``adapters`` or ``modules``; None if nothing did."""
        walk = walk or ModelWalk(model)
        return self.host_difference(model, walk) or self.sampled_difference(walk)

    def host_difference(self, model: nn.Module, walk: ModelWalk, known: object = None) -> str | None:
        """What changed as far as the host can tell.

        Args:
            known: Stands for all that is not a number in a tensor: another object whenever any of that has changed.
        """
        of_model = self._model is not None and self._model() is model
        if of_model and known is not None and known is self._known:
            versions = [versions for _, versions, _ in self._own[0]]  # the rest is known to be the same
            return None if versions == list(map(_versions, _tensors(walk))) else "weights"
        if self._adapters != adapter_state(walk):
            return "adapters"
        if of_model:
            tensors, modules = _own_state(walk)
            if self._own != (tensors, modules):
                return "weights" if self._own[0] != tensors else "modules"
            self._known = known
        return None

    def sampled_difference(self, walk: ModelWalk) -> str | None:
        """What changed by the sampled elements, for which the host waits on the current stream."""
        now, then = _samples(walk), self._samples
        if now.keys().isdisjoint(then):  # the whole model was moved or converted
            return None
        alike = now.keys() == then.keys() and all(torch.equal(now[kind], then[kind]) for kind in now)
        return None if alike else "weights"


class ChangedBetween:
    """In the place of a fingerprint, for a cache whose tokens a model computed before and after a change."""

    def __init__(self, what: str):
        self._what = what

    def difference(self, model: nn.Module) -> str:
        """What changed between passes, so that the cache is of no model."""
        return self._what


def filled_by(
    before: FilledBy | None, model: nn.Module, walk: ModelWalk, known: object = None, *, compares: bool = False
) -> FilledBy:
    """What a kept cache is to remember of the model, which has just computed tokens of it.

    Args:
        before: What it remembers already.
        known: See `Fingerprint.host_difference`.
        compares: Whether the model may have changed since, as between passes that the user's code runs; compared by
            what the host can tell.
    """
    if before is None:
        return Fingerprint(model, walk)
    if compares and isinstance(before, Fingerprint) and (what := before.host_difference(model, walk, known)):
        return ChangedBetween(what)
    return before


def pass_settings(
    model: PreTrainedModel, configs: Iterable[PreTrainedConfig]
) -> tuple[torch.dtype | None, Any, Hashable]:
    """Autocast dtype, instance-level `forward` and configs, such as windows, which also affect keys and values."""
    return autocast_dtype(input_device(model)), vars(model).get("forward"), tuple(map(_config_state, configs))


def captured_state(model: nn.Module, configs: Iterable[PreTrainedConfig], walk: ModelWalk | None = None) -> Hashable:
    """Model state that a capture bakes in: tensors' memory, host state of modules and configs.

    `walk` is one over the model, where the caller has it already.
    """
    walk = walk or ModelWalk(model)
    return (
        layouts(walk.parameters),
        layouts(walk.buffers),
        adapter_state(walk),
        module_state(walk),
        id(vars(model).get("forward")),
        tuple(map(_config_state, configs)),
    )


def _config_state(config: PreTrainedConfig) -> Hashable:
    return tuple(
        (name, config_field(name, value))
        for name, value in vars(config).items()
        if name != ATTENTION_FIELD  # temporarily changed by passes of any thread
    )


def config_field(name: str, value: Any) -> Hashable:
    """What tells a value of a config field from another."""
    if isinstance(value, PreTrainedConfig):
        return _config_state(value)
    if name == EXPERTS_FIELD and value == "batched_mm":  # for the time of decode steps
        value = "grouped_mm"
    return repr(value)


def adapter_state(walk: ModelWalk) -> Hashable:
    """Active adapters and their settings, by layer name."""
    found = [(module, switches) for module in walk.modules if (switches := _adapter_switches(module))]
    paths = walk.paths() if found else {}
    return tuple((paths[module], *switches) for module, switches in found)


def _adapter_switches(module: nn.Module) -> list[tuple[str, str]]:
    attributes = module.__dict__
    if attributes.keys().isdisjoint(ADAPTER_SWITCHES):
        return []
    return [
        (name, str(value))
        for name in ADAPTER_SWITCHES
        if (value := attributes.get(name)) is not None
        if name != "scaling" or isinstance(value, dict)  # PEFT's is a dict by adapter; others are unrelated
    ]


def module_state(walk: ModelWalk, *, without: Collection[str] = ()) -> Hashable:
    """Host-side state of modules: scalar, string, tensor and function attributes, and the code of `forward`.

    The model's own `forward` is left to the caller, since `enable` overrides it; private attributes are bookkeeping.
    """
    left_out = {*without, *SET_BY_CALLS}
    with_functions = _BAKED_IN | _FUNCTIONS
    return (
        tuple(map(forward_of, walk.classes)),
        _names(walk),
        tuple(
            [  # a list takes half the time of a generator, for thousands of attributes
                (
                    id(module),
                    None if module is walk.model else id(_function(module.__dict__.get("forward"))),
                    *[
                        (name, type(value), value if type(value) in _EXACT else _comparable(value))
                        for own in (attributes(module),)
                        for name in _public(tuple(own))
                        if type(value := own[name]) in (_BAKED_IN if module is walk.model else with_functions)
                        and name not in left_out
                        and (type(value) is not Tensor or not _changes_frequencies(module))
                    ],
                )
                for module in walk.modules
            ]
        ),
    )


def _names(walk: ModelWalk) -> tuple[str, ...]:
    """Names of modules, parameters and buffers: two that change places are the same objects in the same order."""
    parts = [module.__dict__[kind] for module in walk.modules for kind in ("_modules", "_parameters", "_buffers")]
    return tuple(chain.from_iterable(parts))


@lru_cache(maxsize=1024)
def _public(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are not private: a quarter of a module's, the same for most modules of a class."""
    return tuple(name for name in names if name[:1] != "_")


def forward_of(kind: type[nn.Module]) -> Hashable:
    """What tells the code of a class from another that it may be given, or functions of its file that it calls."""
    forward = next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)
    bare = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None
    if not isinstance(bare, FunctionType):
        return _lasting(forward)
    names = bare.__globals__
    return _lasting(forward), *[_lasting(names[name]) for name in bare.__code__.co_names if name in names]


def _lasting(value: object) -> Hashable:
    """What is equal for the same object alone, also after its end, where an id may be that of another."""
    return weakref.ref(value) if isinstance(value, FunctionType) else id(value)


def _comparable(value: Any) -> str | int:
    """What tells an attribute of a module from another."""
    if type(value) in _FUNCTIONS:
        return id(value)
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, tuple) and not all(type(part) in _EXACT or type(part) is float for part in value):
        return id(value)
    return str(value)  # tells zeros apart, and no NaN from another


def _function(method: object) -> object:
    return getattr(method, "__func__", method)


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Data pointers of the tensors, or of what this process stores of them."""
    return tuple(local_part(tensor).data_ptr() for tensor in tensors)


def layouts(tensors: Iterable[Tensor]) -> tuple[Hashable, ...]:
    """Address, dtype, shape and strides of the tensors, or of what this process stores of them."""
    return tuple([(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in map(local_part, tensors)])


def _tensor_state(tensor: Tensor) -> tuple[int, tuple[int, int], int]:
    """Identity, versions and address of a tensor, or of what this process stores of it."""
    return id(tensor), _versions(tensor), local_part(tensor).data_ptr()


def _versions(tensor: Tensor) -> tuple[int, int]:
    """A split tensor's version counts writes to the whole, as by an optimizer, its part's those to the part alone."""
    return tensor_version(tensor), tensor_version(local_part(tensor))


def _own_state(walk: ModelWalk) -> tuple[tuple[tuple[int, tuple[int, int], int], ...], Hashable]:
    """State of tensors and modules, comparable only for the same model object."""
    return tuple(map(_tensor_state, _tensors(walk))), module_state(walk, without=_NOT_IN_KEYS)


def _tensors(walk: ModelWalk) -> list[Tensor]:
    """The parameters and buffers that keys and values are made of."""
    buffers = (
        buffer
        for module in walk.modules
        if module.__dict__["_buffers"] and not _changes_frequencies(module)
        for buffer in module.buffers(recurse=False)
        if type(buffer) is Tensor and buffer.device.type != "meta"
    )
    return [*_plain_parameters(walk), *buffers]


def _changes_frequencies(module: nn.Module) -> bool:
    """Whether a module's tensors are frequencies that each pass writes anew by its length, as of LongRoPE.

    No cache is used where they change, see `generation.support.model.rope_limit`.
    """
    kinds = getattr(module, "rope_type", None)  # for all layers, or per layer type
    found = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in found)


def _plain_parameters(walk: ModelWalk) -> Iterator[Tensor]:
    """Materialized parameters, plain or split between processes.

    Offloaded ones are skipped, since they are recreated as other objects.
    """
    for parameter in walk.parameters:
        local = local_part(parameter)
        plain = type(parameter) is nn.Parameter or local is not parameter
        if plain and parameter.device.type != "meta" and local.numel():
            yield parameter


@torch.no_grad()
def _samples(walk: ModelWalk) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """Bytes of a few elements of each parameter, by device and dtype; bytes compare equal for NaN."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in map(local_part, _plain_parameters(walk)):
        count = min(_SAMPLES, size := parameter.numel())
        step = max(1, size // _SAMPLES)
        if parameter.is_contiguous():  # one view instead of three
            few = torch.as_strided(parameter, (count,), (step,), parameter.storage_offset())
        else:
            few = parameter.reshape(-1)[::step][:count]
        found.setdefault((parameter.device, parameter.dtype), []).append(few)
    return {kind: _bytes(parts) for kind, parts in found.items()}


def _bytes(parts: list[Tensor]) -> Tensor:
    """The bytes of vectors of one dtype, end to end, in one launch where PyTorch concatenates that dtype."""
    if parts[0].dtype.itemsize == 1:  # of float8 and float4 it does not
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    return torch.cat(parts).view(torch.uint8)
