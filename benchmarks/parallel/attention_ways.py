"""The ways of attention over a context that is divided between processes.

All of them attend to what they hold by the same kernels (on a CPU PyTorch's operators). They differ in what they
communicate, and in the suffixes, which every rank has whole: but for the package's own way by kernels, which divides
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_fastdecode.attention.forest import Forest
from hf_fastdecode.attention.kv import ForestKV, Segment, SuffixLengths
from hf_fastdecode.attention.launch.step_tables import StepTables
from hf_fastdecode.attention.partial import Partial, merge
from hf_fastdecode.attention.torch_operators import decode_ops
from hf_fastdecode.attention.torch_operators.decode_ops import nodes_attention
from hf_fastdecode.kernels.device import interpreted, triton_is_installed
from hf_fastdecode.parallel.sequence import DividedStepTables, SequenceParallel, partial_buffer

from .cases import SUFFIX
from .processes import Processes
from .stack import Stack, StoredLayer

Step = Callable[[], list[Tensor]]
"""Attends in every layer once: ``[rows, heads, 1, head_dim]`` each."""


class Here(Protocol):
    """Attention to what this process holds."""

    def nodes(self, held: int, query: Tensor) -> Partial:
        """To the nodes that a layer, or a buffer behind the layers, holds: fp32."""
        ...

    def finish(self, layer: int, nodes: Partial) -> Tensor:
        """To a layer's suffixes, merged with what was found of its nodes."""
        ...


class ByKernels:
    """By the package's kernels.

    Args:
        forest: What is stored here of the context.
        buffers: ``[2, kv_heads, tokens, head_dim]`` each: further places for as many nodes.
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
        case = self._stack.case
        return self._nodes.attend_nodes(held, query, self._stack.scoring.scale, kv_heads=case.kv_heads)

    def finish(self, layer: int, nodes: Partial) -> Tensor:
        stack = self._stack
        return self._suffixes.attend(layer, stack.queries[layer], *stack.new(layer), stack.scoring, other=nodes)


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
    """What the package itself runs in a step, on what is stored here; new tokens are those of the whole stack."""
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
        """Attend in every layer."""
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


def pass_on(sent: Tensor, received: Tensor, processes: Processes) -> Callable[[], None]:
    """Begin to send to the next rank and to receive from the one before; the result waits for both."""
    after, before = ((processes.rank + by) % processes.count for by in (1, -1))
    operations = [
        dist.P2POp(dist.isend, sent, after, group=processes.group),
        dist.P2POp(dist.irecv, received, before, group=processes.group),
    ]
    works = dist.batch_isend_irecv(operations)

    def wait() -> None:
        for work in works:
            work.wait()

    return wait
