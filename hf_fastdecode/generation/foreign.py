"""Code that others have put on a model's modules: forward hooks, and `forward` methods of an instance.

Prefill runs the tokens of all prompts end to end in one row. A hook that looks at rows or at the last position, as
those that steer, patch or probe a model do, would see other shapes than in stock transformers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from .wrapping import STATE_ATTRIBUTE

# Packages whose hooks move or convert tensors, gather parameters or record outputs, whatever the shape.
_KNOWN_HOOKS = (
    "transformers",
    "accelerate",
    "torch.nn.utils",
    "torch.nn.parallel",
    "torch.distributed",
    "hf_fastdecode",
)
# Noise whose scale depends on the length of a row.
_FOREIGN_ALL_THE_SAME = ("transformers.integrations.neftune",)
_REQUIRE_GRAD = ("make_inputs_require_grad", "make_inputs_require_grads")
"""Names that transformers and PEFT give the hook by which embeddings require a gradient."""
# Packages whose `forward`s of an instance compute what the class's does, position by position.
_KNOWN_FORWARDS = (
    "transformers",
    "accelerate",
    "torch",
    "peft",
    "trl",  # its fused head, which passes of `generate` do not ask for
    "bitsandbytes",
    "liger_kernel",
    "hf_fastdecode",
)


_WHY = "which would see prompts packed into one row"


def foreign_code(model: nn.Module) -> str | None:
    """Why code of others might not compute in a packed prefill what it does in stock, or None without such code."""
    for hook in (*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()):
        if not _is_known_hook(hook):
            return f"all modules have a forward hook, {_name(hook)}, {_WHY}"
    for path, module in model.named_modules():
        where = f"{type(module).__name__}{f' {path!r}' if path else ''}"
        for hook in _hooks(module):
            if not _is_known_hook(hook):
                return f"{where} has a forward hook, {_name(hook)}, {_WHY}"
        for forward in _own_forwards(module):
            if not _is_of(_home(forward), _KNOWN_FORWARDS):
                return f"{where} has a forward of its own, {_name(forward)}, {_WHY}"
    return None


def _hooks(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    if (of_accelerate := vars(module).get("_hf_hook")) is not None:
        yield from getattr(of_accelerate, "hooks", (of_accelerate,))


def _own_forwards(module: nn.Module) -> Iterator[Any]:
    """The `forward`s of an instance, and what they say they wrap, up to that of its class."""
    state = vars(module).get(STATE_ATTRIBUTE)
    for forward in (vars(module).get("forward"), state and state.methods.original(module, "forward")):
        while forward is not None and _bare(forward) is not type(module).forward:
            yield forward
            forward = getattr(forward, "__wrapped__", None)


def _is_known_hook(hook: Any) -> bool:
    if only_requires_grad(hook):
        return True
    return _is_of(_home(hook), _KNOWN_HOOKS) and not _is_of(_home(hook), _FOREIGN_ALL_THE_SAME)


def only_requires_grad(hook: Any) -> bool:
    """Whether a hook does nothing where no gradient is wanted."""
    return getattr(_bare(hook), "__name__", "") in _REQUIRE_GRAD


def _is_of(home: str, packages: tuple[str, ...]) -> bool:
    return any(home == package or home.startswith(f"{package}.") for package in packages)


def _bare(function: Any) -> Any:
    """What a bound method or a partial calls."""
    while isinstance(function, types.MethodType | functools.partial):
        function = function.__func__ if isinstance(function, types.MethodType) else function.func
    return function


def _home(function: Any) -> str:
    """The module in which a callable was written: a wrapper may carry the names of what it wraps."""
    bare = _bare(function)
    return str(getattr(bare, "__globals__", {}).get("__name__") or type(bare).__module__)


def _name(function: Any) -> str:
    bare = _bare(function)
    code = getattr(bare, "__code__", None)  # a wrapper's own names may be those of what it wraps
    return f"{_home(function)}.{code.co_qualname if code is not None else type(bare).__qualname__}"
