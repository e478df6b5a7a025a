"""What a model consists of: read once per call, since walking all modules takes as long as a step of some layers."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.layout import ModelLayout


class Structure(NamedTuple):
    """What passes with shared context need to know of a model.

    Attributes:
        configs: The distinct config objects of the model and its modules, see `attention.interface.active`.
        layout: What each layer stores.
    """

    configs: list[PreTrainedConfig]
    layout: ModelLayout

    @classmethod
    def of(cls, model: PreTrainedModel) -> Structure:
        """Read them from the model as it is now; its modules may change between calls."""
        found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        configs = [config for config in found.values() if isinstance(config, PreTrainedConfig)]
        return cls(configs, ModelLayout.of(model))
