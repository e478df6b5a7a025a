"""Enables models as `from_pretrained` returns them, for programs whose code nobody changes; imports nothing heavy.

transformers takes seconds to import, and reads the environment then, which programs may set first. So the one method
that all classes load by is patched when transformers' module of it is imported, by this process's program.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final
from weakref import WeakSet

_LOADING: Final = "transformers.modeling_utils"
_CHILDREN: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli", "children")
"""A folder with a `sitecustomize`, which Python processes import that have it in PYTHONPATH."""

VARIABLE: Final = "HF_FASTDECODE_RUN"
"""Environment variable: options of `enable`, in JSON, for processes that the program starts."""


@contextmanager
def enabled_loading(**options: Any) -> Iterator[None]:
    """Context in which models that can share are enabled as `from_pretrained` returns them; its end restores all.

    Python processes started in it do the same until they end, unless they ignore the environment (``python -I``).

    Args:
        options: Keyword arguments of `enable`, with values that JSON can represent.
    """
    patch, before = _Patch(options), {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    os.environ[VARIABLE] = json.dumps(options)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_CHILDREN, before["PYTHONPATH"])))
    patch.apply()
    try:
        yield
    finally:
        patch.undo()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def enable_in_child() -> None:
    """Do as `enabled_loading` of the parent process does, in a process that it started."""
    if (options := os.environ.get(VARIABLE)) is not None:
        _Patch(json.loads(options)).apply()


class _Patch(MetaPathFinder):
    """Patches `PreTrainedModel.from_pretrained` once its module is imported."""

    def __init__(self, options: dict[str, Any]):
        self._options = options
        self._original: Any = None
        self._kind: Any = None
        self._enabled: WeakSet[Any] = WeakSet()

    def apply(self) -> None:
        if _LOADING in sys.modules:
            self._patch(sys.modules[_LOADING])
        else:
            sys.meta_path.insert(0, self)

    def undo(self) -> None:
        """Restore the method, and disable the models that were enabled."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._kind is not None:
            self._kind.from_pretrained = self._original
        if self._enabled:
            from .api import disable

            for model in list(self._enabled):
                disable(model)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module of `from_pretrained`, whose execution ends in the patch; None for all others."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _LOADING else None
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            del loader.exec_module  # the method of the class again
            execute(module)
            sys.meta_path.remove(self)
            self._patch(module)

        loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec

    def _patch(self, module: ModuleType) -> None:
        self._kind = module.PreTrainedModel
        self._original = original = vars(self._kind)["from_pretrained"]

        @functools.wraps(original.__func__)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            loaded = original.__func__(cls, *args, **kwargs)
            self._enable(loaded[0] if isinstance(loaded, tuple) else loaded)  # with output_loading_info=True
            return loaded

        self._kind.from_pretrained = classmethod(from_pretrained)

    def _enable(self, model: Any) -> None:
        from .api import enable
        from .forward.decoder import decoder_of

        if not (model.can_generate() or decoder_of(model)):
            return

        self._enabled.add(enable(model, **self._options))
        print(f"hf-fastdecode: enabled {type(model).__name__}", file=sys.stderr)
