"""Convert attention layers one by one: measure each on its calibration inputs, choose its cache, round its matrices.

The layers come from a checkpoint or from a loaded model, through one function; all that is decided is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from hf_fastdecode.patches.slim_layers import CROSS_PLANS, PLANS, SELF_PLANS, SlimLayer

from ...patches.layers.family import EncoderDecoder, Family
from ..fit.cache_errors import CacheError, CacheErrors, relative_error
from ..fit.layer_plan import RANK_SHARES, LayerPlan, fit_layer, in_eight_bits
from ..fit.rope import Rotation
from ..fit.rounding import matrix_dtype
from ..fit.stored_coordinates import StoredValueCoordinates, cached_and_read, check_range, store_value_coordinates
from ..fit.value_coordinates import ValueCoordinates
from ..fit.weights import AttentionWeights, bias_or_zero, value_constant
from .calibration import CalibrationInputs
from .plan_choice import AUTO, PlanChoice, PlanError, pick

_IN_TURNS: Final = {"x": (("x", 0), ("e", 0)), "e": (("k", 0), ("e", 0))}
"""Plans for all layers of an encoder-decoder that differ between self-attention and cross-attention."""


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer of a slim model: all measured caches, and the chosen one, with its error and as an entry for the config.

    Attributes:
        tensors: Tensors of the slim attention, by their names below it.
        recovered_error: Relative error of ``W_V`` as `recover_values` returns it, in the model's dtype; else 0.
    """

    plan: LayerPlan
    chosen: CacheError
    entry: SlimLayer
    tensors: dict[str, Tensor]
    recovered_error: float = 0.0

    def report(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **self.entry.to_dict(),
            "dtype": self.chosen.dtype,
            "bytes_per_token": self.chosen.bytes_per_token,
            "value_error": self.chosen.value_error,
            "output_error": self.chosen.output_error,
            "recovered_error": self.recovered_error,
            "measured": self.plan.to_dict(),
        }


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names have a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def config_entries(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries of a slim config, from the `ConvertedLayer.report` of each layer."""
    fields = SlimLayer.__dataclass_fields__
    return [{name: one[name] for name in fields if name in one} for one in reports]


class LayerConverter:
    """Converts the attentions of a model one by one, with the config of the ordinary language model.

    `source` gives an attention of the ordinary model, by its index: its tensors by their names below it, on any device
    and in the dtype of the slim model, and its calibration inputs. Attentions of a decoder-only model are asked for
    once, in order; cross-attentions of an encoder-decoder also before.
    """

    def __init__(
        self,
        family: Family | EncoderDecoder,
        config: Any,
        choice: PlanChoice,
        source: Callable[[int], tuple[Mapping[str, Tensor], CalibrationInputs]],
    ) -> None:
        self.family, self.config, self.source = family, config, source
        self.count = len(family.attentions(config))
        self.choice = choice
        if isinstance(family, EncoderDecoder) and choice.plan in _IN_TURNS:
            self.choice = replace(choice, plan=_IN_TURNS[str(choice.plan)] * (self.count // 2))

    def convert(self, index: int) -> ConvertedLayer:
        """Measure, choose and round.

        Raises:
            PlanError: The attention cannot have the plan that was asked for, or some layers' cross-attention is asked
                to read the encoder's output and others' is not.
            ValueError: The text is too short or not finite.
        """
        own, seen = self.source(index)
        plain = self.family.plain(self.config, own)
        weights = self._weights(plain, index)
        rotation = self.family.rotation(self.config, len(seen.inputs))
        plans = self._plans[index % len(self._plans)]
        choice, model_dtype = self.choice, weights.key.dtype
        asked = choice.of_layer(index, self.count, plans)
        plan, statistics = fit_layer(
            weights,
            seen.inputs,
            seen.encoded,
            rotation=rotation,
            causal=seen.encoded is None,
            score_bias=seen.score_bias,
            model_dtype=model_dtype,
            cache_dtype=choice.wider,
            eight_bits=choice.eight_bits,
            tolerance=choice.tolerance,
            unrotate=choice.rope == "unrotate",
            rank_shares=RANK_SHARES if asked[0] == AUTO else (),
            ranks=(asked[1],),
        )
        chosen = pick(plan, asked, index, plans)
        if chosen.plan == "kv":
            return ConvertedLayer(plan, chosen, SlimLayer("kv"), dict(own))
        cache_dtype = chosen.dtype if in_eight_bits(chosen) else None
        if chosen.plan not in ("k", "k+r"):
            return ConvertedLayer(plan, chosen, SlimLayer(chosen.plan, cache_dtype=cache_dtype), plain)
        stored = store_value_coordinates(
            weights, statistics[chosen.dtype], chosen.rank, matrix_dtype=matrix_dtype(model_dtype)
        )
        exact = stored.double()
        recovered = weights.W_K @ exact.from_keys + exact.from_inputs @ exact.directions
        recovered_error = relative_error(recovered.to(model_dtype).double(), weights.W_V)
        key_inputs = seen.inputs if seen.encoded is None else seen.encoded
        fits = _fits_float16(weights, exact, key_inputs, rotation if choice.rope == "unrotate" else None)
        entry = SlimLayer(chosen.plan, chosen.rank, fits, chosen.dtype if choice.wider else cache_dtype)
        value = f"{self.family.projection('v')}."
        tensors = {name: one for name, one in plain.items() if not name.startswith(value)} | _slim_tensors(stored)
        return ConvertedLayer(plan, chosen, entry, tensors, recovered_error)

    def _weights(self, plain: Mapping[str, Tensor], index: int) -> AttentionWeights:
        return self.family.weights(self.config, {name: one.cpu() for name, one in plain.items()}, index)

    @cached_property
    def _plans(self) -> tuple[Sequence[str], ...]:
        """Plans that attentions can have, in turns."""
        if isinstance(self.family, Family):
            return (self.family.plans,)
        return SELF_PLANS, CROSS_PLANS if self._reads_encoder() else PLANS

    def _reads_encoder(self) -> bool:
        """Whether cross-attention has plan ``e``, which is for all layers or none, or may have it.

        With ``auto`` it may where it is accurate enough in every layer.
        """
        crosses = range(1, self.count, 2)
        asked = [self.choice.of_layer(index, self.count, CROSS_PLANS)[0] for index in crosses]
        if "e" in asked and set(asked) != {"e"}:
            raise PlanError(
                "cross-attention reads the encoder's output in all layers or in none (plan 'e'), got "
                f"{', '.join(asked)}; plan 'e' for all of them"
            )
        return "e" in asked or (AUTO in asked and all(map(self._accurate_from_encoder, crosses)))

    def _accurate_from_encoder(self, index: int) -> bool:
        """Whether a cross-attention is accurate enough with plan ``e``, on the half of the text that plans judge."""
        own, seen = self.source(index)
        assert seen.encoded is not None
        weights = self._weights(self.family.plain(self.config, own), index)
        errors = CacheErrors(weights, seen.inputs, seen.encoded[len(seen.encoded) // 2 :], causal=False)
        dtype = weights.key.dtype
        bound = self.choice.tolerance * errors.ordinary(dtype).output_error
        try:
            return errors.of_inputs(dtype).output_error <= bound
        except ValueError:  # the encoder's output exceeds the dtype's range
            return False


def recover_values(key: Tensor, key_bias: Tensor | None, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """An ordinary layer's value projection ``W_V = W_K M + W_E B``, ``[e_v, d]``, and its bias ``[e_v]``, in fp64.

    Of the key projection, ``[e, d]`` and ``[e]`` or None, and the tensors of the slim attention, by their names below
    it. The bias is 0, apart from rounding, where the layer had none.
    """

    def matrix(name: str, shape: tuple[int, int]) -> Tensor:
        if f"slim.{name}.values" not in tensors:
            return torch.zeros(shape, dtype=torch.float64)
        return tensors[f"slim.{name}.values"].double() * tensors[f"slim.{name}.scales"].double()

    W_K, constant = key.double().mT, tensors["slim.constant"].double()
    from_keys = matrix("from_keys", (W_K.shape[1], len(constant)))
    weight = W_K @ from_keys + matrix("from_inputs", (len(W_K), 0)) @ matrix("directions", (0, len(constant)))
    none = torch.zeros_like(constant)
    bias = constant - value_constant(from_keys, tensors["slim.key_offset"], bias_or_zero(key_bias, W_K), none)
    return weight.mT.contiguous(), bias


def _fits_float16(
    weights: AttentionWeights, exact: ValueCoordinates, inputs: Tensor, stored_rotation: Rotation | None
) -> bool:
    try:
        cached_and_read(exact.cached_keys(weights, inputs), torch.float16, weights.head_dim, stored_rotation)
        check_range("V-coordinates", exact.coordinates(inputs), torch.float16)
    except ValueError:
        return False
    return True


def _slim_tensors(stored: StoredValueCoordinates) -> dict[str, Tensor]:
    matrices = {"from_keys": (stored.from_keys.values, stored.from_keys.scales)}
    if len(stored.directions):
        ones = torch.ones(stored.directions.shape[1])
        matrices["from_inputs"] = (stored.from_inputs.values, stored.from_inputs.scales)
        matrices["directions"] = (stored.directions, ones)
    tensors = {"slim.key_offset": stored.key_offset.float(), "slim.constant": stored.constant.float()}
    for name, (values, scales) in matrices.items():
        tensors |= {f"slim.{name}.values": values, f"slim.{name}.scales": scales.float()}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
