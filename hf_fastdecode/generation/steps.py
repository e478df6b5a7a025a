"""A decode step: one token of every row through the model, eagerly or by a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.shared import SharedContextCache
from .capture import Captures, bucket
from .passes import forward_pass

_STEPS_OF_A_CAPTURE = 8
"""About what one capture in the middle of a call costs, in steps of 128 rows (H200, 8B: 80 ms); of more rows less."""


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

    def worthwhile(self, rows: int, steps_left: int) -> bool:
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

    def worthwhile(self, rows: int, steps_left: int) -> bool:
        return rows <= 3 * self.cache.rows // 4


class CapturedSteps:
    """Steps by captured graphs, one for each bucket of rows.

    Args:
        model: The model.
        cache: The batch.
        arguments: What its forward takes beside tokens, positions and cache.
        captures: The model's captured steps.
        configs: Its config objects.
        remake: Makes the steps of a batch that has become smaller.
        compiled: Compile the layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        arguments: dict[str, Any],
        captures: Captures,
        configs: list[PreTrainedConfig],
        remake: Callable[[SharedContextCache], Steps],
        *,
        compiled: bool,
    ):
        self.cache = cache
        self._has = partial(captures.has, arguments=arguments, compiled=compiled)
        self._remake = remake
        cache.reserve(cache.suffix_length + 1)
        self._step = captures.find(model, cache, configs, arguments, compiled=compiled)
        for layer in cache.layers:
            did = f"{len(cache.forest.nodes)} node(s) and {cache.rows} suffixes by triton, captured"
            layer.ran["decode"] = did + layer.said

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self.cache.reserve(self.cache.suffix_length + 1):
            self._step.load_suffixes(self.cache)
        logits = self._step(ids, positions)
        self.cache.wrote(ids[:, None])
        return logits

    def select(self, rows: list[int]) -> Steps:
        self.cache.select_rows(rows)
        return self._remake(self.cache)

    def worthwhile(self, rows: int, steps_left: int) -> bool:
        now, then = self._step.rows, bucket(rows)
        if then >= now or self._has(then):
            return then < now
        # A step takes about as long as one of 256 more rows takes by arithmetic alone (H200, 7B).
        return steps_left * (now - then) / (now + 256) > _STEPS_OF_A_CAPTURE
