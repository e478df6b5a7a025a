"""Convert a decoder's attentions: each is measured on its own, but plan ``e`` is for all cross-attentions or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hf_fastdecode.patches.slim_layers import CROSS_PLANS, PLANS, SELF_PLANS

from ....patches.layers.encoder_decoder import EncoderDecoder
from ...fit.cache_errors import CacheErrors
from ..plan_choice import AUTO, PlanChoice, PlanError
from ..slim_layer import ConvertedLayer, convert_layer
from .calibration_pass import Recorded

_IN_TURNS: Final = {"x": (("x", 0), ("e", 0)), "e": (("k", 0), ("e", 0))}
"""Plans for all layers that differ between self-attention and cross-attention."""


class AttentionPlans:
    """Converts the attentions of a decoder one by one.

    Args:
        family: Of the model.
        config: Of the ordinary model.
        choice: Of caches.
        recorded: What attentions see.
        own: Gives the tensors of an attention, on the CPU, by their names below it, of its index.

    Raises:
        PlanError: An attention cannot have what is asked for, or some layers' cross-attention shall read the encoder's
            output and others shall not.
    """

    def __init__(
        self,
        family: EncoderDecoder,
        config: Any,
        choice: PlanChoice,
        recorded: Recorded,
        own: Callable[[int], Mapping[str, Tensor]],
    ) -> None:
        self.family, self.config, self.recorded, self.own = family, config, recorded, own
        self.count = len(family.attentions(config))
        self.choice = choice
        if choice.plan in _IN_TURNS:
            self.choice = replace(choice, plan=_IN_TURNS[choice.plan] * (self.count // 2))
        self.cross_plans = CROSS_PLANS if self._reads_encoder() else PLANS

    def convert(self, index: int) -> ConvertedLayer:
        """Measure an attention, choose and round.

        Raises:
            ValueError: As `convert_layer`.
        """
        cross = index % 2 == 1
        return convert_layer(
            self.family.weights(self.config, self.own(index)),
            self.recorded.inputs[index],
            None,
            self.choice,
            index,
            self.count,
            encoded=self.recorded.encoded if cross else None,
            score_bias=None if cross else self.recorded.score_bias,
            plans=self.cross_plans if cross else SELF_PLANS,
        )

    def _reads_encoder(self) -> bool:
        """Whether cross-attention has plan ``e``, or may have: where every layer is accurate enough with it."""
        crosses = range(1, self.count, 2)
        asked = [self.choice.of_layer(index, self.count, CROSS_PLANS)[0] for index in crosses]
        if "e" in asked and set(asked) != {"e"}:
            raise PlanError(
                "cross-attention reads the encoder's output in all layers or in none (plan 'e'), got "
                f"{', '.join(asked)}; plan 'e' for all of them"
            )
        return "e" in asked or (AUTO in asked and all(self._accurate(index) for index in crosses))

    def _accurate(self, index: int) -> bool:
        """Whether cross-attention is accurate enough with plan ``e``; not where its range does not suffice."""
        weights = self.family.weights(self.config, self.own(index))
        errors = CacheErrors(weights, self.recorded.inputs[index], self._judged(), causal=False)
        dtype: torch.dtype = weights.key.dtype
        bound = self.choice.tolerance * errors.ordinary(dtype).output_error
        try:
            return errors.of_inputs(dtype).output_error <= bound
        except ValueError:
            return False

    def _judged(self) -> Tensor:
        """The second half of the encoder's tokens, as `fit_layer` takes it."""
        return self.recorded.encoded[len(self.recorded.encoded) // 2 :]
