"""Unwraps models wrapped by PEFT, torch.compile, DDP and others."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

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
        inner = next((part for name in _INNER if isinstance(part := _attribute(found, name), nn.Module)), None)
        if inner is None:
            break
        found = inner
    if isinstance(found, PreTrainedModel):
        return found
    raise TypeError(f"expected a transformers PreTrainedModel, got {_name(model)}; {_remedy(model)}")


def _name(model: object) -> str:
    return f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__


def _attribute(wrapper: nn.Module, name: str) -> object:
    """The wrapper's own attribute, bypassing ``__getattr__`` delegation to the model."""
    return wrapper._modules.get(name) or vars(wrapper).get(name)


def _remedy(model: object) -> str:
    for name, part in vars(model).items() if hasattr(model, "__dict__") else ():
        if isinstance(part, PreTrainedModel):
            return f"pass its attribute {name!r}"
    if isinstance(model, nn.Module):
        for name, part in model.named_modules():
            if isinstance(part, PreTrainedModel):
                return f"pass its attribute {name!r}"
    return "load one with AutoModelForCausalLM.from_pretrained"
