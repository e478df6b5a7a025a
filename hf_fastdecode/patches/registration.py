"""Registers the slim architectures with transformers' Auto classes, without importing transformers.

`import hf_fastdecode` takes milliseconds, transformers takes seconds. So configs are registered when transformers'
registry of configs is imported, before or after this package. Model classes are registered with the first config
(`config_base.SlimConfig`): modules that they need may be only half imported together with the registry.

An ordinary config imports the registry in the middle of its import, to write its docstring. Registration needs the
config whole, so the registry is imported first, and with it that config.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Final

_REGISTRY: Final = "transformers.models.auto.configuration_auto"
_MODELS: Final = "transformers.models.auto.modeling_auto"
_CONFIG: Final = re.compile(r"transformers\.models\.(\w+)\.configuration_\1")


def register_when_imported() -> None:
    """Register the configs with AutoConfig: now if transformers' registry is imported already, or else after it is."""
    if _REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    # Each module registers its configs at its end, because importing it may be what imports the registry.
    for module in (".slim_configs", ".encoder_decoder_configs"):
        import_module(module, __package__)


class _Watch(MetaPathFinder):
    """Import hook that registers the slim configs once transformers' registry is imported, and then removes itself.

    If the registry of models imports that of configs, the hook waits for the end of the former, which configs read.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The registry's spec, whose execution ends in the registration, or that of an ordinary config; else None."""
        if _CONFIG.fullmatch(fullname) and fullname != _REGISTRY and self in sys.meta_path:
            import_module(_REGISTRY)
            return None if (imported := sys.modules.get(fullname)) is None else _Imported(imported).spec
        registers = fullname == _MODELS or (fullname == _REGISTRY and _MODELS not in sys.modules)
        spec = PathFinder.find_spec(fullname, path, target) if registers else None
        if spec is None or spec.loader is None or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            del loader.exec_module  # the method of the class again
            try:
                execute(module)
            except BaseException:  # e.g. Ctrl-C, after which a notebook imports it again
                sys.meta_path.insert(0, self)
                raise
            _register()

        loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


class _Imported(Loader):
    """Returns a module that was imported while its spec was looked for, which Python would execute again."""

    def __init__(self, module: ModuleType):
        self._module, self._own_spec = module, module.__spec__
        self.spec = module.__spec__ = ModuleSpec(module.__name__, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec
