"""Concurrent projections of the same input in compiled layers.

A `torch.compile` backend that replaces linear products of one input by one operator in the graph that Dynamo traced,
and then calls another backend. The operator runs the products as parallel branches of the captured step. Weights are
arguments of the compiled code as before: they keep their memory, and modules stay in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..._compat import FakeTensor, lookup_backend, register_backend, tensor_version
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
    """Wrap a `torch.compile` backend: linear products of the same input become one operator.

    Graphs traced with gradients enabled are passed on unchanged, since the operator has no backward pass.

    Args:
        backend: The backend to wrap, or its registered name.
        most_rows: Maximum rows of the input for which products run concurrently.

    Returns:
        The wrapped backend; the same object for equal arguments.
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
    """Replace each group of `F.linear` calls of the same input by one call of the operator, in place.

    Weights and biases of a group are inputs of the graph, so no product of a group depends on another.

    Args:
        graph: A graph traced by Dynamo.
        most_rows: See `with_concurrent_linears`.

    Returns:
        The number of groups.
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
