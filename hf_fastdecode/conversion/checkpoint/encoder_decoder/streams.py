"""Groups of tensors of a converted checkpoint: one of all that is outside the decoder's attentions, then one for each.

The ordinary model is loaded whole, in the dtype of the result, for the calibration pass: every layer of the decoder
needs the encoder's output. Its tensors are then read, converted and written attention by attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....patches.layers.encoder_decoder import EncoderDecoder
from ..families.configs import full_config, slim_config, untied
from ..plan_choice import PlanChoice
from ..slim_layer import config_entries, matrix_dtype
from ..source import Checkpoint
from ..to_slim_stream import cast
from .attention_plans import AttentionPlans
from .calibration_pass import record
from .tensors import full_tensors


class DecoderGroups:
    """Base class of both directions: names, prefixes, and tensors outside the attentions.

    Args:
        source: A checkpoint.
        family: Of its config.
        dtype: Of the result.
    """

    def __init__(self, source: Checkpoint, family: EncoderDecoder, dtype: torch.dtype) -> None:
        self.source, self.family, self.dtype = source, family, dtype
        self.prefixes = family.attentions(source.config)
        with torch.device("meta"):
            model = family.auto.from_config(source.config)
        self.names = set(model.state_dict()) & source.names()

    def __len__(self) -> int:
        return len(self.prefixes) + 1

    def carried(self) -> dict[str, Tensor]:
        """Nothing: a resumed conversion makes the calibration pass again."""
        return {}

    def resume(self, carried: dict[str, Tensor]) -> None:
        """Nothing was carried."""

    def outside(self) -> dict[str, Tensor]:
        """Tensors that are of no attention, cast; those that repeat another one are not stored twice."""
        names = sorted(name for name in self.names if not name.startswith(tuple(self.prefixes)))
        return {
            name: cast(name, self.source.tensor(name), self.dtype) for name in names if not self.source.repeats(name)
        }

    def own(self, index: int) -> dict[str, Tensor]:
        """Tensors of an attention, as stored."""
        return {
            name.removeprefix(self.prefixes[index]): self.source.tensor(name)
            for name in sorted(self.names)
            if name.startswith(self.prefixes[index])
        }


class SlimDecoderStream(DecoderGroups):
    """The groups of a slim checkpoint.

    Args:
        source: An ordinary checkpoint.
        family: Of its config.
        choice: Of caches.
        dtype: Of the slim model.
        inputs: Of the calibration pass.
    """

    def __init__(
        self,
        source: Checkpoint,
        family: EncoderDecoder,
        choice: PlanChoice,
        dtype: torch.dtype,
        inputs: dict[str, Tensor],
    ) -> None:
        super().__init__(source, family, dtype)
        self.choice, self.inputs = choice, inputs
        self.plans: AttentionPlans | None = None

    def group(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """The tensors of a group, and the report of an attention.

        Raises:
            ValueError: The attention cannot have what is asked for.
        """
        if index == 0:
            return self.outside(), None
        if self.plans is None:
            self.plans = self._measure()
        converted = self.plans.convert(index - 1)
        made = converted.attention(self._cast(index - 1), self.family.projection("v"))
        return {self.prefixes[index - 1] + name: one for name, one in made.items()}, converted.report()

    def finished(self, reports: list[Any]) -> Any:
        """The slim model's config, from the reports of all groups."""
        entries = config_entries(reports[1:])
        matrices = matrix_dtype(self.dtype)
        made = slim_config(self.family, self.source.config, entries, self.dtype, matrices, self.choice.rope)
        return untied(made) if self.source.unties() else made

    def _measure(self) -> AttentionPlans:
        model = self.family.auto.from_pretrained(self.source.folder, config=self.source.config, dtype=self.dtype)
        recorded = record(model, self.family, self.inputs)
        return AttentionPlans(self.family, self.source.config, self.choice, recorded, self._cast)

    def _cast(self, index: int) -> dict[str, Tensor]:
        return {name: cast(self.prefixes[index] + name, one, self.dtype) for name, one in self.own(index).items()}


class FullDecoderStream(DecoderGroups):
    """The groups of an ordinary checkpoint.

    Args:
        source: A slim checkpoint.
        model_type: Of ordinary models.
        family: Of them.
        dtype: Of the ordinary model.
    """

    def __init__(self, source: Checkpoint, model_type: str, family: EncoderDecoder, dtype: torch.dtype) -> None:
        super().__init__(source, family, dtype)
        self.model_type = model_type
        self.known = source.layer_reports(len(self.prefixes))

    def group(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """The tensors of a group, and the report of an attention."""
        if index == 0:
            return self.outside(), None
        layer = self.source.config.layer_plans[index - 1]
        made = full_tensors(self.family, self.own(index - 1), self.dtype)
        error = self.known[index - 1].get("recovered_error") if layer.plan in ("k", "k+r") else 0.0
        tensors = {self.prefixes[index - 1] + name: one for name, one in made.items()}
        return tensors, {**layer.to_dict(), "recovered_error": error}

    def finished(self, reports: list[Any]) -> Any:
        """The ordinary model's config."""
        made = full_config(self.family, self.source.config, self.model_type, self.dtype)
        return untied(made) if self.source.unties() else made
