"""Concurrent projections of the same input in captured steps.

A decode step's matrix product takes as long as reading its weights, plus some microseconds in which memory is idle.
Query, key and value projections have the same input, and so do gate and up projections: as parallel branches of the
captured graph, one product starts while another drains.

Parameters keep their memory and modules stay in place for every value of ``fuse_projections``. Only passes of the
capturing thread are affected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .capture_memory import branch_streams

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling modules that are applied to the same input."""


def linears(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`F.linear` of one input by several weights, concurrently on CUDA."""
    if not inputs.is_cuda:
        return [F.linear(inputs, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    main = torch.cuda.current_stream(inputs.device)
    streams = [main, *branch_streams(inputs.device)[: len(weights) - 1]]
    for stream in streams[1:]:
        stream.wait_stream(main)
    outputs = []
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        with torch.cuda.stream(streams[index % len(streams)]):
            outputs.append(F.linear(inputs, weight, bias))
    # Branch memory is reused only by branches, each of which first waits for all earlier work of `main`.
    for stream in streams[1:]:
        main.wait_stream(stream)
    return outputs


_linears_op = torch.library.custom_op(
    "hf_fastdecode::linears",
    linears,
    mutates_args=(),
    schema="(Tensor inputs, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
)
"""`linears` as a single node in compiled graphs."""


@_linears_op.register_fake
def _shapes(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [inputs.new_empty((*inputs.shape[:-1], weight.shape[0])) for weight in weights]


class _Group:
    """Projections of the same input; caches the outputs for the latest input until each has been read."""

    def __init__(self, parts: Sequence[nn.Linear]):
        self.weights = [part.weight for part in parts]
        self._biases = [part.bias for part in parts]
        self._inputs: Tensor | None = None
        self._version: int | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, inputs: Tensor, part: int) -> Tensor:
        """The output of one projection."""
        version = None if inputs.is_inference() else inputs._version
        if inputs is not self._inputs or version != self._version or part not in self._outputs:
            self._inputs, self._version = inputs, version
            self._outputs = dict(enumerate(linears(inputs, self.weights, self._biases)))
        output = self._outputs.pop(part)
        if not self._outputs:
            self._inputs = None
        return output


class FusedProjections(TorchFunctionMode):
    """Context in which this thread computes projections of the same input concurrently.

    A function mode is thread-local and replaces no module, so passes of other threads are unaffected.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        groups = map(_Group, _groups(model))
        self._parts = {id(weight): (group, part) for group in groups for part, weight in enumerate(group.weights)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and (found := self._parts.get(id(args[1]))) is not None:
            group, part = found
            return group.output(args[0], part)
        return func(*args, **(kwargs or {}))


def has_projections(model: nn.Module) -> bool:
    """Whether the model has projections of the same input to compute concurrently."""
    return next(_groups(model), None) is not None


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for parent in model.modules():
        for names in _TOGETHER:
            parts = [part for name in names if _is_plain(part := parent._modules.get(name))]
            if len(parts) == len(names):
                yield parts


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is exactly `nn.Linear`, without hooks."""
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def fusing(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `torch.compile` backend to replace projections of the same input by one operator.

    Args:
        compile_graph: The backend to wrap.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        for nodes in list(_projections_of_one_input(module.graph)):
            _fuse(module.graph, nodes)
        module.recompile()
        return compile_graph(module, inputs, **options)

    return backend


def _projections_of_one_input(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Groups of linear products of the same input that can be moved to the first of them."""
    by_input: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_projection(node):
            by_input.setdefault(node.args[0], []).append(node)
        elif _is_barrier(node):
            yield from (nodes for nodes in by_input.values() if len(nodes) > 1)
            by_input = {}
    yield from (nodes for nodes in by_input.values() if len(nodes) > 1)


def _is_projection(node: fx.Node) -> bool:
    """Whether it is a linear product with graph inputs, such as parameters, as weights."""
    if node.target is not F.linear or node.kwargs:
        return False
    return all(argument is None or _is_plain_input(argument) for argument in node.args[1:])


def _is_plain_input(node: Any) -> bool:
    is_input = isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")
    # Quantized and distributed weights are tensor subclasses with their own products.
    return is_input and not is_traceable_wrapper_subclass(node.meta.get("example_value"))


def _is_barrier(node: fx.Node) -> bool:
    """Whether products must not be moved across a node: it mutates arguments, or enters or exits a mode.

    Recognised by PyTorch's naming conventions.
    """
    if not node.op.startswith("call"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = getattr(node.target, "__module__", None) == operator.setitem.__module__ and name.startswith("i")
    mode = name.startswith(("_enter_", "_exit_", "_set_"))
    return in_place or augmented or mode or name == "setitem" or "out" in node.kwargs


def _fuse(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    weights = [node.args[1] for node in nodes]
    biases = [node.args[2] if len(node.args) > 2 else None for node in nodes]
    with graph.inserting_before(nodes[0]):
        outputs = graph.call_function(torch.ops.hf_fastdecode.linears.default, (nodes[0].args[0], weights, biases))
        for index, node in enumerate(nodes):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (outputs, index)))
    for node in nodes:
        graph.erase_node(node)
