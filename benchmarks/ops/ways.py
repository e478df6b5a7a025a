"""The ways of doing an operator case, as data: ours, its parts, and the baselines."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hf_fastdecode.attention.kv import Scoring, SuffixLengths
from hf_fastdecode.attention.launch.plan import NO_OWN_NODES, HeadShape, choose_own_nodes, own_nodes_dominate
from hf_fastdecode.attention.launch.step_tables import StepTables
from hf_fastdecode.attention.torch_operators import decode_ops
from hf_fastdecode.kernels.forest_decode.limits import refusal

from .baselines import TwoCalls, attend_to_copies, bifurcated
from .cases import OpCase
from .inputs import OpInputs
from .library_ways import cascade_calls, decode_calls, fasttree_calls, fasttree_refusal, flashinfer_refusal


class Unmerged(Protocol):
    """Output of a kernel of a part, before the merge."""

    def result(self) -> Tensor:
        """The merged output: ``[rows, heads, 1, head_dim]``."""


Call = Callable[[], Tensor | Unmerged]
"""Attends to one set of inputs: ``[rows, heads, 1, head_dim]``, or what a part of that leaves to be merged."""


_INSTALL = {
    "Triton": "pip install triton",
    "FlashInfer": "pip install 'flashinfer-python>=0.7.2,<0.8'",
    "FastTree": "put kernel_bench of github.com/PanZaifeng/FastTree-Artifact on $PYTHONPATH",
}

# Below, cuDNN is not tried over prefixes: planning takes it up to a second for each shape.
_CUDNN_QUERIES = 512


@dataclass(frozen=True)
class OpWay:
    """One way.

    `variants` makes calls, one for each set of inputs, by the name of the variant; the fastest variant counts.
    `refusal` says why the way is not for a case, `part` which part of a case it does.
    """

    variants: Callable[[Sequence[OpInputs]], Mapping[str, Sequence[Call]]]
    refusal: Callable[[OpCase], str | None] = lambda case: None
    part: Callable[[OpCase], OpCase] = lambda case: case
    yardstick: str = "fused"  # whose error bounds its own; "eager" for ways that store scores in the case's dtype
    copies: bool = False  # needs a copy of the context for each row
    library: str | None = None  # "Triton", "FlashInfer" or "FastTree", whose kernels run on CUDA only

    def not_run(self, case: OpCase, device: torch.device) -> str | None:
        """Why the way cannot do a case on a device, or None."""
        if self.library and device.type != "cuda":
            return f"it is a {self.library} kernel for CUDA devices, got {device.type!r}; choose other ways here"
        if self.library and importlib.util.find_spec(self.library.lower()) is None:
            return f"it is a {self.library} kernel; {_INSTALL[self.library]}"
        return self.refusal(case)


def _ours(sets: Sequence[OpInputs]) -> dict[str, list[Call]]:
    """The kernels or operators that the package itself chooses."""
    if _kernels_are_chosen(sets[0]):
        return {"kernels" if _in_turn(sets[0]) else "kernels, suffixes beside nodes": kernel_calls(sets)}
    return {"operators": [_operators(inputs) for inputs in sets]}


def _ours_over_nodes(sets: Sequence[OpInputs]) -> dict[str, list[Call]]:
    """The first launch of what the package runs; where that is PyTorch's operators, all of it."""
    if not _kernels_are_chosen(sets[0]):
        return _ours(sets)
    from .kernel_ways import NodeKernel

    return {"kernel": [NodeKernel(inputs).attend for inputs in sets]}


def _kernels_are_chosen(inputs: OpInputs) -> bool:
    stored = [inputs.segment.keys, inputs.suffix.keys]
    return inputs.query.is_cuda and refusal(inputs.query, *inputs.new, stored) is None


def kernel_calls(sets: Sequence[OpInputs], *, own_nodes: bool = True) -> list[Call]:
    """This package's kernels, which write new tokens too; with `own_nodes`, long suffixes are attended to as nodes."""
    first, case, device = sets[0], sets[0].case, sets[0].query.device
    dominate = own_nodes_dominate(first.forest, case.suffix - 1)
    scoring = Scoring(first.scale)
    shape = HeadShape.of(first.query, first.new.keys, scoring)
    chosen = choose_own_nodes(case.rows, shape, device, dominate=dominate) if own_nodes else NO_OWN_NODES
    tables = StepTables(case.rows, range(len(sets)), first.forest, device, chosen)
    before, stored = SuffixLengths.of(case.suffix - 1), dict(enumerate(sets))  # each set as a layer
    tables.follow(first.forest, before, stored)

    calls: list[Call] = [partial(tables.attend, at, one.query, *one.new, scoring) for at, one in stored.items()]
    if chosen.used:
        calls[0]()  # own nodes begin once the head layout is known
        tables.follow(first.forest, before, stored)
    return calls


def _operators(inputs: OpInputs) -> Call:
    """PyTorch's operators over the forest, which the package runs where its kernels are not faster."""
    last = [part[:, :, -1:] for part in inputs.suffix]

    def call() -> Tensor:
        for place, new in zip(last, inputs.new, strict=True):
            place.copy_(new)
        return decode_ops.forest_attention(inputs.query, inputs.kv, inputs.scale).out.to(inputs.query.dtype)

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
    return [partial(attend, one.query, one.levels(), one.suffix, one.scale) for one in sets]


def _bifurcated(sets: Sequence[OpInputs], attend: Callable[..., Tensor] = bifurcated) -> list[Call]:
    return [partial(attend, one.query, one.segment, one.suffix, one.scale) for one in sets]


def _compiled(sets: Sequence[OpInputs]) -> dict[str, list[Call]]:
    torch.compiler.reset()  # else it gives up after a few shapes
    return {"compiled": _bifurcated(sets, torch.compile(bifurcated, dynamic=False))}


def _in_turn(inputs: OpInputs) -> bool:
    """Whether suffixes are attended to after the nodes, as the cost model has it."""
    from .kernel_ways import plan_of

    plan = plan_of(inputs)
    return plan.programs(inputs.case.suffix - 1) == plan.grid


def _sketch(sets: Sequence[OpInputs], *, context_only: bool = False) -> dict[str, list[Call]]:
    from .kernel_ways import Sketch  # needs Triton

    found: dict[int, tuple[str, list[Call]]] = {}
    for programs in (132, 264):
        sketches = [Sketch(inputs, programs) for inputs in sets]
        calls: list[Call] = [one.attend_context if context_only else one.attend for one in sketches]
        found.setdefault(sketches[0].splits, (f"{programs} programs", calls))
    return dict(found.values())


def _sketched(case: OpCase) -> str | None:
    if case.dtype == "float32":
        return "it takes float16 and bfloat16, got float32"  # Triton multiplies that in tf32
    return _one_context(case) if case.nodes else None


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
    "flashinfer-decode": OpWay(decode_calls, flashinfer_refusal, library="FlashInfer"),
    "flashinfer-cascade": OpWay(
        cascade_calls, lambda case: flashinfer_refusal(case) or _has_nodes(case), library="FlashInfer"
    ),
    "fasttree": OpWay(fasttree_calls, fasttree_refusal, library="FastTree"),
    "sketch": OpWay(_sketch, _sketched, library="Triton"),
    "without-own-nodes": OpWay(lambda sets: {"kernels": kernel_calls(sets, own_nodes=False)}, library="Triton"),
    "ours-prefix": OpWay(_ours_over_nodes, _has_nodes, part=lambda case: case.prefix_only),
    "sketch-prefix": OpWay(
        partial(_sketch, context_only=True),
        lambda case: _sketched(case) or _one_context(case),
        part=lambda case: case.prefix_only,
        library="Triton",
    ),
    "ours-suffix": OpWay(_ours, part=lambda case: case.suffix_only),
    "sketch-suffix": OpWay(
        _sketch, lambda case: _sketched(case.suffix_only), part=lambda case: case.suffix_only, library="Triton"
    ),
}
