"""Kernel tables of decode steps whose nodes and suffixes are divided between processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..attention.forest import Forest
from ..attention.kv import Scoring, SuffixLengths
from ..attention.launch.plan import NO_OWN_NODES, OwnNodes
from ..attention.launch.step_tables import DescribedStep, NewTokens, StepTables
from ..attention.partial import Partial
from .merge import merge_over, partial_buffer
from .sequence import SequenceParallel, window_is_not_divided


class DividedStepTables(StepTables):
    """As `StepTables`, of what this process stores of nodes and suffixes; attention is merged with the others'.

    Args:
        parallel: The processes.
        rows: As for `StepTables`, likewise the others; the forest is what this process stores of the whole one.
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
        super().__init__(rows, layers, forest, device, own_nodes)
        self._parallel = parallel
        # Lengths and new tokens as `forest_decode` reads them, and the lengths of whole suffixes.
        with torch.inference_mode(False):
            self._divided = torch.zeros(4, rows, dtype=torch.int32, device=device)
        self.lengths = self._divided[0]

    @property
    def _kernel_lengths(self) -> Tensor:
        return self._divided[:3]

    def _stored(self, suffixes: SuffixLengths) -> SuffixLengths:
        return self._parallel.stored_suffixes(suffixes)

    def _write_lengths(self, now: DescribedStep) -> None:
        shard, whole = self._parallel.suffix_shard, now.suffixes.per_row
        if whole is None:
            whole = torch.tensor([now.suffixes.longest], dtype=torch.int32, device="cpu")
        first, stop = shard.next_stored(whole)
        table = torch.stack([shard.counts(whole) - now.own_tokens, first, stop, whole])
        rows = self.rows if now.suffixes.per_row is None else len(whole)
        self._divided[:, :rows].copy_(table, non_blocking=True)  # the host need not wait: the copy is staged

    def new_tokens(self) -> NewTokens:
        stored, first, _, whole = self._divided
        return NewTokens(whole.long(), stored.long(), stored + (first == 0))

    def attend(
        self,
        layer: int,
        query: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
        scoring: Scoring,
        origins: Tensor | None = None,
        other: Partial | None = None,
        into: Partial | None = None,
    ) -> Tensor:
        """As `StepTables.attend`, with one collective after all that could raise; without `other` and `into`."""
        if scoring.window is not None:
            raise window_is_not_divided(scoring.window)
        if scoring.sinks is not None and not self._parallel.suffix_shard.counts_sinks:
            scoring = replace(scoring, sinks=None)
        buffer = partial_buffer(query.shape, query.device)
        super().attend(layer, query, new_keys, new_values, scoring, origins, into=buffer.partial)
        return merge_over(self._parallel.group, buffer, query.dtype).out
