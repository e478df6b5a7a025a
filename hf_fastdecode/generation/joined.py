"""Projections of one input as one matrix product, in captured steps.

In a decode step a product takes as long as its weights take to read, plus some microseconds in which the memory is not
busy. Query, key and value projections, and gate and up projections, multiply the same input: joined they begin and end
once. Their weights are moved into one tensor, of which each parameter becomes a view: whoever changes a parameter in
place changes what is multiplied, and no memory is added.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..cache.fingerprint import same_contents

logger = logging.getLogger("hf_fastdecode")

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


class JoinedWeights:
    """Which weights of a model were moved, to move them apart again."""

    def __init__(self) -> None:
        self._moved: list[list[Tensor]] = []
        self._told = 0

    def join(self, layers: Iterable[nn.Module]) -> None:
        """Lay the weights of projections of one input end to end.

        Those that lie so already stay where they are, and so do those whose memory anything else refers to, such as
        another model or a ``state_dict()``, and a group for whose copy there is no memory.
        """
        apart = 0
        for group in _groups(layers):
            for parameters in group.parameters:
                if _joined(parameters) is None and not self._moves(parameters):
                    apart += 1
        if apart and apart != self._told:
            logger.info(
                "%d groups of weights are multiplied apart: other tensors refer to their memory, or there is none to "
                "move them in",
                apart,
            )
        self._told = apart

    def _moves(self, parameters: list[Tensor]) -> bool:
        if not all(map(_owns_its_memory, parameters)):
            return False
        try:
            _move(parameters, joined=True)
        except torch.OutOfMemoryError:
            return False
        self._moved.append(parameters)
        return True

    def separate(self) -> None:
        """Give weights that were moved memory of their own again, unless anything else refers to where they are."""
        while self._moved:
            parameters = self._moved.pop()
            if _joined(parameters) is not None and _tensors_in(parameters[0]) == len(parameters):
                _move(parameters, joined=False)


@torch.inference_mode(False)  # what it made could never be trained
@torch.no_grad()
def _move(parameters: Sequence[Tensor], *, joined: bool) -> None:
    """Move parameters into one tensor, or each into its own."""
    before = [parameter.data for parameter in parameters]
    if joined:
        places = torch.cat(before).split([len(part) for part in before])
    else:
        places = tuple(part.clone() for part in before)
    _settle(before[0])  # other threads' streams may read the new places at once
    with same_contents(parameters):  # kept caches stay valid
        for parameter, place in zip(parameters, places, strict=True):
            parameter.data = place
    _settle(before[0])  # and read the old ones until here


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


class _Product:
    """A joined product of the inputs that were given last, until each of its parts has been asked for."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int):
        self.weight, self.bias = weight, bias
        self._all = frozenset(range(parts))
        # Inputs and their version, output, parts not asked for: replaced as a whole, since other threads may run the
        # layers eagerly.
        self._last: tuple[Tensor, int | None, Tensor, frozenset[int]] | None = None

    def of(self, inputs: Tensor, part: int) -> Tensor:
        version = None if inputs.is_inference() else inputs._version
        last = self._last
        if last is None or last[0] is not inputs or last[1] != version or part not in last[3]:
            last = inputs, version, F.linear(inputs, self.weight, self.bias), self._all
        *_, output, waiting = last
        self._last = (inputs, version, output, waiting - {part}) if len(waiting) > 1 else None
        return output


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _joined_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A joined product, by a name of its own in the graphs of compiled layers."""
    return F.linear(inputs, weight, bias)


class _Columns(nn.Module):
    """The columns of a joined product that stand for one projection, with that one's parameters."""

    def __init__(self, product: _Product, part: int, columns: slice, replaced: nn.Linear):
        super().__init__()
        self._parameters = replaced._parameters  # whoever lists the model's meanwhile finds them
        self.product, self.part, self.start, self.stop = product, part, columns.start, columns.stop

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # `share_products` computes it once
            output = _joined_linear(inputs, self.product.weight, self.product.bias)
        else:
            output = self.product.of(inputs, self.part)
        return output[..., self.start : self.stop]


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
            for index, (name, part) in enumerate(group.parts.items()):
                columns = slice(start, start + part.out_features)
                start = columns.stop
                replaced.append((group.parent, name, part))
                group.parent._modules[name] = _Columns(product, index, columns, part)
        yield
    finally:
        for parent, name, module in replaced:
            parent._modules[name] = module


def share_products(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for `torch.compile` that computes equal joined products of a graph once, and leaves it to another."""

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        seen: dict[Any, fx.Node] = {}
        for node in list(module.graph.nodes):
            if node.target is _joined_linear:
                node.target = F.linear
                first = seen.setdefault((node.args, tuple(node.kwargs.items())), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    module.graph.erase_node(node)
            elif _changes_in_place(node):
                seen.clear()
        module.recompile()
        return compile_graph(module, inputs, **options)

    return backend


def _changes_in_place(node: fx.Node) -> bool:
    """Whether a node of a traced graph writes to its arguments, by the names that PyTorch gives what does."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = getattr(node.target, "__module__", None) == operator.setitem.__module__ and name.startswith("i")
    return node.op.startswith("call") and (in_place or augmented or name == "setitem" or "out" in node.kwargs)


def _groups(layers: Iterable[nn.Module]) -> Iterator[_Group]:
    for layer in layers:
        for parent in layer.modules():
            for names in _TOGETHER:
                parts = {name: part for name in names if _is_plain(part := parent._modules.get(name))}
                if len(parts) == len(names) and len(set(map(_kind, parts.values()))) == 1:
                    yield _Group(parent, parts)


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer that computes what it is known for, from parameters that can be moved."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    own = [parameter for parameter in (module.weight, module.bias) if parameter is not None]
    # Tensors of other classes, such as those of distributed or quantized weights, keep their memory elsewhere.
    return all(type(parameter.data) is Tensor and not parameter.is_inference() for parameter in own)


def _kind(part: nn.Linear) -> tuple[Any, ...]:
    return part.in_features, part.weight.dtype, part.weight.device, part.bias is None


def _owns_its_memory(parameter: Tensor) -> bool:
    """Whether it is no part of a larger tensor, and no other tensor or process refers to its memory."""
    alone = parameter.untyped_storage().nbytes() == parameter.nbytes and _tensors_in(parameter) == 1
    return alone and (parameter.is_cuda or not parameter.is_shared())


def _tensors_in(tensor: Tensor) -> int:
    """How many tensors refer to a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # less the handle made here


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
