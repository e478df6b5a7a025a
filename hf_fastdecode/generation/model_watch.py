"""Tells whether a model is still as it was, so that what was found about it holds from call to call.

Most of what a call asks of a model is the same in the next call: its layers, hooks, devices, host state. A pass over
all modules in Python takes a millisecond for each question; one comparison by loops in C takes less for all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .._compat import ATTENTION_FIELD, EXPERTS_FIELD, global_forward_hooks
from .snapshot import ADAPTER_SWITCHES, SET_BY_CALLS, ModelWalk, addresses, config_field, forward_of, layouts

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

    Args:
        walk: One over the model.
        configs: Its config objects.
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
        self._containers = _containers(own)
        self._all_watched = next(global_forward_hooks(), None) is None
        values = self._values(own, walk.modules)
        self._ids, self._host = list(map(id, values)), self._host_state(walk.modules)
        self._tensors = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        try:
            self._layouts = self._layouts_of(values)
        except RuntimeError:  # a wrapper around other tensors
            self._all_watched = False
        self._homes = sorted({index for kind in (0, 1) for index in self._filled[kind]})  # of parameters and buffers
        self._loose = [
            (index, name)
            for index, attributes in enumerate(own)
            for name, value in attributes.items()
            if isinstance(value, Tensor) and name not in _LEFT_ASIDE
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
            if list(map(id, values)) != self._ids or self._host_state(modules) != self._host:
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
        tensors = [tensor for tensor in chain.from_iterable(map(dict.values, registered)) if tensor is not None]
        return addresses([*tensors, *(modules[index]().__dict__[name] for index, name in self._loose)])

    def _values(self, own: list[dict[str, Any]], modules: list[nn.Module]) -> list[object]:
        """All objects that are compared, in one order; raises KeyError where an attribute is gone."""
        registered = []
        for name, sizes, filled in zip(_REGISTERED, self._registered, self._filled, strict=True):
            parts = [attributes[name] for attributes in own]
            if list(map(len, parts)) != sizes:
                raise KeyError(name)
            registered += [parts[index] for index in filled]
        attributes = [get(one) for get, one in zip(self._getters, own, strict=True)]
        found = list(
            chain(
                map(type, modules),
                chain.from_iterable(attributes),
                chain.from_iterable(registered),  # their names
                chain.from_iterable(map(dict.values, registered)),
                *([value for name, value in vars(one).items() if name not in _BY_VALUE] for one in self._configs),
            )
        )
        for index, name in self._containers:
            found += _contents(own[index][name])
        for config in self._configs:
            for name, value in vars(config).items():
                if isinstance(value, _CONTAINERS) and name not in _BY_VALUE:
                    found += _contents(value)
        return found

    def _layouts_of(self, values: list[Any]) -> tuple[Hashable, ...]:
        return layouts([values[index] for index in self._tensors])

    def _host_state(self, modules: list[nn.Module]) -> Hashable:
        """What is compared by value: the code of classes, and settings of configs."""
        kinds = [kind for one in self._kinds if (kind := one()) is not None]
        return (
            tuple([(forward_of(kind), id(kind.__call__)) for kind in kinds]),
            tuple([_settings(config) for config in self._configs]),
        )


def _getter(names: tuple[str, ...], known: dict[tuple[str, ...], itemgetter[Any]]) -> itemgetter[Any]:
    """Reads what a model's code may read, of modules with these names of attributes, in one call."""
    if names not in known:
        read = [name for name in names if name not in _OF_EVERY_MODULE and name not in _LEFT_ASIDE]
        known[names] = itemgetter(*(read + ["_modules"] * max(0, 2 - len(read))))  # of one name it makes no tuple
    return known[names]


def _containers(own: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [
        (index, name)
        for index, attributes in enumerate(own)
        for name, value in attributes.items()
        if isinstance(value, _CONTAINERS) and (name[:1] != "_" or name in ADAPTER_SWITCHES)
    ]


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
    found: OrderedDict[int, PreTrainedConfig] = OrderedDict()
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
