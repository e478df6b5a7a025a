"""A decode step: one token of every row through the model, eagerly or by a captured graph."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.shared import SharedContextCache
from .capture import Captures, bucket


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

    def select(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        ...

    def worthwhile(self, rows: int) -> bool:
        """Whether a batch that has shrunk to this many rows should be selected."""
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
        output = self.model(
            input_ids=ids, position_ids=positions, past_key_values=self.cache, return_dict=True, **self.arguments
        )
        return output.logits[:, -1]

    def select(self, rows: list[int]) -> None:
        self.cache.select_rows(rows)

    def worthwhile(self, rows: int) -> bool:
        return rows <= 3 * self.cache.rows // 4


class CapturedSteps:
    """Steps by captured graphs, one for each bucket of rows."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        arguments: dict[str, Any],
        captures: Captures,
        configs: list[PreTrainedConfig],
        *,
        compiled: bool,
    ):
        self.model, self.cache, self.arguments = model, cache, arguments
        self.captures, self.configs, self.compiled = captures, configs, compiled
        self._find()

    def _find(self) -> None:
        self.cache.reserve(self.cache.suffix_length + 1)
        self._step = self.captures.find(self.model, self.cache, self.configs, self.arguments, compiled=self.compiled)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self.cache.reserve(self.cache.suffix_length + 1):
            self._step.load_suffixes(self.cache)
        logits = self._step(ids, positions)
        self.cache.wrote(ids[:, None])
        return logits

    def select(self, rows: list[int]) -> None:
        self.cache.select_rows(rows)
        self._find()

    def worthwhile(self, rows: int) -> bool:
        return bucket(rows) < self._step.rows
