"""Attention of steps to nodes whose latents were expanded (`latent.ExpandedNodes`): eager, and captured."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...attention.forest import Forest
from ...attention.kv import Scoring, SuffixLengths
from ...attention.launch.plan import NO_OWN_NODES, HeadShape
from ...attention.launch.step_tables import Alike, RestTables, StepTables, TablesByShape
from ...attention.partial import Partial, merge
from ...attention.placeholders import ExpandedKV
from ...attention.torch_operators.decode_ops import nodes_attention
from ...errors import Unsupported
from ...kernels.forest_decode.limits import refusal
from ..state import MadeTables, SharedState
from .latent import ExpandedLayer, ExpandedNodes, Widths, as_wide


class EagerExpandedKV(ExpandedKV):
    """Those of an eager step, of which there is at least one."""

    def __init__(self, state: SharedState, index: int, forest: Forest, nodes: ExpandedLayer):
        self.state, self.index, self.forest, self.nodes = state, index, forest, nodes

    def attend(self, query: Tensor, scoring: Scoring, own: Partial) -> Tensor:
        if self._by_kernels(query):
            try:
                return _attend(self._tables(query), self.index, query, self.nodes.widths, scoring, own)
            except Unsupported:  # a kernel failed
                pass
        nodes, softcap, backend = self.nodes.whole, scoring.softcap, self.state.torch_backend
        part = nodes_attention(query, self.forest, nodes, scoring.scale, softcap=softcap, backend=backend)
        return merge(Partial(own.out.to(part.out.dtype), own.lse), part).out.to(query.dtype)

    def _by_kernels(self, query: Tensor) -> bool:
        backend = self.state.backend
        if backend != "triton" and not (backend == "auto" and query.device.type == "cuda"):
            return False
        stored = [part for segment in self.nodes.segments.values() for part in segment]
        taken = self.nodes.widths.as_kernels_take(query)
        keys = taken[..., : self.nodes.widths.stored]
        return refusal(taken, keys, keys, stored) is None

    def _tables(self, query: Tensor) -> StepTables:
        """The tables of layers like this one, made anew when they no longer suit the batch."""
        state, forest, device = self.state, self.forest, query.device
        shape = expanded_shape(self.nodes.heads, self.nodes.widths)
        known = state.tables.get((device, shape))
        if known is None or known.tables.rows != forest.rows or not known.tables.fits(forest):
            made = RestTables(shape.rest, forest.rows, [self.index], forest, device, NO_OWN_NODES)
            known = state.tables[device, shape] = MadeTables(made, False)
        known.tables.follow(forest, SuffixLengths(), {self.index: self.nodes})
        return known.tables


class CapturedExpandedKV(ExpandedKV):
    """Those of a captured step, which finds them by tables."""

    def __init__(self, tables: StepTables, index: int, widths: Widths):
        self.tables, self.index, self.widths = tables, index, widths

    def attend(self, query: Tensor, scoring: Scoring, own: Partial) -> Tensor:
        return _attend(self.tables, self.index, query, self.widths, scoring, own)


class ExpandedTables:
    """Tables of a captured step for the expanded nodes of every layer.

    Attributes:
        alike: What layers have in common, by index.
    """

    def __init__(self, rows: int, nodes: ExpandedNodes, forest: Forest, device: torch.device):
        self.alike = _alike(nodes)
        self._widths = {index: layer.widths for index, layer in nodes.layers.items()}
        rest = next(iter(self._widths.values())).rotated
        self._tables = TablesByShape(rows, self.alike, forest, device, partial(RestTables, rest))

    @classmethod
    def of(cls, rows: int, state: SharedState, device: torch.device) -> ExpandedTables | None:
        """Tables for the expanded nodes of a batch; None if it has none."""
        nodes, forest = state.expanded, state.expanded_forest
        return None if nodes is None or forest is None else cls(rows, nodes, forest, device)

    def layer(self, index: int) -> CapturedExpandedKV:
        """What a layer of the step attends to."""
        return CapturedExpandedKV(self._tables.of(index), index, self._widths[index])

    def fits(self, state: SharedState) -> bool:
        """Whether the batch has such nodes, which fit the tables."""
        return (forest := state.expanded_forest) is not None and self._tables.fits(forest)

    def follow(self, state: SharedState) -> None:
        """Describe a batch, for which `fits` holds."""
        assert state.expanded is not None
        assert state.expanded_forest is not None
        self._tables.follow(state.expanded_forest, SuffixLengths(), state.expanded.layers)


def alike_expanded(state: SharedState) -> dict[int, Alike] | None:
    """What the layers of a batch's `ExpandedTables` would have in common; None for a batch without."""
    nodes, forest = state.expanded, state.expanded_forest
    return None if nodes is None or forest is None else _alike(nodes)


def _alike(nodes: ExpandedNodes) -> dict[int, Alike]:
    return {
        index: Alike(expanded_shape(layer.heads, layer.widths), NO_OWN_NODES) for index, layer in nodes.layers.items()
    }


def expanded_shape(heads: int, widths: Widths) -> HeadShape:
    """The shape of these nodes' heads, for a query of each row."""
    return HeadShape(heads, 1, widths.stored, False, rest=widths.rotated)


def _attend(tables: StepTables, index: int, query: Tensor, widths: Widths, scoring: Scoring, own: Partial) -> Tensor:
    other = Partial(as_wide(own.out, widths.stored).contiguous(), own.lse)
    taken = widths.as_kernels_take(query)
    out, _ = tables.attend_nodes(index, taken, scoring.scale, soft_cap=scoring.softcap, other=other)
    return out[..., : widths.value]
