"""Step runners: one token of every row through the model, eagerly or by a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from ...attention.forest import Path
from ...attention.launch import plan as own_nodes
from ...cache.shared import SharedContextCache
from ...log import logger
from ...parallel.ranks import ALONE, Ranks
from ..forward_pass import forward_pass
from ..structure import Structure
from .capture_failures import Failure
from .captured_step import CaptureOptions, bucket
from .captures import LONG_COMPLETIONS, Captures

_STEPS_OF_A_CAPTURE = 8
"""Approximate cost of a capture within a call, in steps of 128 rows (H200, 8B: 80 ms)."""

_STEPS_THAT_PAY_A_RECAPTURE = 512
"""Steps with launch parameters for own nodes that save a capture's 80 ms (H200: 0.3 to 0.7 ms each)."""

_ROWS_OF_A_STEP = 256
"""Fixed cost of a step, in rows of arithmetic (H200, 7B)."""


class Steps(Protocol):
    """Runs the decode steps of one batch."""

    cache: SharedContextCache

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append a token to each row.

        Args:
            ids: ``[rows]`` int64.
            positions: ``[rows]`` int64.

        Returns:
            ``[rows, vocabulary]`` in the model's dtype; the next step may overwrite it.
        """
        ...

    def select(self, rows: list[int]) -> Steps:
        """Compact the batch to these rows and return the runner for it.

        Raises `NoRoomError` on all processes of the model where memory of one does not suffice for the copies.
        """
        ...

    def restart(self, paths: Mapping[int, Path], order: list[int] | None = None) -> Steps:
        """Begin rows anew behind their paths, by row, and return the runner for the batch.

        Args:
            order: When given, row ``i`` then becomes row ``order[i]``, for rows of one path to be neighbours.
        """
        ...

    def should_compact(self, rows: int, steps_left: int) -> bool:
        """Whether to compact to `rows` active rows, with at most `steps_left` steps to go."""
        ...


class EagerSteps:
    """Runs steps by the model's eager forward pass.

    Args:
        arguments: Model arguments beyond tokens, positions and cache.
        ranks: The processes that compute the model together.
    """

    def __init__(
        self, model: PreTrainedModel, cache: SharedContextCache, arguments: dict[str, Any], ranks: Ranks = ALONE
    ):
        self.model, self.cache, self.arguments, self.ranks = model, cache, arguments, ranks

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.feed(ids[:, None], positions[:, None])

    def feed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append several tokens ``[rows, tokens]`` per row; returns the logits after the last one."""
        device = self.model.device
        if device.type != "meta" and ids.device != device:  # prompts may be on the CPU
            ids, positions = ids.to(device), positions.to(device)
        output = forward_pass(self.model, self.cache, positions, input_ids=ids, return_dict=True, **self.arguments)
        return output.logits[:, -1]

    def select(self, rows: list[int]) -> Steps:
        with self.ranks.together():
            self.cache.select_rows(rows)
        return self

    def restart(self, paths: Mapping[int, Path], order: list[int] | None = None) -> Steps:
        self.cache.restart_rows(paths)
        return self if order is None else self.select(order)

    def should_compact(self, rows: int, steps_left: int) -> bool:
        return rows <= 3 * self.cache.rows // 4


class CapturedSteps:
    """Runs steps by captured graphs, one per bucket of rows.

    Args:
        arguments: Model arguments beyond tokens, positions and cache.
        remake: Creates the runner of a batch that was compacted, or whose storage moved. For a compacted batch that
            cannot be captured, it returns the given larger runner if that can go on.
        fused_rows: Maximum rows for which projections of the same input run concurrently.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        arguments: dict[str, Any],
        captures: Captures,
        structure: Structure,
        remake: Callable[[SharedContextCache, CapturedSteps | None], Steps],
        *,
        fused_rows: int,
    ):
        self.cache = cache
        self._model, self._structure, self._captures, self._remake = model, structure, captures, remake
        self._options = CaptureOptions(fused_rows, tuple(sorted(arguments.items())))
        self._oversized = False
        self._instead: Steps | None = None  # where a capture in mid-call failed
        with structure.ranks.together():
            cache.reserve(cache.suffix_length + 1)
        self._step = captures.find(model, cache, structure, self._options)
        report_captured(cache, structure)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self._instead is None:
            self.cache.reserve(self.cache.suffix_length + 1)
            if not self._step.reads(self.cache):
                self._follow_storage()
        if self._instead is not None:
            return self._instead(ids, positions)
        if self.cache.suffix_length % own_nodes.STEP == 0 and self._should_recapture():
            self._recapture()
        logits = self._step(self.cache, ids, positions)
        self.cache.record_captured_step(ids[:, None])
        return logits

    def _should_recapture(self) -> bool:
        """Whether a capture with launch parameters for long completions saves more time than it costs."""
        if self._oversized or self._step.suits(self.cache):
            return False
        if (self.cache.state.max_suffix or 0) - self.cache.suffix_length < _STEPS_THAT_PAY_A_RECAPTURE:
            return False
        # A process forgets failures when it has more free memory than it had then.
        return self._structure.ranks.all(LONG_COMPLETIONS not in self._captures.failures) == [True]

    def _recapture(self) -> None:
        """Capture again; where that fails, go on with this capture."""
        try:
            self._step = self._captures.find(self._model, self.cache, self._structure, self._options)
        except Exception as error:
            reason = Failure.of(error).reason
            self._captures.failures[LONG_COMPLETIONS] = reason
            logger.info("steps for long completions cannot be captured (%s); the captured ones go on", reason)

    def _follow_storage(self) -> None:
        """Capture again after suffixes that were captured in place have moved."""
        made = self._remake(self.cache, None)
        if isinstance(made, CapturedSteps):
            self._step = made._step
        else:
            self._instead = made

    def select(self, rows: list[int]) -> Steps:
        if self._instead is not None:
            return self._instead.select(rows)
        with self._structure.ranks.together():
            self.cache.select_rows(rows)
        return self._remake(self.cache, self)

    def restart(self, paths: Mapping[int, Path], order: list[int] | None = None) -> Steps:
        if self._instead is not None:
            return self._instead.restart(paths, order)
        self.cache.restart_rows(paths)
        if order is not None:
            self.cache.select_rows(order)
        # Suffixes that were captured in place and have moved are followed by the next step.
        return self if self._step.holds(self.cache) else self._remake(self.cache, self)

    def run_with_fewer_rows(self) -> bool:
        """Keep this larger capture for a compacted batch that cannot be captured; whether it fits on all processes."""
        if self._structure.ranks.all(self._step.fits(self.cache)) == [False]:
            return False
        self._oversized = True
        return True

    def should_compact(self, rows: int, steps_left: int) -> bool:
        if self._instead is not None:
            return self._instead.should_compact(rows, steps_left)
        known = self._captures.sizes(self._options, own_dominate=self._step.tables.own_nodes_dominate)
        pay = switch_saves_time(self._step.rows, bucket(rows), steps_left, known)
        return pay and not self._oversized


def report_captured(cache: SharedContextCache, structure: Structure) -> None:
    """Report the operators of a captured step for each layer."""
    for layer in cache.attention_layers:
        nodes, own = f"{len(cache.step_forest.nodes)} node(s)", structure.layout.own.get(layer.index)
        did = f"{nodes} and {cache.rows} suffixes by triton, captured"
        if own is not None:
            did = f"{nodes} by triton, {own.suffixes_read}, captured"
        layer.report("decode", did)
        layer.ran_for = None  # an eager step reports anew


def switch_saves_time(current: int, smaller: int, steps_left: int, known: Set[int]) -> bool:
    """Whether switching to a smaller captured step saves more time than its capture costs.

    Args:
        current: Rows of the current captured step.
        smaller: Rows of the smaller one.
        steps_left: Maximum remaining steps.
        known: Sizes already captured.
    """
    if smaller >= current or smaller in known:
        return smaller < current
    return steps_left * (current - smaller) > _STEPS_OF_A_CAPTURE * (128 + _ROWS_OF_A_STEP)
