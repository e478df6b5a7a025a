"""One walk over the modules of a model, from which all checks of a call read.

A call asks many questions of every module: is it in training mode, does it carry hooks, what does it store, which
tensors does it read. A walk by `nn.Module.modules` takes longer than most of the answers, so a call walks once, or not
at all where the last one's modules are known to be still the model's (`model_watch`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..weak_method import STATE_ATTRIBUTE

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
        """The first module of each class."""
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
    """The tensors, each once; None is left out."""
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())
