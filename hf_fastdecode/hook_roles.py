"""Effects of the forward hooks that libraries put on modules, by where a hook is defined."""

from __future__ import annotations

import types
from collections.abc import Iterator
from enum import Enum, auto
from functools import partial
from typing import Any, Final


class Role(Enum):
    """The effect of a forward hook on a pass."""

    IDLE = auto()  # nothing in passes without gradients, or it only records: a captured step may leave it out
    SAFE = auto()  # nothing that depends on rows: it moves tensors, casts them, gathers parameters, measures
    GATHERS = auto()  # gathers a module's parameters before it runs, divides them again after it, or agrees on them
    WRAPS = auto()  # what the function does that it wraps
    READS_ROWS = auto()  # something that other rows or lengths would change


_ROLES: Final = {
    "accelerate": Role.SAFE,  # devices, offloading, casts of layers
    "accelerate.big_modeling:_self_attn_pre_forward_hook": Role.READS_ROWS,  # drops masks, in context parallelism
    "deepspeed.profiling.flops_profiler": Role.SAFE,
    "deepspeed.runtime.engine:_module_forward_post_hook": Role.IDLE,  # timers
    "deepspeed.runtime.engine:_module_forward_pre_hook": Role.IDLE,  # timers, and casts of positional inputs
    "deepspeed.runtime.zero.parameter_offload": Role.GATHERS,
    "deepspeed.utils.nvtx": Role.WRAPS,
    "hf_fastdecode": Role.SAFE,
    "lightning": Role.SAFE,  # profilers, summaries, trackers of calls
    "lightning_fabric": Role.SAFE,
    "peft:make_inputs_require_grad": Role.IDLE,  # its other hooks select an adapter per row
    "peft:make_inputs_require_grads": Role.IDLE,
    "pytorch_lightning": Role.SAFE,
    "torch._dynamo": Role.WRAPS,  # torch.compiler.disable
    "torch.distributed": Role.SAFE,
    "torch.nn.parallel": Role.SAFE,
    "torch.nn.utils": Role.SAFE,
    "transformers": Role.SAFE,
    "transformers.integrations.neftune": Role.READS_ROWS,  # noise scaled by the row length
    # transformers leaves these on a model from the first pass that returns hidden states; other passes skip them.
    "transformers.utils.output_capturing": Role.IDLE,
    "transformers:make_inputs_require_grad": Role.IDLE,
    "transformers:make_inputs_require_grads": Role.IDLE,
}
"""Roles by the package, or module, that defines a hook, and the function's name where others there do other things."""


def role_of(hook: Any) -> Role | None:
    """The role of a hook; None of unknown ones."""
    function = unbound(hook)
    home, name = defining_module(hook), name_of(hook).rpartition(".")[2]
    parts = home.split(".")
    packages = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    known = (*(f"{package}:{name}" for package in packages), *packages)
    role = next((_ROLES[key] for key in known if key in _ROLES), None)
    if role is not Role.WRAPS:
        return role
    roles = {role_of(inner) for inner in _wrapped(function)}
    return roles.pop() if len(roles) == 1 else None


def _wrapped(function: Any) -> Iterator[Any]:
    """The functions that a decorator's function calls, in its closure where the decorator does not say it."""
    if (inner := getattr(function, "__wrapped__", None)) is not None:
        yield inner
    else:
        cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
        yield from (content for content in cells if callable(content))


def unbound(function: Any) -> Any:
    while isinstance(function, types.MethodType | partial):
        function = function.__func__ if isinstance(function, types.MethodType) else function.func
    return function


def defining_module(function: Any) -> str:
    """Module where a callable is defined; ``__module__`` may be copied from a wrapped function."""
    bare = unbound(function)
    return str(getattr(bare, "__globals__", {}).get("__name__") or type(bare).__module__)


def name_of(function: Any) -> str:
    """Qualified name of a callable, with its module; ``__qualname__`` may be copied from a wrapped function."""
    bare = unbound(function)
    code = getattr(bare, "__code__", None)
    return f"{defining_module(function)}.{code.co_qualname if code is not None else type(bare).__qualname__}"
