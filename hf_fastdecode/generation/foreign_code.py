"""Third-party code on a model: forward hooks, instance-level `forward`s, modules, patched classes, and wrappers.

Prefill packs the tokens of all prompts into one row. Code that reads rows or the last position, e.g. for activation
steering, patching or probing, would see other shapes than in stock transformers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .._compat import global_forward_hooks
from ..errors import Unsupported
from ..hook_roles import Role, defining_module, name_of, role_of, unbound
from ..instance_methods import STATE_ATTRIBUTE
from .snapshot import ModelWalk

# Where transformers gives modules a forward once: tensor parallelism, and before 5.24 experts in MXFP4.
_SET_ONCE = ("transformers.distributed.tensor_parallel", "transformers.integrations.mxfp4")
# Methods of PEFT that compute each token by itself, as the test of all methods found. Others, e.g. Lily, whose router
# averages over a row, would compute other values of packed prompts.
_PEFT_METHODS = (
    *("adalora", "adaption_prompt", "beft", "boft", "c3a", "delora", "deft", "fourierft", "frod", "glora", "gralora"),
    *("hira", "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "oft", "osf", "peanut", "psoft", "pvera"),
    *("randlora", "road", "shira", "supertuning", "tinylora", "trainable_tokens", "unilora", "vblora", "vera"),
    "waveft",
)
# Packages whose modules and `forward`s compute per position, or attend like transformers' own.
_KNOWN_CODE = (
    *("transformers", "accelerate", "torch", "hf_fastdecode"),
    *("peft.mixed_model", "peft.peft_model", "peft.tuners._buffer_dict", "peft.tuners.tuners_utils", "peft.utils"),
    *(f"peft.tuners.{method}" for method in _PEFT_METHODS),
    "trl",  # its fused head, which `generate` does not use
    *("torchao", "bitsandbytes", "optimum", "gptqmodel", "auto_gptq", "awq", "hqq", "compressed_tensors"),
    *("kernels", "liger_kernel", "flash_attn", "fla", "apex", "transformer_engine"),
)
_WHY = "which would see prompts packed into one row"
_REMOVE = "remove it for the call"


def check_code(walk: ModelWalk) -> None:
    """Raise `Unsupported` if third-party hooks, modules or `forward`s would see packed prompts."""
    for hook in global_forward_hooks():
        if not _is_known_hook(hook):
            raise Unsupported(f"all modules have a forward hook, {name_of(hook)}, {_WHY}", _REMOVE)
    # Custom model classes, also from the hub, define modules of their own.
    known = (*_KNOWN_CODE, type(walk.model).__module__)
    for module in walk.with_code:
        for hook in _hooks(module):
            if not _is_known_hook(hook):
                raise Unsupported(f"{_where(walk, module)} has a forward hook, {name_of(hook)}, {_WHY}", _REMOVE)
        for piece in own_code(module):
            if not _is_of(defining_module(piece), known):
                raise Unsupported(
                    f"{_where(walk, module)} has a forward of its own, {name_of(piece)}, {_WHY}", _REMOVE
                )
    for kind, first in walk.classes.items():
        for method, default in ((kind.forward, None), (kind.__call__, nn.Module.__call__)):
            for piece in () if method is default else _with_wrapped(method):
                if not _is_of(defining_module(piece), known):
                    raise Unsupported(f"{_where(walk, first)} runs third-party code, {name_of(piece)}, {_WHY}")


def _where(walk: ModelWalk, module: nn.Module) -> str:
    path = walk.paths()[module]
    return f"{type(module).__name__}{f' {path!r}' if path else ''}"


def is_capturable(hook: Any) -> bool:
    """Whether a captured step may leave a hook out."""
    return role_of(hook) is Role.IDLE


def is_of_transformers(method: Any) -> bool:
    """Whether a method, and what it wraps, is transformers' code."""
    return all(_is_of(defining_module(piece), ("transformers",)) for piece in _with_wrapped(method))


def is_set_once(forward: Any) -> bool:
    """Whether a module's own forward is one that transformers sets as it makes the model, the same in every call."""
    return _is_of(defining_module(forward), _SET_ONCE)


def _hooks(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    if (of_accelerate := vars(module).get("_hf_hook")) is not None:
        yield from _flat(of_accelerate)


def _flat(hook: Any) -> Iterator[Any]:
    if (parts := getattr(hook, "hooks", None)) is None:
        yield hook
    else:
        for part in parts:
            yield from _flat(part)


def own_code(module: nn.Module) -> Iterator[Any]:
    """Callables that an instance runs in place of its class's methods, with the functions they wrap."""
    state = vars(module).get(STATE_ATTRIBUTE)
    beneath = state.methods.original(module, "forward") if state is not None else None
    for method in (vars(module).get("forward"), beneath, vars(module).get("_call_impl")):
        while method is not None and unbound(method) is not type(module).forward:
            yield from _pieces(method, module)
            method = getattr(method, "__wrapped__", None)


def _with_wrapped(function: Any) -> Iterator[Any]:
    """A function and, one by one, what it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _pieces(method: Any, owner: nn.Module) -> Iterator[Any]:
    """Functions and objects inside a callable: arguments of partials, submodules of modules."""
    if isinstance(method, functools.partial):
        for part in (method.func, *method.args, *method.keywords.values()):
            if callable(part) and part is not owner:
                yield from _pieces(part, owner)
    elif isinstance(method, types.MethodType):
        yield method
        if isinstance(method.__self__, nn.Module) and method.__self__ is not owner:
            yield from _pieces(method.__self__, owner)
    elif isinstance(method, nn.Module):
        yield from (type(part).forward for part in method.modules())
    else:
        yield method


def _is_known_hook(hook: Any) -> bool:
    return role_of(hook) in (Role.IDLE, Role.SAFE, Role.GATHERS)  # `check_processes` refuses the last where it must


def _is_of(home: str, packages: tuple[str, ...]) -> bool:
    return any(home == package or home.startswith(f"{package}.") for package in packages)


_INNER = ("_orig_mod", "module", "_fsdp_wrapped_module", "_forward_module", "base_model", "model")
"""Wrappers' attributes for the inner model: torch.compile, DDP and DataParallel, FSDP, Lightning Fabric, PEFT, PEFT's
tuners."""


def unwrapped(model: object) -> PreTrainedModel:
    """Return the transformers model that `model` is or wraps, the one whose `generate` runs.

    Args:
        model: A transformers model, or one wrapped by PEFT, `torch.compile`, DistributedDataParallel, DataParallel or
            any module that stores it under one of the same attribute names, nested in any order.

    Raises:
        TypeError: `model` is none of these; the message names the attribute that holds a model, if any.
    """
    found = model
    while isinstance(found, nn.Module) and not isinstance(found, PreTrainedModel):
        inner = next((part for name in _INNER if isinstance(part := _stored(found, name), nn.Module)), None)
        if inner is None:
            break
        found = inner
    if isinstance(found, PreTrainedModel):
        return found
    got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise TypeError(f"expected a transformers PreTrainedModel, got {got}; {_remedy(model)}")


def held_model(model: object) -> PreTrainedModel:
    """Return the transformers model that `model` is or wraps, see `unwrapped`, or the only one that it holds.

    A module may hold one beside modules of its own, such as the head of a reward model or of a critic. Models inside
    models do not count.

    Raises:
        TypeError: `model` is not a module that holds exactly one; the message names the attributes of several.
    """
    try:
        return unwrapped(model)
    except TypeError:
        if isinstance(model, nn.Module) and len(held := _held(model)) == 1:
            return next(iter(held))
        raise


def _stored(wrapper: nn.Module, name: str) -> object:
    """The wrapper's own attribute, bypassing ``__getattr__`` delegation to the model."""
    return wrapper._modules.get(name) or vars(wrapper).get(name)


def _held(holder: object) -> dict[PreTrainedModel, str]:
    """The models among a holder's attributes or modules, without those inside another, with their names."""
    parts = [*vars(holder).items()] if hasattr(holder, "__dict__") else []
    if isinstance(holder, nn.Module):
        parts += holder.named_modules()
    models = {part: name for name, part in reversed(parts) if isinstance(part, PreTrainedModel)}
    inside = {part for model in models for part in model.modules() if part is not model}
    return {model: name for model, name in reversed(models.items()) if model not in inside}


def _remedy(model: object) -> str:
    names = " or ".join(map(repr, _held(model).values()))
    return f"pass its attribute {names}" if names else "load one with AutoModelForCausalLM.from_pretrained"
