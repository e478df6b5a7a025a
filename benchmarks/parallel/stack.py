"""Inputs of attention cases: keys and values of a layer stack, the part that this process stores or all of them.

What any rank stores is drawn from a seed of its layer and rank, so that rank 0 can make the whole of a layer for the
check without a communication. (In which order the tokens of a node are stored changes nothing here.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import Scoring, Segment

from ..ops.cases import NodeSpec, OpCase
from ..ops.inputs import OpInputs
from .cases import SUFFIX, AttentionCase


@dataclass(frozen=True)
class StoredLayer:
    """Keys and values of one layer, as `StepTables` takes them.

    Attributes:
        held: ``[2, kv_heads, tokens, head_dim]``: those of the nodes.
        suffix: ``[rows, kv_heads, SUFFIX + 1, head_dim]`` each; the last token is the new one.
    """

    held: Tensor
    suffix: Segment

    @property
    def segments(self) -> dict[int, Segment]:
        """Storage of the nodes."""
        return {0: Segment(self.held[0], self.held[1])}

    @property
    def version(self) -> object:
        """The version of the storage, which does not move."""
        return self.held


@dataclass(frozen=True)
class Stack:
    """The layers of a case.

    Attributes:
        forest: The whole context, one node over all rows.
        layers: What is stored here.
        queries: ``[layers, rows, heads, 1, head_dim]``.
    """

    case: AttentionCase
    forest: Forest
    layers: list[StoredLayer]
    queries: Tensor

    @property
    def scoring(self) -> Scoring:
        """Score options."""
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
    held = _whole(case, device, 0)
    query, suffix = _own(case, device, 0)
    nodes, heads = (NodeSpec(case.context, 0, case.rows),), (case.heads, case.kv_heads, case.head_dim)
    op = OpCase("first layer", case.rows, nodes, SUFFIX + 1, *heads, case.dtype)
    forest = Forest(case.rows, [Node(Span(0, 0, case.context), 0, case.rows, 0)])
    new = Segment._make(part[:, :, -1:] for part in suffix)
    return OpInputs(op, forest, Segment(held[0], held[1]), suffix, query, new)


def _whole(case: AttentionCase, device: torch.device, layer: int) -> Tensor:
    return torch.cat([_part(case, device, layer, rank) for rank in range(case.ranks)], 2)


def _part(case: AttentionCase, device: torch.device, layer: int, rank: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1 + layer * case.ranks + rank)
    shape = 2, case.kv_heads, case.tokens_here, case.head_dim
    return torch.randn(*shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))


def _own(case: AttentionCase, device: torch.device, layer: int) -> tuple[Tensor, Segment]:
    """A layer's queries and suffixes, which every rank has."""
    generator = torch.Generator(device).manual_seed(1_000_003 + layer)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))

    query = normal(case.rows, case.heads, 1, case.head_dim)
    keys, values = (normal(case.rows, case.kv_heads, SUFFIX + 1, case.head_dim) for _ in range(2))
    return query, Segment(keys, values)
