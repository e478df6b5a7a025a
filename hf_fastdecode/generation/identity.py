"""What a model is at a moment: whether keys, values and captured steps of it still hold."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .._compat import ATTENTION_FIELD, EXPERTS_FIELD, tensor_version
from ..attention.autocast import autocast_dtype
from ..parallel.groups import local_part
from .forward_pass import input_device
from .model_walk import ModelWalk, attributes

_SAMPLES = 4
"""Elements sampled per parameter, evenly spaced."""

_ADAPTER_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
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

    def __init__(self, model: nn.Module):
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        walk = ModelWalk(model)
        self._own = _own_state(walk)
        self._adapters = adapter_state(walk)
        self._samples = _samples(walk)

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_model": None, "_own": None}  # ids and addresses are valid in this process only

    def __deepcopy__(self, memo: dict[int, object]) -> Fingerprint:
        return self  # immutable, and describes the same model

    def difference(self, model: nn.Module) -> str | None:
        """What changed: ``weights``, ``adapters`` or ``modules``; None if nothing did."""
        walk = ModelWalk(model)
        if self._adapters != adapter_state(walk):
            return "adapters"
        if self._model is not None and self._model() is model:
            tensors, modules = _own_state(walk)
            if self._own != (tensors, modules):
                return "weights" if self._own[0] != tensors else "modules"
        now, then = _samples(walk), self._samples
        if now.keys().isdisjoint(then):  # the whole model was moved or converted
            return None
        alike = now.keys() == then.keys() and all(torch.equal(now[kind], then[kind]) for kind in now)
        return None if alike else "weights"


def pass_settings(model: PreTrainedModel) -> tuple[torch.dtype | None, Any]:
    """Autocast dtype and instance-level `forward`, which also affect keys and values."""
    return autocast_dtype(input_device(model)), vars(model).get("forward")


def captured_state(model: nn.Module, configs: Iterable[PreTrainedConfig], walk: ModelWalk | None = None) -> Hashable:
    """Model state that a capture bakes in: tensor addresses, host state of modules and configs.

    `walk` is one over the model, where the caller has it already.
    """
    walk = walk or ModelWalk(model)
    return (
        addresses(walk.parameters),
        addresses(walk.buffers),
        adapter_state(walk),
        module_state(walk),
        id(vars(model).get("forward")),
        tuple(map(_config_state, configs)),
    )


def _config_state(config: PreTrainedConfig) -> Hashable:
    return tuple(
        (name, _field_state(name, value))
        for name, value in vars(config).items()
        if name != ATTENTION_FIELD  # temporarily changed by passes of any thread
    )


def _field_state(name: str, value: Any) -> Hashable:
    if isinstance(value, PreTrainedConfig):
        return _config_state(value)
    if name == EXPERTS_FIELD and value == "batched_mm":  # for the time of decode steps
        value = "grouped_mm"
    return repr(value)


_REGISTERED = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


class ModelWatch:
    """Tells whether anything on a model was set, added or moved since a moment, in a fraction of a millisecond.

    It compares objects rather than values, so what it finds may be no change at all; `captured_state` then tells.
    """

    def __init__(self, model: nn.Module, configs: Iterable[PreTrainedConfig]):
        found: list[dict[str, Any] | list[Any]] = []
        for one in (*model.modules(), *configs):
            found.append(vars(one))
            found += (part for name, part in attributes(one).items() if _holds_state(name, part))
        self._held = [(part, list(_values(part))) for part in found]
        self._tensors = [value for _, values in self._held for value in values if isinstance(value, Tensor)]
        self._addresses = addresses(self._tensors)

    def touched(self) -> bool:
        """Whether an attribute, parameter, buffer, module, hook or address is another than it was."""
        for part, held in self._held:
            if len(now := list(_values(part))) != len(held) or not all(map(operator.is_, now, held)):
                return True
        return self._addresses != addresses(self._tensors)


def _holds_state(name: str, part: Any) -> bool:
    return name in _REGISTERED or (isinstance(part, dict | list) and not name.startswith("_"))


def _values(part: dict[str, Any] | list[Any]) -> Collection[Any]:
    return part.values() if isinstance(part, dict) else part


def adapter_state(walk: ModelWalk) -> Hashable:
    """Active adapters and their settings, by layer name."""
    found = [(module, switches) for module in walk.modules if (switches := _adapter_switches(module))]
    paths = walk.paths() if found else {}
    return tuple((paths[module], *switches) for module, switches in found)


def _adapter_switches(module: nn.Module) -> list[tuple[str, str]]:
    attributes = module.__dict__
    if attributes.keys().isdisjoint(_ADAPTER_SWITCHES):
        return []
    return [
        (name, str(value))
        for name in _ADAPTER_SWITCHES
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
        tuple(map(_forward_of, walk.classes)),
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


@lru_cache(maxsize=1024)
def _public(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are not private: a quarter of a module's, the same for most modules of a class."""
    return tuple(name for name in names if name[:1] != "_")


def _forward_of(kind: type[nn.Module]) -> Hashable:
    """What tells the code of a class from another that it may be given, or functions of its file that it calls."""
    forward = next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)
    bare = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None
    if not isinstance(bare, FunctionType):
        return id(forward)
    names = bare.__globals__
    return id(forward), *[id(names[name]) for name in bare.__code__.co_names if name in names]


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


def _tensor_state(tensor: Tensor) -> tuple[int, ...]:
    """Identity, version and address of a tensor, or of what this process stores of it.

    A split tensor's version counts writes to the whole, as by an optimizer, its part's those to the part alone.
    """
    local = local_part(tensor)
    return id(tensor), tensor_version(tensor), tensor_version(local), local.data_ptr()


def _own_state(walk: ModelWalk) -> tuple[Hashable, Hashable]:
    """State of tensors and modules, comparable only for the same model object."""
    buffers = (
        buffer
        for module in walk.modules
        if module.__dict__["_buffers"] and not _changes_frequencies(module)
        for buffer in module.buffers(recurse=False)
        if type(buffer) is Tensor and buffer.device.type != "meta"
    )
    tensors = tuple(map(_tensor_state, (*_plain_parameters(walk), *buffers)))
    return tensors, module_state(walk, without=_NOT_IN_KEYS)


def _changes_frequencies(module: nn.Module) -> bool:
    """Whether a module's tensors are frequencies that each pass writes anew by its length, as of LongRoPE.

    No cache is used where they change, see `generation.support.rope_limit`.
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
