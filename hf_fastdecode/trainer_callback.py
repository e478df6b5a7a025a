"""A callback of transformers' Trainer that enables its model while it trains."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from .api import disable, enable, explain
from .generation.options import Options


class FastDecodeCallback(TrainerCallback):
    """Enables a trainer's model when training begins, and disables it when training ends.

    For programs that take callbacks, but have no place for a line of code. A model that is enabled already keeps its
    options, and stays enabled.

    Args:
        options: Of `hf_fastdecode.enable`.

    Raises:
        ValueError: An option has an invalid value.
    """

    def __init__(self, **options: Any):
        Options(**options)
        self._options, self._enabled = options, False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Enable the model, unless it is."""
        self._enabled = not explain(model).enabled
        if self._enabled:
            enable(model, **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Disable the model if this callback enabled it."""
        if self._enabled:
            disable(model)
            self._enabled = False
