"""A decode step: one token of every row through the model, eagerly or by a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...cache.shared import SharedContextCache
from ..forward_pass import forward_pass
from .cuda_graph import Captures, How, bucket

_STEPS_OF_A_CAPTURE = 8
"""About what a capture in the middle of a call costs, in steps of 128 rows (H200, 8B: 80 ms)."""

_STEPS_OF_A_COMPILATION = 800
"""The same where layers are compiled for it (H200, 8B: 5 s)."""

_ROWS_OF_A_STEP = 256
"""A step takes about as long as so many more rows take by arithmetic alone (H200, 7B)."""


class Steps(Protocol):
    """Runs the decode steps of one batch, and keeps its cache."""

    cache: SharedContextCache

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append a token to each row.

        Args:
            ids: ``[rows]`` int64.
            positions: ``[rows]`` int64.

        Returns:
            ``[rows, vocabulary]`` in the model's dtype, which the next step may overwrite.
        """
        ...

    def select(self, rows: list[int]) -> Steps:
        """What goes on with these rows only."""
        ...

    def should_compact(self, rows: int, steps_left: int) -> bool:
        """Whether a batch that has shrunk to this many rows should be selected, for at most so many steps."""
        ...


class EagerSteps:
    """Steps by the model's own forward pass, operation by operation."""

    def __init__(self, model: PreTrainedModel, cache: SharedContextCache, arguments: dict[str, Any]):
        self.model, self.cache, self.arguments = model, cache, arguments

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.feed(ids[:, None], positions[:, None])

    def feed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append several tokens ``[rows, tokens]`` to each row; the logits behind the last one."""
        device = self.model.device
        if device.type != "meta" and ids.device != device:  # prompts may stay on the CPU
            ids, positions = ids.to(device), positions.to(device)
        output = forward_pass(
            self.model,
            input_ids=ids,
            position_ids=positions,
            past_key_values=self.cache,
            return_dict=True,
            **self.arguments,
        )
        return output.logits[:, -1]

    def select(self, rows: list[int]) -> Steps:
        self.cache.select_rows(rows)
        return self

    def should_compact(self, rows: int, steps_left: int) -> bool:
        return rows <= 3 * self.cache.rows // 4


class CapturedSteps:
    """Steps by captured graphs, one for each bucket of rows.

    Args:
        model: The model.
        cache: The batch.
        arguments: What its forward takes beside tokens, positions and cache.
        captures: The model's captured steps.
        configs: Its config objects.
        remake: Makes the steps of a batch that has become smaller, or hands back those of more rows that it is given.
        compiled: Compile the layers.
        fused_rows: Most rows of a step that computes projections of one input concurrently.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        arguments: dict[str, Any],
        captures: Captures,
        configs: list[PreTrainedConfig],
        remake: Callable[[SharedContextCache, CapturedSteps], Steps],
        *,
        compiled: bool,
        fused_rows: int,
    ):
        self.cache = cache
        self._captures, self._remake = captures, remake
        self._how = How(compiled, fused_rows, tuple(sorted(arguments.items())))
        self._oversized = False
        cache.reserve(cache.suffix_length + 1)
        self._step = captures.find(model, cache, configs, self._how)
        for layer in cache.layers:
            did = f"{len(cache.forest.nodes)} node(s) and {cache.rows} suffixes by triton, captured"
            layer.ran["decode"] = did + layer.stored.report_suffix

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self.cache.reserve(self.cache.suffix_length + 1):
            self._step.load_suffixes(self.cache)
        logits = self._step(ids, positions)
        self.cache.wrote(ids[:, None])
        return logits

    def select(self, rows: list[int]) -> Steps:
        self.cache.select_rows(rows)
        return self._remake(self.cache, self)

    def run_with_fewer_rows(self) -> bool:
        """Run fewer rows by the steps of more to the end, since theirs cannot be captured; whether these can."""
        if not self._step.fits(self.cache):
            return False
        self._step.load(self.cache)
        self._oversized = True
        return True

    def should_compact(self, rows: int, steps_left: int) -> bool:
        known = self._captures.sizes(self._how)
        pay = switch_saves_time(self._step.rows, bucket(rows), steps_left, known, compiled=self._how.compiled)
        return pay and not self._oversized


def switch_saves_time(now: int, then: int, steps_left: int, known: Set[int], *, compiled: bool) -> bool:
    """Whether steps of another size save more time than it takes to have them.

    Args:
        now: Rows of the captured steps.
        then: Rows of those that would take their place.
        steps_left: Steps that are left at most.
        known: Sizes that were captured before.
        compiled: Whether the layers are compiled. They are for the first size, for the second, now for any number of
            rows, and for one row.
    """
    if then >= now or then in known:
        return then < now
    compiles = compiled and (then == 1 or len(known - {1}) < 2)
    cost = _STEPS_OF_A_COMPILATION if compiles else _STEPS_OF_A_CAPTURE
    return steps_left * (now - then) > cost * (128 + _ROWS_OF_A_STEP)
