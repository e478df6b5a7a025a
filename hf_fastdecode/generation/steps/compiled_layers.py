"""Compiled decoder layers: one compilation serves all layers of a model.

`torch.compile` fuses the pointwise code around the matrix products: norms, rotary embedding, activations, residual
sums; attention is excluded. All layers run the same code on different weights, so the first layer's compilation is
reused for the rest, provided that the layer index is not specialized as a constant. Projections of the same input can
be left to one operator, which runs them concurrently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..._compat import (
    COMPILED_CALL,
    FakeTensor,
    dynamic_module_integers,
    lookup_backend,
    maybe_dynamic,
    register_backend,
    tensor_version,
    uncompiled_call,
)
from ...cache.layout.model import ModelLayout
from ..instance_patch import own_method
from ..stand_ins import find_stand_ins
from .projections import linears

Backend = Callable[..., Any]


@torch.library.custom_op(
    "hf_fastdecode::linears",
    mutates_args=(),
    schema="(Tensor inputs, Tensor[] weights, Tensor?[] biases, int most_rows) -> Tensor[]",
)
def _linears(
    inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], most_rows: int
) -> list[Tensor]:
    """`linears`, concurrently up to `most_rows` rows. One compilation serves any number of rows."""
    rows = inputs.shape[:-1].numel()
    return linears(inputs, weights, biases, concurrent=rows <= most_rows)


@_linears.register_fake
def _traced_linears(
    inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], most_rows: int
) -> list[Tensor]:
    return linears(inputs, weights, biases, concurrent=False)


@cache  # models share compilations only if their backends are equal
def with_concurrent_linears(backend: str | Backend, most_rows: int) -> Backend:
    """Wrap a `torch.compile` backend: linear products of one input, of up to `most_rows` rows, become one operator.

    Graphs traced with gradients enabled are passed on unchanged, since the operator has no backward pass. The same
    object is returned for equal arguments.
    """
    compile_graph = lookup_backend(backend)

    def rewrite_and_compile(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if not torch.is_grad_enabled() and replace_linears(module.graph, most_rows):
            module.recompile()
        return compile_graph(module, inputs, **options)

    if isinstance(backend, str):
        register_backend(rewrite_and_compile, f"hf_fastdecode_{backend}_{most_rows}")
    return rewrite_and_compile


def replace_linears(graph: fx.Graph, most_rows: int) -> int:
    """Replace each group of `F.linear` calls of the same input by one call of the operator, and return their number.

    Weights and biases of a group are inputs of the graph, so no product of a group depends on another.
    """
    by_input: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_plain(node):
            by_input.setdefault(node.args[0], []).append(node)
    groups = [nodes for nodes in by_input.values() if len(nodes) > 1]
    for nodes in groups:
        _replace(graph, nodes, most_rows)
    return len(groups)


def _is_plain(node: fx.Node) -> bool:
    """Whether it is a linear product that can be moved: of plain tensors, by weights that are inputs of the graph."""
    if node.target is not F.linear or node.kwargs or len(node.args) < 2:
        return False
    inputs, *parameters = (argument for argument in node.args if argument is not None)
    if not all(isinstance(one, fx.Node) and one.op == "placeholder" for one in parameters):
        return False
    values = [one.meta.get("example_value") if isinstance(one, fx.Node) else None for one in (inputs, *parameters)]
    if not all(map(_is_unwritten, values)):
        return False
    # Autocast, which the operator would not see, changes the dtype.
    return len({value.dtype for value in (*values, node.meta["example_value"])}) == 1


def _is_unwritten(value: Any) -> bool:
    """Whether nothing writes to a tensor or its views. False for subclasses, e.g. of quantized weights."""
    return type(value) is FakeTensor and tensor_version(value) == 0


def _replace(graph: fx.Graph, nodes: Sequence[fx.Node], most_rows: int) -> None:
    first = nodes[0]
    weights = [node.args[1] for node in nodes]
    biases = [node.args[2] if len(node.args) > 2 else None for node in nodes]
    with graph.inserting_before(first):
        outputs = graph.call_function(
            torch.ops.hf_fastdecode.linears.default, (first.args[0], weights, biases, most_rows)
        )
        outputs.meta = {**first.meta, "example_value": [node.meta["example_value"] for node in nodes]}
        for index, node in enumerate(nodes):
            output = graph.call_function(operator.getitem, (outputs, index))
            output.meta = dict(node.meta)
            node.replace_all_uses_with(output)
    for node in nodes:
        graph.erase_node(node)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers in order; empty if there is no such list, or for layers with stand-ins.

    Compiled layers would run their own attention code.
    """
    count = len(ModelLayout.from_config(model.config).layers)
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
        ):
            return [] if find_stand_ins(list(module.modules())) else list(module)
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

        Every attribute is restored on exit, also by an error. Projections of the same input run concurrently for up to
        `fused_rows` rows. Raises ValueError without a list of decoder layers, or if one has a `forward` of its own.
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
            _mark_rows((*args, *kwargs.values()))
            return compiled(layer, *args, **kwargs)
        return before(*args, **kwargs) if before else uncompiled_call(layer, *args, **kwargs)

    return call


def _mark_rows(arguments: Iterable[Any]) -> None:
    """Have the number of rows compiled as a variable, so that the second one needs no compilation of its own.

    One row stays a constant: its products are of vectors, for which there is faster code.
    """
    for one in arguments:
        if isinstance(one, Tensor) and one.ndim > 1 and len(one) > 1:
            maybe_dynamic(one, 0)
        elif isinstance(one, tuple):  # cosines and sines
            _mark_rows(one)
