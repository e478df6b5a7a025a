"""The generating classes of the installed transformers, and a tiny random model of each."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import torch
import transformers.models
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from .overrides import OVERRIDES
from .shrink import TOKENS, shrunken

_MOST_PARAMETERS = 130_000_000


@cache
def generating_classes() -> dict[str, str]:
    """Class name -> module, of every class below ``GenerationMixin`` in transformers' modeling files.

    Read from the sources: importing all of them takes minutes.
    """
    modules: dict[str, str] = {}
    below: dict[str, set[str]] = defaultdict(set)
    files = Path(transformers.models.__file__).parent.glob("*/*.py")
    for path in sorted(path for path in files if path.name.startswith(("modeling_", "generation_"))):
        for name, bases in re.findall(r"^class (\w+)\(([^)]*)\):", path.read_text(), re.MULTILINE):
            modules[name] = f"transformers.models.{path.parent.name}.{path.stem}"
            for base in bases.split(","):
                below[base.strip()].add(name)
    found: set[str] = set()
    waiting = {"GenerationMixin"}
    while waiting:
        waiting = {name for base in waiting for name in below[base]} - found
        found |= waiting
    # A mixin for one family's classes is no model.
    return {name: modules[name] for name in sorted(found) if not name.endswith(("PreTrainedModel", "GenerationMixin"))}


def class_named(name: str) -> type[PreTrainedModel]:
    """The class; its module is imported."""
    return getattr(importlib.import_module(generating_classes()[name]), name)


def tiny_model_of(name: str, *, seed: int = 0) -> PreTrainedModel:
    """A random fp32 model in eval mode, with weights large enough that its tokens depend on the context.

    Raises:
        ValueError: The shrunken config leaves too many parameters.
    """
    torch.manual_seed(seed)
    model_class = class_named(name)
    config = shrunken(model_class.config_class, OVERRIDES.get(name, {}))
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if parameters > _MOST_PARAMETERS:
        raise ValueError(f"the shrunken config leaves {parameters:,} parameters; override its sizes")
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            elif "sink" in parameter_name:  # which else weigh nothing
                parameter.copy_(torch.linspace(-1, 3, len(parameter)))
            elif parameter_name.endswith("_gate") and not parameter.any():  # through which else nothing passes
                parameter.fill_(0.5)
    lively_norms(model)
    model.generation_config = GenerationConfig(**TOKENS | {"eos_token_id": None})
    return model


def lively_norms(model: nn.Module) -> None:
    """Set norms whose weights start at zero, by which a layer would add nothing, to ones."""
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter) and not weight.any():
                weight.fill_(0.5)
