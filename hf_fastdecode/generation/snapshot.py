"""What a model is at a moment: its modules, their adapters and host state, the memory of its tensors.

A call asks many questions of every module: is it in training mode, does it carry hooks, what does it store, which
tensors does it read. A walk by `nn.Module.modules` takes longer than most of the answers, so a call walks once, or not
at all where the last one's modules are known to be still the model's (`model_watch`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Hashable, Iterable
from functools import cached_property, lru_cache
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .._compat import ATTENTION_FIELD, EXPERTS_FIELD
from ..attention.active_passes import autocast_dtype
from ..instance_methods import STATE_ATTRIBUTE
from ..parallel.groups import local_part
from .forward_pass import input_device

_CODE_OF_INSTANCES = frozenset({"forward", "_call_impl", "_hf_hook", STATE_ATTRIBUTE})
"""Instance attributes with code that runs in a module's call: methods, accelerate's hooks, and our overrides."""


class ModelWalk:
    """The modules of a model, once each, in the order of `nn.Module.modules`.

    Only this list is as old as the walk: attributes of modules are read when a check asks for them.

    Args:
        modules: The modules, where the caller has them already.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module] | None = None):
        self.model = model
        self.modules = modules or _modules(model)

    @cached_property
    def classes(self) -> dict[type[nn.Module], nn.Module]:
        return {type(module): module for module in reversed(self.modules)}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, tied ones once, in the order of `nn.Module.parameters`."""
        return _distinct(parameter for module in self.modules for parameter in module.__dict__["_parameters"].values())

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers, shared ones once, in the order of `nn.Module.buffers`."""
        return _distinct(buffer for module in self.modules for buffer in module.__dict__["_buffers"].values())

    @property
    def with_code(self) -> list[nn.Module]:
        """Modules that run code besides their class's: forward hooks, and methods of the instance."""
        return [
            module
            for module in self.modules
            if (own := module.__dict__)["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or not _CODE_OF_INSTANCES.isdisjoint(own)
        ]

    def attributes(self, name: str) -> list[object]:
        """The attributes of this name, of instances, classes or by ``__getattr__``; modules without it are left out.

        Attributes that are parameters, buffers or submodules are left out too.
        """
        asked = {kind for kind in self.classes if hasattr(kind, name) or kind.__getattr__ is not nn.Module.__getattr__}
        found = []
        for module in self.modules:
            if name in module.__dict__ or (asked and type(module) in asked and hasattr(module, name)):
                found.append(getattr(module, name))
        return found

    def paths(self) -> dict[nn.Module, str]:
        """Each module's name in the model, empty for the model's own."""
        return {module: path for path, module in self.model.named_modules()}


def _modules(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    seen, waiting = set[nn.Module](), [model]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append(module)
        if children := module.__dict__["_modules"]:  # in half the time of an attribute
            waiting += [child for child in reversed(children.values()) if child is not None]
    return found


def attributes(one: object) -> dict[str, Any]:
    """The attributes of an object, in a copy: passes of other threads put calls of their own on modules meanwhile."""
    return one.__dict__.copy()


def _distinct(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


ADAPTER_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""Host attributes by which PEFT layers select adapters and their scaling."""

_BAKED_IN = frozenset({bool, int, float, str, type(None), torch.dtype, tuple, Tensor})
"""Types of module attributes that can affect what a module computes."""

_FUNCTIONS = frozenset({FunctionType, BuiltinFunctionType})
"""Types of functions that a module may call, such as activations; those of the model itself are methods."""

_EXACT = _BAKED_IN - {float, tuple, Tensor}
"""Those of which equal values are the same."""

LENGTH_SEEN = "max_seq_len_cached"
"""Attribute with the length that RoPE of type ``dynamic`` has seen, which no cache is used beyond."""

SET_BY_CALLS = ("rope_deltas", "conv1d_state", "recurrent_states")
"""Attributes that each call sets anew: of models whose positions have planes, and states of RecurrentGemma's layers.
Passes over a shared cache are given both."""


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
                        and not (LENGTH_SEEN in left_out and _of_length_seen(module, name))
                        and (type(value) is not Tensor or not changes_frequencies(module))
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


def _of_length_seen(module: nn.Module, name: str) -> bool:
    """Whether a pass sets an attribute by the length that it sees, where frequencies differ by layer type.

    The scaling without a layer type's name, which transformers sets beside, is read by no pass.
    """
    of_length = name == "attention_scaling" or name.endswith(f"_{LENGTH_SEEN}")
    return of_length and isinstance(getattr(module, "rope_type", None), dict)


def changes_frequencies(module: nn.Module) -> bool:
    """Whether a module's tensors are frequencies that each pass writes anew by its length, as of LongRoPE.

    No cache is used where they change, see `generation.support.rope_limit`.
    """
    kinds = getattr(module, "rope_type", None)  # for all layers, or per layer type
    found = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in found)
