"""What passes with shared context need to know of a model, read once per call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.fsdp import is_fsdp_managed_module

from ..attention.interface import RowLengths, active
from ..cache.layout import ModelLayout
from ..parallel.agreement import ALONE, Ranks, Together
from ..parallel.groups import gathers_parameters, splitting_group
from .fused.modules import FusedModules
from .model_walk import ModelWalk


class Structure:
    """A model's configs, layers and modules, which may change between calls.

    Attributes:
        configs: The distinct config objects of the model and its modules, see `attention.interface.active`.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        found = {id(config): config for config in self.walk.attributes("config")}
        self.configs = [config for config in found.values() if isinstance(config, PreTrainedConfig)]

    @cached_property
    def walk(self) -> ModelWalk:
        """The model's modules."""
        return ModelWalk(self._model)

    @cached_property
    def layout(self) -> ModelLayout:
        """What each layer stores; passes over a cache that has met the model do not need it."""
        return ModelLayout.of(self._model, self.walk.modules)

    @cached_property
    def ranks(self) -> Ranks:
        """The processes that compute the model together, each with the same calls."""
        group = splitting_group(self.walk.parameters)
        return ALONE if group is None or self.gathers_parameters else Together(group, self._model.device)

    @property
    def gathers_parameters(self) -> bool:
        """Whether processes hold parts of the parameters, which passes gather; each may have prompts of its own."""
        return bool(is_fsdp_managed_module(self._model)) or gathers_parameters(self.walk.classes)

    @cached_property
    def fused(self) -> FusedModules | None:
        """Modules that run as kernels; None where they would not run: on other devices, or in other dtypes."""
        half = self._model.dtype in (torch.float16, torch.bfloat16)
        return FusedModules(self._model, self.walk.modules) if half and self._model.device.type == "cuda" else None

    def release(self) -> None:
        """Let go of the modules at the end of the call, so that those replaced after it are freed at once."""
        for name in ("walk", "fused"):  # made again for passes after the call
            vars(self).pop(name, None)

    @contextmanager
    def passing(self, lengths: RowLengths) -> Iterator[None]:
        """Context of a forward pass over a shared-context cache, see `attention.interface.active`."""
        with active(self.configs, lengths):
            if self.fused is None:
                yield
            else:
                with self.fused.installed():
                    yield
