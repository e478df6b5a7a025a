"""What a model consists of: read once per call, since walking all modules takes as long as a step of some layers."""

from __future__ import annotations

from functools import cached_property

from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.layout import ModelLayout


class Structure:
    """What passes with shared context need to know of a model.

    Args:
        model: The model as it is now; its modules may change between calls.

    Attributes:
        configs: The distinct config objects of the model and its modules, see `attention.interface.active`.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        self.configs = [config for config in found.values() if isinstance(config, PreTrainedConfig)]

    @cached_property
    def layout(self) -> ModelLayout:
        """What each layer stores; passes over a cache that has met the model do not need it."""
        return ModelLayout.of(self._model)
