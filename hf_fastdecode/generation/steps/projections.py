"""Matrix products of captured steps: those of few rows by a kernel, others of the same input concurrently.

A decode step's matrix product takes as long as reading its weights, plus some microseconds in which memory is idle.
Query, key and value projections have the same input, and so do gate and up projections. Where `RowProducts` serves
them they are one launch, as is each other product; otherwise they are parallel branches of the captured graph, where
one product starts while another drains.

Parameters keep their memory and modules stay in place for every value of ``fuse_projections``. Only passes of the
capturing thread are affected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat import tensor_version
from ...instance_methods import is_linear
from ..fused.gated import RowProducts

_BRANCHES = 2
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    # Of gated delta nets, as many as one launch takes.
    ("in_proj_qkv", "in_proj_z", "in_proj_b"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("a_proj", "b_proj", "g_proj"),
)
"""Names of sibling modules that are applied to the same input."""


@cache
def branch_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Streams for parallel branches of a captured step."""
    return tuple(torch.cuda.Stream(device) for _ in range(_BRANCHES))


def linears(
    inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, concurrent: bool = True
) -> list[Tensor]:
    """`F.linear` of one input by several weights, on CUDA concurrently if asked for."""
    if not (concurrent and inputs.is_cuda):
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


class _Group:
    """Projections of the same input; caches the outputs for the latest input until each has been read."""

    def __init__(self, parts: Sequence[nn.Linear], products: RowProducts, *, concurrent: bool):
        self._concurrent = concurrent
        self.weights = [part.weight for part in parts]
        self.biases = [part.bias for part in parts]
        self._products = products
        self._inputs: Tensor | None = None
        self._version: int | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, inputs: Tensor, part: int) -> Tensor:
        """The output of one projection."""
        version = tensor_version(inputs)
        if inputs is not self._inputs or version != self._version or part not in self._outputs:
            outputs = self._products.linears(inputs, self.weights, self.biases)
            if outputs is None and not self._concurrent:
                return F.linear(inputs, self.weights[part], self.biases[part])
            self._inputs, self._version = inputs, version
            self._outputs = dict(enumerate(outputs or linears(inputs, self.weights, self.biases)))
        output = self._outputs.pop(part)
        if not self._outputs:
            self._inputs = None
        return output


class FusedProjections(TorchFunctionMode):
    """Context in which this thread computes products of few rows by a kernel, and projections of one input together.

    A function mode is thread-local and replaces no module, so passes of other threads are unaffected. Modules that the
    user has compiled keep their products: tracing this code would break their graphs.

    Args:
        model: The model.
        concurrent: Whether projections of one input run concurrently where the kernel does not serve them.
    """

    def __init__(self, model: nn.Module, *, concurrent: bool = True):
        super().__init__()
        self._products = RowProducts()
        groups = (_Group(parts, self._products, concurrent=concurrent) for parts in _groups(model))
        self._parts = {id(weight): (group, part) for group in groups for part, weight in enumerate(group.weights)}

    def __enter__(self) -> Any:
        self._here = self._products.here()
        self._here.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._here.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and not torch.compiler.is_compiling():
            inputs, weight, bias = args if len(args) > 2 else (*args, None)
            group, part = self._parts.get(id(weight), (None, 0))
            if group is not None and bias is group.biases[part]:  # modules that share a weight may not share it
                return group.output(inputs, part)
            if (outputs := self._products.linears(inputs, [weight], [bias])) is not None:
                return outputs[0]
        return func(*args, **(kwargs or {}))


def has_projections(model: nn.Module) -> bool:
    """Whether the model has projections of the same input to compute concurrently."""
    return next(_groups(model), None) is not None


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for parent in model.modules():
        for names in _TOGETHER:
            parts = [part for name in names if is_linear(part := parent._modules.get(name))]
            if len(parts) == len(names):
                yield parts
