"""Makes Triton's interpreter faster: less time for kernels that call device functions."""

from __future__ import annotations

from inspect import ismodule
from typing import Any


def patch_language_once() -> None:
    """Let a launch replace the functions of `triton.language` once, and not again at every call of a device function.

    Triton 3.7 does both, and restores them at a launch's end; the second changes nothing. Versions that lack the
    functions named here are left as they are.
    """
    try:
        from triton.runtime import interpreter

        patch, scope_type, language = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.tl
    except (ImportError, AttributeError):
        return
    patched: set[str] = set()  # modules, in the launch under way

    class Launch(scope_type):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_unless_patched(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if ismodule(value)]
        names = {module.__name__ for module in modules if module in (language, language.core)}
        if names <= patched:
            return scope_type()
        patched.update(names)
        changes = patch(function)
        launch = Launch()
        launch._changes = changes._changes
        return launch

    interpreter._patch_lang = patch_unless_patched
