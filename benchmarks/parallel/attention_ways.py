"""The ways of attention over a context that is divided between processes.

All of them attend to what they hold by the same kernels (on a CPU PyTorch's operators). They differ in what they
communicate, and in the suffixes, which every rank has whole: but for the package's own way by kernels, which divides
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Partial, Scoring, Segment, SuffixLengths, merge
from hf_fastdecode.attention.launch.step_tables import StepTables
from hf_fastdecode.attention.torch_operators import decode_ops
from hf_fastdecode.attention.torch_operators.decode_ops import nodes_attention
from hf_fastdecode.kernels.device import interpreted, triton_is_installed
from hf_fastdecode.parallel.sequence import DividedStepTables, SequenceParallel, partial_buffer

from ..ops.cases import NodeSpec, OpCase
from ..ops.inputs import OpInputs
from .cases import SUFFIX, AttentionCase
from .processes import Processes

Step = Callable[[], list[Tensor]]
"""Attends in every layer once: ``[rows, heads, 1, head_dim]`` each."""


class ByKernels:
    """Attention to what this process holds, by the package's kernels.

    Args:
        forest: What is stored here of the context.
        buffers: ``[2, kv_heads, tokens, head_dim]`` each: further capacity for as many nodes.
    """

    def __init__(self, stack: Stack, forest: Forest, buffers: list[Tensor]):
        self._stack, rows, device = stack, stack.case.rows, stack.queries.device
        layers = dict(enumerate([*stack.layers, *(StoredLayer(one, stack.layers[0].suffix) for one in buffers)]))
        self._nodes = StepTables(rows, layers, forest, device)
        self._nodes.follow(forest, SuffixLengths(), layers)
        without = Forest(rows)
        self._suffixes = StepTables(rows, layers, without, device)
        self._suffixes.follow(without, SuffixLengths.of(SUFFIX), layers)

    def nodes(self, held: int, query: Tensor) -> Partial:
        """To the nodes that a layer, or a buffer after the layers, holds: fp32."""
        case = self._stack.case
        return self._nodes.attend_nodes(held, query, self._stack.scoring.scale, kv_heads=case.kv_heads)

    def finish(self, layer: int, nodes: Partial) -> Tensor:
        """To a layer's suffixes, merged with what was found of its nodes."""
        stack, query = self._stack, self._stack.queries[layer]
        own = Partial(*map(torch.empty_like, nodes))
        self._suffixes.attend(layer, query, *stack.new(layer), stack.scoring, into=own)
        return merge(own, nodes).out.to(query.dtype)


class ByOperators:
    """By PyTorch's operators, where there are no kernels; arguments as for `ByKernels`."""

    def __init__(self, stack: Stack, forest: Forest, buffers: list[Tensor]):
        self._stack, self._forest = stack, forest
        self._held = [layer.held for layer in stack.layers] + buffers

    def nodes(self, held: int, query: Tensor) -> Partial:
        keys, values = self._held[held]
        segments = {0: Segment(keys, values)}
        return nodes_attention(query, self._forest, segments, self._stack.scoring.scale, backend="auto")

    def finish(self, layer: int, nodes: Partial) -> Tensor:
        stack, query = self._stack, self._stack.queries[layer]
        kv = ForestKV(Forest(stack.case.rows), {}, stack.layers[layer].suffix, SUFFIX + 1)
        own = decode_ops.forest_attention(query, kv, stack.scoring.scale)
        return merge(own, nodes).out.to(query.dtype)


def make_step(way: str, stack: Stack, processes: Processes) -> Step:
    """A function that attends in every layer, a way's; all processes make it, `one-gpu` on rank 0 alone."""
    device, layers = stack.queries.device, range(stack.case.layers)
    kernels = triton_is_installed() and (device.type == "cuda" or interpreted())
    here = ByKernels if kernels else ByOperators
    if way == "one-gpu":
        if kernels:
            return _by_tables(stack, StepTables(stack.case.rows, layers, stack.forest, device), stack)
        alone = here(stack, stack.forest, [])
        return lambda: [alone.finish(layer, alone.nodes(layer, stack.queries[layer])) for layer in layers]
    parallel = SequenceParallel(processes.group)
    stored = parallel.stored(stack.forest, {})
    if way == "tree" and kernels:
        divided = replace(stack, forest=stored, layers=[_divided(one, parallel) for one in stack.layers])
        return _by_tables(divided, DividedStepTables(parallel, stack.case.rows, layers, stored, device), stack)
    if way == "ring":
        return Ring(here, stack, stored, processes).step
    merged: dict[str, Callable[[Partial], Partial]] = {
        "tree": parallel.merge,
        "three-all-reduces": lambda own: three_all_reduces(own, processes),
        "ring-partials": lambda own: ring_partials(own, processes),
        "no-communication": lambda own: own,
    }
    own, merging = here(stack, stored, []), merged[way]
    return lambda: [own.finish(layer, merging(own.nodes(layer, stack.queries[layer]))) for layer in layers]


def _divided(layer: StoredLayer, parallel: SequenceParallel) -> StoredLayer:
    """The layer with what this process stores of its suffixes."""
    places = parallel.suffix_shard.stored_tokens(0, SUFFIX + 1).to(layer.held.device)
    return StoredLayer(layer.held, Segment._make(part.index_select(2, places) for part in layer.suffix))


def _by_tables(stored: Stack, tables: StepTables, stack: Stack) -> Step:
    """The package's own step, over the tokens stored here; new tokens are those of the whole stack."""
    tables.follow(stored.forest, SuffixLengths.of(SUFFIX), dict(enumerate(stored.layers)))

    def step() -> list[Tensor]:
        layers = range(len(stored.layers))  # which the tables have addresses of
        return [tables.attend(one, stack.queries[one], *stack.new(one), stack.scoring) for one in layers]

    return step


def three_all_reduces(own: Partial, processes: Processes) -> Partial:
    """Merges the partials of all ranks as the paper does (algorithm 3, lines 3 to 6)."""
    largest = own.lse.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=processes.group)
    denominator = (own.lse - largest).exp()
    numerator = own.out * denominator[..., None]
    dist.all_reduce(numerator, group=processes.group)
    dist.all_reduce(denominator, group=processes.group)
    return Partial(numerator / denominator[..., None], largest + denominator.log())


def ring_partials(own: Partial, processes: Processes) -> Partial:
    """Merges the partials of all ranks while they are passed round, one hop after the other."""
    shape, device = own.out.shape, own.out.device
    sent, merged = partial_buffer(shape, device, own.out.dtype), own
    sent.partial.out.copy_(own.out)
    sent.partial.lse.copy_(own.lse)
    for _ in range(processes.count - 1):
        received = partial_buffer(shape, device, own.out.dtype)
        pass_on(sent.flat, received.flat, processes)()
        merged = merge(merged, received.partial)
        sent = received
    return merged


class Ring:
    """Ring attention: keys and values go round, into one of two buffers while those before them are attended to."""

    def __init__(self, here: type[ByKernels] | type[ByOperators], stack: Stack, forest: Forest, processes: Processes):
        self._stack, self._processes = stack, processes
        self._buffers = [torch.empty_like(stack.layers[0].held) for _ in range(min(2, processes.count - 1))]
        self._here = here(stack, forest, self._buffers)

    def step(self) -> list[Tensor]:
        return [self._here.finish(layer, self._nodes(layer)) for layer in range(self._stack.case.layers)]

    def _nodes(self, layer: int) -> Partial:
        query, layers = self._stack.queries[layer], self._stack.case.layers
        held, merged = layer, None
        for hop in range(self._processes.count):
            if hop + 1 < self._processes.count:
                sent = self._stack.layers[layer].held if hop == 0 else self._buffers[held - layers]
                wait = pass_on(sent, self._buffers[hop % 2], self._processes)
            part = self._here.nodes(held, query)
            merged = part if merged is None else merge(merged, part)
            if hop + 1 < self._processes.count:
                wait()
                held = layers + hop % 2
        assert merged is not None
        return merged


def pass_on(sent: Tensor, received: Tensor, processes: Processes) -> Callable[[], object]:
    """Begin to send to the next rank and to receive from the one before; the result waits for both."""
    after, before = ((processes.rank + by) % processes.count for by in (1, -1))
    operations = [
        dist.P2POp(dist.isend, sent, after, group=processes.group),
        dist.P2POp(dist.irecv, received, before, group=processes.group),
    ]
    works = dist.batch_isend_irecv(operations)
    return lambda: [work.wait() for work in works]


@dataclass(frozen=True)
class StoredLayer:
    """Keys and values of one layer, as `StepTables` takes them."""

    held: Tensor  # [2, kv_heads, tokens, head_dim]: those of the nodes
    suffix: Segment  # [rows, kv_heads, SUFFIX + 1, head_dim] each; the last token is the new one

    @property
    def segments(self) -> dict[int, Segment]:
        return {0: Segment(self.held[0], self.held[1])}

    @property
    def version(self) -> object:
        return self.held


@dataclass(frozen=True)
class Stack:
    """The layers of a case."""

    case: AttentionCase
    forest: Forest  # the whole context, one node over all rows
    layers: list[StoredLayer]  # what is stored here
    queries: Tensor  # [layers, rows, heads, 1, head_dim]

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.case.head_dim**-0.5)

    def new(self, layer: int) -> Segment:
        """Keys and values of a layer's new tokens, ``[rows, kv_heads, 1, head_dim]`` each."""
        return Segment._make(part[:, :, -1:] for part in self.layers[layer].suffix)


def make_stack(case: AttentionCase, device: torch.device, rank: int | None) -> Stack:
    """The layers as a rank stores them, or with the whole context of each where `rank` is None."""
    layers, queries = [], []
    for layer in range(case.layers):
        held = _whole(case, device, layer) if rank is None else _part(case, device, layer, rank)
        query, suffix = _own(case, device, layer)
        layers.append(StoredLayer(held, suffix))
        queries.append(query)
    forest = Forest(case.rows, [Node(Span(0, 0, case.context), 0, case.rows, 0)])
    return Stack(case, forest, layers, torch.stack(queries))


def first_layer(case: AttentionCase, device: torch.device) -> OpInputs:
    """The first layer with the whole context, as the oracle takes it."""
    stack = make_stack(replace(case, layers=1), device, None)
    nodes, heads = (NodeSpec(case.context, 0, case.rows),), (case.heads, case.kv_heads, case.head_dim)
    op = OpCase("first layer", case.rows, nodes, SUFFIX + 1, *heads, case.dtype)
    (layer,) = stack.layers
    return OpInputs(op, stack.forest, layer.segments[0], layer.suffix, stack.queries[0], stack.new(0))


def _whole(case: AttentionCase, device: torch.device, layer: int) -> Tensor:
    return torch.cat([_part(case, device, layer, rank) for rank in range(case.ranks)], 2)


def _part(case: AttentionCase, device: torch.device, layer: int, rank: int) -> Tensor:
    seed, shape = 1 + layer * case.ranks + rank, (2, case.kv_heads, case.tokens_here, case.head_dim)
    return _normal(case, torch.Generator(device).manual_seed(seed), *shape)


def _own(case: AttentionCase, device: torch.device, layer: int) -> tuple[Tensor, Segment]:
    generator = torch.Generator(device).manual_seed(1_000_003 + layer)
    query = _normal(case, generator, case.rows, case.heads, 1, case.head_dim)
    shape = case.rows, case.kv_heads, SUFFIX + 1, case.head_dim
    return query, Segment(*(_normal(case, generator, *shape) for _ in range(2)))


def _normal(case: AttentionCase, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=getattr(torch, case.dtype))
