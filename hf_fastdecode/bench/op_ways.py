"""The ways of doing an operator case, as data: ours, its parts, and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import torch_ops, triton_ops
from ..attention.dispatch import KERNELS, Heads
from ..attention.scoring import Scoring
from .baselines import TwoCalls, attend_to_copies, bifurcated
from .op_cases import OpCase
from .op_inputs import OpInputs

Call = Callable[[], Tensor]
"""Attends to one set of inputs: ``[rows, heads, 1, head_dim]``."""

# Below, cuDNN is not tried over prefixes: planning takes it up to a second for each shape.
_CUDNN_QUERIES = 512


@dataclass(frozen=True)
class OpWay:
    """One way.

    Attributes:
        variants: Makes calls, one for each set of inputs, by the name of the variant; the fastest variant counts.
        refusal: Why the way is not for a case, or None.
        part: The part of the case that the way does.
        yardstick: Whose error bounds its own: ``fused``, or ``eager`` for ways that store scores in the case's dtype.
        copies: Whether it needs a copy of the context for each row.
    """

    variants: Callable[[Sequence[OpInputs]], dict[str, list[Call]]]
    refusal: Callable[[OpCase], str | None] = lambda case: None
    part: Callable[[OpCase], OpCase] = lambda case: case
    yardstick: str = "fused"
    copies: bool = False


def _ours(sets: Sequence[OpInputs]) -> dict[str, list[Call]]:
    """What the package itself would run."""
    case, query = sets[0].case, sets[0].query
    refusal = triton_ops.refusal(query, *sets[0].new, [sets[0].segment.keys, sets[0].suffix.keys])
    if refusal is None and query.is_cuda:
        heads = Heads(case.heads, case.kv_heads, case.head_dim, itemsize=query.element_size())
        if triton_ops.ForestTables().choice(sets[0].forest, heads, query.device).name == KERNELS:
            return {"kernels": kernel_calls(sets)}
    return {"operators": [_operators(inputs) for inputs in sets]}


def kernel_calls(sets: Sequence[OpInputs]) -> list[Call]:
    """This package's kernels, which write the new token's keys and values too. The one place that knows their API."""
    tables = triton_ops.ForestTables()

    def call(inputs: OpInputs) -> Call:
        nodes = triton_ops.NodeTable(inputs.forest, [inputs.segment], inputs.query.device)
        suffix, before = triton_ops.SuffixTable(inputs.suffix), inputs.case.suffix - 1
        scoring = Scoring(inputs.scale)
        return lambda: tables.attend(inputs.query, *inputs.new, nodes, suffix, before, scoring)

    return [call(inputs) for inputs in sets]


def _operators(inputs: OpInputs) -> Call:
    """What the package runs where its kernels are not the faster ones: PyTorch's operators over the forest."""
    last = [part[:, :, -1:] for part in inputs.suffix]

    def call() -> Tensor:
        for place, new in zip(last, inputs.new, strict=True):
            place.copy_(new)
        return torch_ops.forest_attention(inputs.query, inputs.kv, inputs.scale).out.to(inputs.query.dtype)

    return call


def _recipe(sets: Sequence[OpInputs]) -> dict[str, list[Call]]:
    """Packed query heads over the prefix by flash, and by cuDNN where it has a chance; flash over suffixes; merged."""
    case, query = sets[0].case, sets[0].query
    widest = max((node.row_count for node in case.nodes), default=0) * case.heads // case.kv_heads
    operators = ["flash"]
    if query.device.type == "cuda" and widest >= _CUDNN_QUERIES and case.head_dim <= 128:
        operators.append("cudnn")
    return {operator: _two_calls(sets, TwoCalls(operator, pack=True)) for operator in operators}


def _two_calls(sets: Sequence[OpInputs], attend: TwoCalls) -> list[Call]:
    def call(inputs: OpInputs) -> Call:
        levels = inputs.levels()
        return lambda: attend(inputs.query, levels, inputs.suffix, inputs.scale)

    return [call(inputs) for inputs in sets]


def _bifurcated(sets: Sequence[OpInputs], attend: Callable[..., Tensor] = bifurcated) -> list[Call]:
    def call(inputs: OpInputs) -> Call:
        return lambda: attend(inputs.query, inputs.segment, inputs.suffix, inputs.scale)

    return [call(inputs) for inputs in sets]


def _compiled(sets: Sequence[OpInputs]) -> dict[str, list[Call]]:
    torch.compiler.reset()  # else it gives up after a few shapes
    return {"compiled": _bifurcated(sets, torch.compile(bifurcated, dynamic=False))}


def _one_context(case: OpCase) -> str | None:
    return None if len(case.nodes) == 1 else "defined for one shared context only"


def _has_nodes(case: OpCase) -> str | None:
    return None if case.nodes else "the case has no nodes"


# The parts come last: their inputs take the place of the case's.
OP_WAYS: dict[str, OpWay] = {
    "ours": OpWay(_ours),
    "plain": OpWay(lambda sets: {"flash": [attend_to_copies(inputs) for inputs in sets]}, copies=True),
    "recipe": OpWay(_recipe),
    "hydragen": OpWay(lambda sets: {"flash": _two_calls(sets, TwoCalls("flash", pack=False))}),
    "bifurcated": OpWay(lambda sets: {"eager": _bifurcated(sets)}, _one_context, yardstick="eager"),
    "bifurcated-compiled": OpWay(_compiled, _one_context, yardstick="eager"),
    "ours-prefix": OpWay(_ours, _has_nodes, part=lambda case: case.prefix_only),
    "ours-suffix": OpWay(_ours, part=lambda case: case.suffix_only),
}
