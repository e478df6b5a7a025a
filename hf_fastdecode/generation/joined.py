"""Projections of one input as one matrix product, in captured steps.

In a decode step a product takes as long as its weights take to read, plus some microseconds in which the memory is not
busy. Query, key and value projections, and gate and up projections, multiply the same input: joined they begin and end
once. Their weights are moved into one tensor, of which each parameter becomes a view: no memory is added, and whoever
changes a parameter in place changes what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of modules that multiply the same input, where they stand side by side."""


class _Group(NamedTuple):
    """Projections that stand side by side in a module, by their names in it."""

    parent: nn.Module
    parts: dict[str, nn.Linear]

    @property
    def parameters(self) -> list[list[Tensor]]:
        """The parts' weights, and their biases where they have them."""
        weights: list[Tensor] = [part.weight for part in self.parts.values()]
        biases: list[Tensor] = [part.bias for part in self.parts.values() if part.bias is not None]
        return [weights, biases] if biases else [weights]


class _Product:
    """A joined product of the inputs that were given last, until each of its parts has been asked for."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int):
        self.weight, self.bias, self.parts = weight, bias, parts
        # Inputs, output, parts still to ask: replaced as a whole, since other threads may run the layers eagerly.
        self._last: tuple[Tensor, Tensor, int] | None = None

    def of(self, inputs: Tensor) -> Tensor:
        last = self._last
        if last is None or last[0] is not inputs:
            last = inputs, F.linear(inputs, self.weight, self.bias), self.parts
        _, output, left = last
        self._last = (inputs, output, left - 1) if left > 1 else None
        return output


class _Columns(nn.Module):
    """The columns of a joined product that stand for one projection."""

    def __init__(self, product: _Product, start: int, stop: int):
        super().__init__()
        self.product, self.start, self.stop = product, start, stop
        self.weight, self.bias = product.weight, product.bias

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # equal products of a graph become one in `share_products`
            output = F.linear(inputs, self.weight, self.bias)
        else:
            output = self.product.of(inputs)
        return output[..., self.start : self.stop]


def join(layers: Iterable[nn.Module]) -> None:
    """Lay the weights of projections of one input end to end; those that lie so, or in a larger tensor, stay there."""
    for group in _groups(layers):
        for parameters in group.parameters:
            if _joined(parameters) is None and all(map(_owns_its_memory, parameters)):
                whole = torch.cat([parameter.data for parameter in parameters])
                for parameter, place in zip(parameters, whole.split([len(part) for part in parameters]), strict=True):
                    parameter.data = place


def separate(layers: Iterable[nn.Module]) -> None:
    """Give joined weights memory of their own again."""
    for group in _groups(layers):
        for parameters in group.parameters:
            size = sum(parameter.nbytes for parameter in parameters)
            # A larger tensor that they lie in is not of our making.
            if _joined(parameters) is not None and parameters[0].untyped_storage().nbytes() == size:
                for parameter in parameters:
                    parameter.data = parameter.data.clone()


@contextmanager
def multiplying_once(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within, projections whose weights are joined are columns of one product, which is computed once."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for group in _groups(layers):
            weight, *biases = (_joined(parameters) for parameters in group.parameters)
            if weight is None or None in biases:
                continue
            product = _Product(weight, biases[0] if biases else None, len(group.parts))
            start = 0
            for name, part in group.parts.items():
                stop = start + part.out_features
                replaced.append((group.parent, name, part))
                group.parent._modules[name] = _Columns(product, start, stop)
                start = stop
        yield
    finally:
        for parent, name, module in replaced:
            parent._modules[name] = module


def share_products(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for `torch.compile` that computes equal linear products of a graph once, and leaves it to another."""

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        seen: dict[Any, fx.Node] = {}
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target is F.linear:
                first = seen.setdefault((node.args, tuple(node.kwargs.items())), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    module.graph.erase_node(node)
        module.recompile()
        return compile_graph(module, inputs, **options)

    return backend


def _groups(layers: Iterable[nn.Module]) -> Iterator[_Group]:
    for layer in layers:
        for parent in layer.modules():
            for names in _TOGETHER:
                parts = {name: part for name in names if _is_plain(part := parent._modules.get(name))}
                if len(parts) == len(names) and _alike(parts.values()):
                    yield _Group(parent, parts)


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def _alike(parts: Collection[nn.Linear]) -> bool:
    """Whether these take inputs of one size, with biases or without, and their weights can be moved."""
    kinds = {(part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in parts}
    return len(kinds) == 1 and not any(part.weight.is_inference() for part in parts)


def _owns_its_memory(parameter: Tensor) -> bool:
    """Whether it is not part of a larger tensor, such as the flat ones of distributed training."""
    return parameter.untyped_storage().nbytes() == parameter.nbytes


def _joined(parameters: Sequence[Tensor]) -> Tensor | None:
    """The parameters as one tensor, where they lie end to end in one."""
    first, end = parameters[0], parameters[0].storage_offset()
    storage = first.untyped_storage().data_ptr()
    for parameter in parameters:
        lies = parameter.untyped_storage().data_ptr() == storage and parameter.storage_offset() == end
        if not lies or not parameter.is_contiguous():
            return None
        end += parameter.numel()
    rows = sum(len(parameter) for parameter in parameters)
    return first.data.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
