"""A callback of transformers' Trainer that enables its model while it trains."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import nn
from transformers import TrainerCallback

from .api import disable, enable, explain
from .generation.options import Options


class FastDecodeCallback(TrainerCallback):
    """Enables a trainer's model when training begins, and disables it when training ends.

    For programs that take callbacks, but have no place for a line of code. A model that is enabled already keeps its
    options, and stays enabled.

    Args:
        options: Keyword arguments of `hf_fastdecode.enable`.

    Raises:
        ValueError: An option has an invalid value.
    """

    def __init__(self, **options: Any):
        Options(**options)
        self._options = options
        self._enabled: ref[nn.Module] | None = None  # also after training that an error ended

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if not explain(model).enabled:
            self._enabled = ref(enable(model, **self._options))

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self._enabled is not None and self._enabled() is model:
            disable(model)
            self._enabled = None
