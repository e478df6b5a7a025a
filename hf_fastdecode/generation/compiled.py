"""Compiled decoder layers: one compilation serves all layers of a model.

What `torch.compile` fuses is the small change around the matrix products: norms, rotary embedding, activations,
residual sums. Attention stays out of it. The layers of a model run the same code on other weights, so the first
layer's compilation is reused for the rest, once a layer's number is not taken for a constant.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .joined import share_products
from .wrapping import own_method


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, in order; empty when it is not built of them."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
        ):
            return list(module)
    return []


@cache  # what was compiled for one model serves others only by the same backend
def _backend(name: str) -> Callable[..., Any]:
    return share_products(lookup_backend(name))


class CompiledLayers:
    """The compiled forward functions of a model's layer classes, kept between captures.

    Args:
        backend: Of `torch.compile`.
    """

    def __init__(self, backend: str = "inductor"):
        self.backend = backend
        self._compiled: dict[type[nn.Module], Callable[..., Any]] = {}

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """Within, the model's layers run compiled; every attribute is restored on leaving, also by an error.

        Raises:
            ValueError: The model is not built of layers that can be compiled one by one.
        """
        layers = decoder_layers(model)
        if not layers:
            raise ValueError(f"{type(model).__name__} has no list of decoder layers to compile")
        changed: list[tuple[nn.Module, Any]] = []
        try:
            for layer in layers:
                if own_method(layer, "forward") is not None:
                    raise ValueError(f"a layer of {type(model).__name__} carries a forward of its own")
                forward = types.MethodType(self._compile(type(layer)), layer)
                changed.append((layer, vars(layer).get("forward")))  # accelerate leaves the class's own there
                vars(layer)["forward"] = forward
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                yield
        finally:
            for layer, before in changed:
                if before is None:
                    del vars(layer)["forward"]
                else:
                    vars(layer)["forward"] = before

    def _compile(self, kind: type[nn.Module]) -> Callable[..., Any]:
        if kind not in self._compiled:
            self._compiled[kind] = torch.compile(kind.forward, backend=_backend(self.backend))
        return self._compiled[kind]
