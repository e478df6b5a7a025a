"""Compiled decoder layers: one compilation serves all layers of a model.

What `torch.compile` fuses is the small change around the matrix products: norms, rotary embedding, activations,
residual sums. Attention stays out of it. The layers of a model run the same code on other weights, so the first
layer's compilation is reused for the rest, once a layer's number is not taken for a constant. What stands beside the
layers, such as the last norm and the table of rotary angles, is small change too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .joined import share_products


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, in order; empty when it is not built of them."""
    parent = _parent_of_layers(model)
    return [] if parent is None else list(parent[1])


def _beside_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules beside the decoder layers that compute something small, operation by operation."""
    parent = _parent_of_layers(model)
    children = [] if parent is None else parent[0].children()
    # Those of PyTorch are one operation each, and parameters in more than one dimension are tables or matrices.
    return [
        child
        for child in children
        if type(child).__module__.startswith("transformers.")
        and next(child.children(), None) is None
        and all(parameter.dim() < 2 for parameter in child.parameters())
    ]


def _parent_of_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList] | None:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for parent in model.modules():
        for module in parent.children():
            if (
                isinstance(module, nn.ModuleList)
                and len(module) == count
                and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
            ):
                return parent, module
    return None


# Of inductor, where it has them: kernels that begin while the one before ends, and neighbours in one launch.
_INDUCTOR = ("triton.enable_pdl", "combo_kernels")


@cache  # what was compiled for one model serves others only by the same backend
def _backend(name: str) -> Callable[..., Any]:
    compile_graph: Callable[..., Any] = lookup_backend(name)
    if name == "inductor":
        from torch._inductor import list_options

        known = set(_INDUCTOR).intersection(list_options())
        compile_graph = partial(compile_graph, config_patches=dict.fromkeys(known, True))
    return share_products(compile_graph)


class CompiledLayers:
    """The compiled forward functions of a model's layer classes and of what stands beside, kept between captures.

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
        changed: list[nn.Module] = []
        try:
            for module in (*layers, *_beside_layers(model)):
                if "forward" in vars(module):
                    raise ValueError(f"{type(module).__name__} carries a forward of its own")
                vars(module)["forward"] = types.MethodType(self._compile(type(module)), module)
                changed.append(module)
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                yield
        finally:
            for module in changed:
                del vars(module)["forward"]

    def _compile(self, kind: type[nn.Module]) -> Callable[..., Any]:
        if kind not in self._compiled:
            self._compiled[kind] = torch.compile(kind.forward, backend=_backend(self.backend))
        return self._compiled[kind]
