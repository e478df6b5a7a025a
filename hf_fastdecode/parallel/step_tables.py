"""Kernel tables of decode steps whose nodes are divided between processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..attention.forest import Forest
from ..attention.kv import Scoring, SuffixLengths
from ..attention.launch.own_nodes import NO_OWN_NODES, OwnNodes
from ..attention.launch.step_tables import StepTables, StoredKV
from ..attention.partial import Partial
from ..errors import Unsupported
from .merge import merge_over, partial_buffer
from .sequence import SequenceParallel, window_is_not_divided


class DividedStepTables(StepTables):
    """As `StepTables`, where this process stores a part of the nodes, and the suffixes whole.

    Its own tables are those of the suffixes; `nodes_here` has the part of the forest that is stored here.

    Args:
        parallel: The processes.
        rows: As for `StepTables`, likewise the others; the forest is the whole one.
    """

    def __init__(
        self,
        parallel: SequenceParallel,
        rows: int,
        layers: Iterable[int],
        forest: Forest,
        device: torch.device,
        own_nodes: OwnNodes = NO_OWN_NODES,
    ):
        known = list(layers)
        super().__init__(rows, known, parallel.without_nodes(forest), device, own_nodes, with_nodes=False)
        self.nodes_here = StepTables(rows, known, parallel.stored(forest), device)
        self._parallel = parallel

    def fits(self, forest: Forest) -> bool:
        stored, without = self._parallel.stored(forest), self._parallel.without_nodes(forest)
        return self.nodes_here.fits(stored) and super().fits(without)

    def follow(
        self, forest: Forest, suffixes: SuffixLengths, layers: Mapping[int, StoredKV], *, in_order: bool = True
    ) -> None:
        self.nodes_here.follow(self._parallel.stored(forest), SuffixLengths(), layers, in_order=in_order)
        super().follow(self._parallel.without_nodes(forest), suffixes, layers, in_order=in_order)

    def attend(
        self,
        layer: int,
        query: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
        scoring: Scoring,
        origins: Tensor | None = None,
        other: Partial | None = None,
    ) -> Tensor:
        """As `StepTables.attend`, with one collective.

        Raises:
            Unsupported: As there, before the collective.
            RuntimeError: The kernel of the suffixes cannot run here; the other processes may wait for this one.
        """
        if scoring.window is not None:
            raise window_is_not_divided(scoring.window)
        kv_heads = new_keys.shape[1]
        nodes = self.attend_nodes(layer, query, scoring.scale, kv_heads=kv_heads, soft_cap=scoring.softcap)
        try:
            return super().attend(layer, query, new_keys, new_values, scoring, origins, other=nodes)
        except Unsupported as error:
            raise RuntimeError(f"attention to suffixes failed after that to nodes: {error}") from error

    def attend_nodes(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        *,
        kv_heads: int | None = None,
        soft_cap: float | None = None,
        into: Partial | None = None,
    ) -> Partial:
        """As `StepTables.attend_nodes`, over the nodes of all processes, with one collective."""
        buffer = partial_buffer(query.shape, query.device)
        self.nodes_here.attend_nodes(layer, query, scale, kv_heads=kv_heads, soft_cap=soft_cap, into=buffer.partial)
        return merge_over(self._parallel.group, buffer, into)
