"""Compiled decoder layers: one compilation serves all layers of a model.

`torch.compile` fuses the pointwise code around the matrix products: norms, rotary embedding, activations, residual
sums; attention is excluded. All layers run the same code on different weights, so the first layer's compilation is
reused for the rest, provided that the layer index is not specialized as a constant. Projections of the same input can
be left to one operator, which runs them concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..._compat import COMPILED_CALL, dynamic_module_integers, uncompiled_call
from ...cache.layout import ModelLayout
from ..instance_patch import own_method
from .compiled_projections import with_concurrent_linears


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers in order; empty if there is no such list."""
    count = len(ModelLayout.from_config(model.config).layers)
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
        ):
            return list(module)
    return []


class CompiledLayers:
    """The compiled forward functions of a model's layer classes, kept between captures.

    Args:
        backend: Backend of `torch.compile`; models with equal ones share their compilations.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor"):
        self.backend = backend
        self._compiled: dict[tuple[type[nn.Module], int], Callable[..., Any]] = {}

    @contextmanager
    def installed(self, model: PreTrainedModel, fused_rows: int = 0) -> Iterator[None]:
        """Context in which this thread runs the model's layers compiled; other threads are unaffected.

        Every attribute is restored on exit, also by an error.

        Args:
            model: The model.
            fused_rows: Maximum rows for which projections of the same input run concurrently; 0 compiles them as they
                are.

        Raises:
            ValueError: The model has no list of decoder layers, or a layer has an instance-level `forward`.
        """
        layers = decoder_layers(model)
        if not layers:
            raise ValueError(f"{type(model).__name__} has no list of decoder layers to compile")
        changed: list[tuple[nn.Module, Any]] = []
        try:
            for layer in layers:
                if own_method(layer, "forward") is not None:
                    raise ValueError(f"a layer of {type(model).__name__} carries a forward of its own")
                before = vars(layer).get(COMPILED_CALL)  # set if the user has compiled the layer
                call = _in_this_thread(self._compile(type(layer), fused_rows), layer, before)
                changed.append((layer, before))
                vars(layer)[COMPILED_CALL] = call
            with dynamic_module_integers():
                yield
        finally:
            for layer, before in changed:
                if before is None:
                    del vars(layer)[COMPILED_CALL]
                else:
                    vars(layer)[COMPILED_CALL] = before

    def _compile(self, kind: type[nn.Module], fused_rows: int) -> Callable[..., Any]:
        if (kind, fused_rows) not in self._compiled:
            backend = with_concurrent_linears(self.backend, fused_rows) if fused_rows else self.backend
            self._compiled[kind, fused_rows] = torch.compile(kind.forward, backend=backend)
        return self._compiled[kind, fused_rows]


def _in_this_thread(compiled: Callable[..., Any], layer: nn.Module, before: Any) -> Callable[..., Any]:
    """Call the compiled forward in this thread, and the previous implementation in others."""
    ours = get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == ours:
            return compiled(layer, *args, **kwargs)
        return before(*args, **kwargs) if before else uncompiled_call(layer, *args, **kwargs)

    return call
