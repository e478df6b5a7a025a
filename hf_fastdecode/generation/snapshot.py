"""A model at a moment, and whether it is still as it was: its modules, their host state, the memory of its tensors.

A call asks many questions of every module: is it in training mode, does it carry hooks, what does it store, which
tensors does it read. A walk by `nn.Module.modules` takes longer than most of the answers, so a call walks once
(`ModelWalk`), or not at all while `ModelWatch` finds the model untouched. Three systems tell of changes, each by what
its user needs:

- `ModelWatch` compares objects by identity, in one pass in C: whether what was found about the model holds from call
  to call. It may find a change where there is none, as of an equal string set again.
- `captured_state` compares by value what a captured graph bakes in, where the watch was touched: captures cost more.
- `fingerprint.Fingerprint` also finds weights written in place, which graphs read anew, but stored keys do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import chain
from operator import itemgetter, methodcaller
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .._compat import ATTENTION_FIELD, EXPERTS_FIELD, SET_BY_ZERO, global_forward_hooks, stored_parts
from ..attention.overrides import autocast_dtype
from ..instance_methods import STATE_ATTRIBUTE
from .forward_pass import input_device

_CODE_OF_INSTANCES = frozenset({"forward", "_call_impl", "_hf_hook", STATE_ATTRIBUTE})
"""Instance attributes with code that runs in a module's call: methods, accelerate's hooks, and our overrides."""


class ModelWalk:
    """The modules of a model, once each, in the order of `nn.Module.modules`.

    Only this list is as old as the walk: attributes of modules are read when a check asks for them.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module] | None = None):
        self.model = model
        self.modules = modules or modules_of(model)

    @cached_property
    def classes(self) -> dict[type[nn.Module], nn.Module]:
        return {type(module): module for module in reversed(self.modules)}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, tied ones once, in the order of `nn.Module.parameters`."""
        return self._tensors("_parameters")

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers, shared ones once, in the order of `nn.Module.buffers`."""
        return self._tensors("_buffers")

    def _tensors(self, kind: str) -> list[Tensor]:
        every = chain.from_iterable(module.__dict__[kind].values() for module in self.modules)
        return list({id(tensor): tensor for tensor in every if tensor is not None}.values())

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


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, once each, in the order of `nn.Module.modules`."""
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


ADAPTER_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""Host attributes by which PEFT layers select adapters and their scaling."""

_BAKED_IN = frozenset({bool, int, float, str, type(None), torch.dtype, tuple, Tensor})
"""Types of module attributes that can affect what a module computes."""

_FUNCTIONS = frozenset({FunctionType, BuiltinFunctionType})
"""Types of functions that a module may call, such as activations; those of the model itself are methods."""

_EXACT = _BAKED_IN - {float, tuple, Tensor}
"""Types whose equal values are the same."""

LENGTH_SEEN = "max_seq_len_cached"
"""Attribute with the length that RoPE of type ``dynamic`` has met so far, beyond which no cache is used."""

SET_BY_CALLS = ("rope_deltas", "conv1d_state", "recurrent_states")
"""Attributes that each call sets anew: of models whose positions have planes, and states of RecurrentGemma's layers.
Passes over a shared cache are given both."""


def pass_settings(
    model: PreTrainedModel, configs: Iterable[PreTrainedConfig]
) -> tuple[torch.dtype | None, Any, Hashable]:
    """Autocast dtype, instance-level `forward` and configs, such as windows, which also affect keys and values."""
    return autocast_dtype(input_device(model)), vars(model).get("forward"), tuple(map(_config_state, configs))


def captured_state(model: nn.Module, configs: Iterable[PreTrainedConfig], walk: ModelWalk | None = None) -> Hashable:
    """Model state that a capture bakes in: tensors' memory, host state of modules and configs."""
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
    """A key that tells a value of a config field from another."""
    if isinstance(value, PreTrainedConfig):
        return _config_state(value)
    if name == EXPERTS_FIELD and value == "batched_mm":  # for the time of decode steps
        value = "grouped_mm"
    return repr(value)


def adapter_state(walk: ModelWalk) -> Hashable:
    """Active adapters and their settings, by layer name."""
    adapted = [module for module in walk.modules if not module.__dict__.keys().isdisjoint(ADAPTER_SWITCHES)]
    found = [(module, switches) for module in adapted if (switches := _adapter_switches(module))]
    paths = walk.paths() if found else {}
    return tuple((paths[module], *switches) for module, switches in found)


def _adapter_switches(module: nn.Module) -> list[tuple[str, str]]:
    return [
        (name, str(value))
        for name in ADAPTER_SWITCHES
        if (value := module.__dict__.get(name)) is not None
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
                    None if module is walk.model else id(_function(_forward_beneath(module))),
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
    """Names of modules, parameters and buffers: two that are exchanged are the same objects in the same order."""
    parts = [module.__dict__[kind] for module in walk.modules for kind in ("_modules", "_parameters", "_buffers")]
    return tuple(chain.from_iterable(parts))


@lru_cache(maxsize=1024)
def _public(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are not private: a quarter of a module's, the same for most modules of a class."""
    return tuple(name for name in names if name[:1] != "_" and name not in SET_BY_ZERO)


def forward_of(kind: type[nn.Module]) -> Hashable:
    """A key that tells the code of a class, and functions of its file that it calls, from others."""
    forward = next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)
    bare = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None
    if not isinstance(bare, FunctionType):
        return _lasting(forward)
    names = bare.__globals__
    return _lasting(forward), *[_lasting(names[name]) for name in bare.__code__.co_names if name in names]


def _lasting(value: object) -> Hashable:
    """A key that is equal for the same object alone, also after its end, where an id may be that of another."""
    return ref(value) if isinstance(value, FunctionType) else id(value)


def _comparable(value: Any) -> str | int:
    if type(value) in _FUNCTIONS:
        return id(value)
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, tuple) and not all(type(part) in _EXACT or type(part) is float for part in value):
        return id(value)
    return str(value)  # tells zeros apart, and no NaN from another


def _forward_beneath(module: nn.Module) -> object:
    """The `forward` of an instance, if it has one, beneath this package's, which a decoder has too."""
    state = module.__dict__.get(STATE_ATTRIBUTE)
    if state is None:
        return module.__dict__.get("forward")
    return state.methods.original(module, "forward") if state.methods.wraps("forward") else None


def _function(method: object) -> object:
    return getattr(method, "__func__", method)


def layouts(tensors: Iterable[Tensor]) -> tuple[Hashable, ...]:
    """Address, dtype, shape and strides of the tensors, or of what this process stores of them."""
    parts = chain.from_iterable(map(stored_parts, tensors))
    return tuple([(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in parts])


def _of_length_seen(module: nn.Module, name: str) -> bool:
    """Whether a pass sets an attribute by the length that it sees, where frequencies differ by layer type."""
    of_length = name == "attention_scaling" or name.endswith(f"_{LENGTH_SEEN}")
    return of_length and isinstance(getattr(module, "rope_type", None), dict)


def changes_frequencies(module: nn.Module) -> bool:
    """Whether a module's tensors are frequencies that each pass writes anew by its length, as of LongRoPE.

    No cache is used where they change, see `generation.support.rope_limit`.
    """
    kinds = getattr(module, "rope_type", None)  # for all layers, or per layer type
    found = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in found)


_values_of: Final = methodcaller("values")
"""Of parameters that a library keeps in a mapping of its own, too, such as compressed-tensors'."""

_REGISTERED: Final = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module())) - {"training"}
"""Attributes by which PyTorch keeps its books, of which `_REGISTERED` are compared by what is in them."""

_BY_VALUE: Final = (ATTENTION_FIELD, EXPERTS_FIELD)
"""Config fields that passes of any thread change for their time."""

_LEFT_ASIDE: Final = frozenset({*SET_BY_CALLS, "generation_config"})
"""Attributes that calls set anew, and the defaults of `generate`, which passes do not read."""

_SCALARS: Final = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)


class ModelWatch:
    """Tells whether anything on a model was set, added, replaced or moved since a moment.

    Compared are classes, attributes, parameters, buffers, hooks and configs by identity, tensors also by their memory,
    and containers by what is in them. Elements written to weights in place are no change. What is found may be none at
    all, as of an equal string: `snapshot.captured_state` then tells. `_LEFT_ASIDE` is not compared.

    An id stands for its object while that lives. Modules, functions and other objects are referred to weakly, so that
    replaced ones are freed at once, and their end is a change. Tensors have ids and addresses alone: those with weak
    references cannot be swapped (`torch.utils.swap_tensors`).
    """

    def __init__(self, walk: ModelWalk, configs: Iterable[PreTrainedConfig]):
        self._gone: list[object] = []
        self._modules = [ref(module, self._gone.append) for module in walk.modules]
        self._kinds = [ref(kind) for kind in walk.classes]
        self._configs = _with_parts(configs)
        own = [module.__dict__.copy() for module in walk.modules]  # other threads' passes put calls on modules
        self._sizes = [len(attributes) for attributes in own]
        getters: dict[tuple[str, ...], itemgetter[Any]] = {}
        self._getters = [_getter(tuple(attributes), getters) for attributes in own]
        self._registered = [[len(attributes[name]) for attributes in own] for name in _REGISTERED]
        self._filled = [[index for index, size in enumerate(sizes) if size] for sizes in self._registered]
        every = _every(own)
        self._containers = [
            (index, name)
            for index, name, value in every
            if isinstance(value, _CONTAINERS) and (name[:1] != "_" or name in ADAPTER_SWITCHES)
        ]
        self._all_watched = next(global_forward_hooks(), None) is None
        values = self._values(own, walk.modules)
        self._ids, self._host = list(map(id, values)), self._host_state()
        self._tensors = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        try:
            self._layouts = self._layouts_of(values)
        except RuntimeError:  # a wrapper around other tensors
            self._all_watched = False
        self._homes = sorted({index for kind in (0, 1) for index in self._filled[kind]})  # of parameters and buffers
        self._loose = [
            (index, name) for index, name, value in every if isinstance(value, Tensor) and name not in _LEFT_ASIDE
        ]
        self._memory = self._memory_now() if self._all_watched else ()
        self._held: list[object] = []  # what keeps ids from being those of other objects
        self._hold(values, known=set(map(id, walk.modules)))

    def _hold(self, values: Iterable[object], known: set[int]) -> None:
        """Hold scalars, and refer to other objects weakly where they can be; those with a `known` id are held."""
        for value in {id(value): value for value in values if id(value) not in known}.values():
            if type(value) in _SCALARS:
                self._held.append(value)
            elif not isinstance(value, (Tensor, *_CONTAINERS)):
                try:
                    self._held.append(ref(value, self._gone.append))
                except TypeError:
                    self._held.append(value)

    @property
    def modules(self) -> list[nn.Module]:
        """The model's modules, in the order of the walk, while it is untouched."""
        return [module for one in self._modules if (module := one()) is not None]

    def touched(self) -> bool:
        """Whether a class, attribute, parameter, buffer, module, hook, name or layout is another than it was."""
        if self._gone or not self._all_watched or next(global_forward_hooks(), None) is not None:
            return True
        modules = self.modules
        own = [module.__dict__ for module in modules]
        try:
            if list(map(len, own)) != self._sizes:
                return True
            values = self._values(own, modules)
            if list(map(id, values)) != self._ids or self._host_state() != self._host:
                return True
            return self._layouts_of(values) != self._layouts
        except (KeyError, RuntimeError, TypeError):  # other attributes, or another thread changes them now
            return True

    def moved(self) -> bool:
        """Whether any tensor's memory is another than it was; asks less than `touched`, and finds fewer changes."""
        try:
            return bool(self._gone) or not self._all_watched or self._memory_now() != self._memory
        except (AttributeError, KeyError, RuntimeError, TypeError):  # a module or an attribute is gone
            return True

    def _memory_now(self) -> tuple[int, ...]:
        modules = self._modules
        own = [modules[index]().__dict__ for index in self._homes]
        registered = chain.from_iterable((attributes["_parameters"], attributes["_buffers"]) for attributes in own)
        tensors = [tensor for tensor in chain.from_iterable(map(_values_of, registered)) if tensor is not None]
        tensors += [modules[index]().__dict__[name] for index, name in self._loose]
        return tuple(one.data_ptr() for one in chain.from_iterable(map(stored_parts, tensors)))

    def _values(self, own: list[dict[str, Any]], modules: list[nn.Module]) -> list[object]:
        """All objects that are compared, in one order; raises KeyError where an attribute is gone."""
        registered = []
        for name, sizes, filled in zip(_REGISTERED, self._registered, self._filled, strict=True):
            parts = [attributes[name] for attributes in own]
            if list(map(len, parts)) != sizes:
                raise KeyError(name)
            registered += [parts[index] for index in filled]
        attributes = [get(one) for get, one in zip(self._getters, own, strict=True)]
        settings = [value for one in self._configs for name, value in vars(one).items() if name not in _BY_VALUE]
        names, tensors = chain.from_iterable(registered), chain.from_iterable(map(_values_of, registered))
        found = list(chain(map(type, modules), chain.from_iterable(attributes), names, tensors, settings))
        for index, name in self._containers:
            found += _contents(own[index][name])
        for value in settings:
            if isinstance(value, _CONTAINERS):
                found += _contents(value)
        return found

    def _layouts_of(self, values: list[Any]) -> tuple[Hashable, ...]:
        return layouts([values[index] for index in self._tensors])

    def _host_state(self) -> Hashable:
        """The parts that are compared by value: the code of classes, and settings of configs."""
        kinds = [kind for one in self._kinds if (kind := one()) is not None]
        code = tuple([(forward_of(kind), id(kind.__call__)) for kind in kinds])
        return code, tuple([_settings(config) for config in self._configs])


def _getter(names: tuple[str, ...], known: dict[tuple[str, ...], itemgetter[Any]]) -> itemgetter[Any]:
    """Reads what a model's code may read, of modules with these names of attributes, in one call."""
    if names not in known:
        read = [name for name in names if name not in _OF_EVERY_MODULE and name not in _LEFT_ASIDE]
        known[names] = itemgetter(*(read + ["_modules"] * max(0, 2 - len(read))))  # of one name it makes no tuple
    return known[names]


def _every(own: list[dict[str, Any]]) -> list[tuple[int, str, Any]]:
    """All attributes: the module's number, the name and the value."""
    return [(index, name, value) for index, one in enumerate(own) for name, value in one.items()]


def _contents(container: Any) -> Iterator[object]:
    """All objects in nested containers, and the keys of dicts, in order; the containers themselves by their class."""
    waiting, seen = [container], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, _CONTAINERS):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            yield type(one)
            waiting += chain(one.keys(), one.values()) if isinstance(one, dict) else one


def _with_parts(configs: Iterable[PreTrainedConfig]) -> list[PreTrainedConfig]:
    """The configs and those that are fields of them, each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = list(configs)
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return list(found.values())


def _settings(config: PreTrainedConfig) -> Hashable:
    """A config's number of fields, and those fields whose objects do not tell of a change."""
    own = vars(config)
    others = (
        (name, repr(value))
        for name, value in own.items()
        if type(value) not in _SCALARS and not isinstance(value, (PreTrainedConfig, *_CONTAINERS))
    )
    return len(own), config_field(EXPERTS_FIELD, own.get(EXPERTS_FIELD)), *others
