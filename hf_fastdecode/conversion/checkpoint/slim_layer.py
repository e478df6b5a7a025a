"""Convert one attention layer: from its weights and calibration inputs to the tensors of a slim layer, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_fastdecode.patches.slim_layers import PLANS, SlimLayer

from ..fit.biases import value_constant
from ..fit.cache_errors import CacheError, relative_error
from ..fit.layer_plan import RANK_SHARES, LayerPlan, fit_layer, in_eight_bits
from ..fit.rope import Rotation
from ..fit.stored_coordinates import StoredValueCoordinates, cached_and_read, check_range, store_value_coordinates
from ..fit.value_coordinates import ValueCoordinates
from ..fit.weights import AttentionWeights, bias_or_zero
from .plan_choice import AUTO, PlanChoice, pick


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer of a slim model.

    Attributes:
        plan: All that was measured.
        chosen: What it caches, with its error.
        entry: The same, for the config.
        tensors: By their names below the layer's attention, ``slim.key_offset`` etc.; empty where all weights stay.
        recovered_error: Relative error of ``W_V`` as `recover_values` gives it back, in the model's dtype; 0 where it
            stays.
    """

    plan: LayerPlan
    chosen: CacheError
    entry: SlimLayer
    tensors: dict[str, Tensor]
    recovered_error: float

    def attention(self, plain: Mapping[str, Tensor], value: str = "v_proj") -> dict[str, Tensor]:
        """Tensors of the slim attention.

        Args:
            plain: Of the ordinary one, by names below it, with separate projections.
            value: Name of the projection of values, which the slim attention lacks where they follow from keys.
        """
        if not self.tensors:
            return dict(plain)
        return {name: one for name, one in plain.items() if not name.startswith(f"{value}.")} | self.tensors

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


def config_entries(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries of a slim config, from the `ConvertedLayer.report` of each layer."""
    fields = SlimLayer.__dataclass_fields__
    return [{name: one[name] for name in fields if name in one} for one in reports]


def matrix_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """Of a slim layer's matrices: fp16 for models in half precision (in bf16 they would spoil the values)."""
    return torch.float16 if model_dtype.itemsize == 2 else torch.float32


def convert_layer(
    weights: AttentionWeights,
    inputs: Tensor,
    rotation: Rotation | None,
    choice: PlanChoice,
    index: int,
    layers: int,
    *,
    encoded: Tensor | None = None,
    score_bias: Tensor | None = None,
    plans: Sequence[str] = PLANS,
) -> ConvertedLayer:
    """Measure, choose and round.

    Args:
        weights: Of the layer, in the dtype of the model that is to be made.
        inputs: ``[tokens, d]``, what the layer's projections see on a calibration text.
        rotation: RoPE of these tokens.
        choice: What is asked for.
        index: Of the layer.
        layers: That the model has.
        encoded: ``[tokens, key_d]``, the encoder's output, for cross-attention.
        score_bias: See `fit_layer`.
        plans: That the layer can have.

    Raises:
        ValueError: The layer cannot have what is asked for, or the text is too short or not finite.
    """
    asked = choice.of_layer(index, layers, plans)
    model_dtype = weights.key.dtype
    plan, statistics = fit_layer(
        weights,
        inputs,
        encoded,
        rotation=rotation,
        causal=encoded is None,
        score_bias=score_bias,
        model_dtype=model_dtype,
        cache_dtype=choice.wider,
        eight_bits=choice.eight_bits,
        tolerance=choice.tolerance,
        unrotate=choice.rope == "unrotate",
        rank_shares=RANK_SHARES if asked[0] == AUTO else (),
        ranks=(asked[1],),
    )
    chosen = pick(plan, asked, index, plans)
    if chosen.plan not in ("k", "k+r"):
        asked_for = chosen.dtype if chosen.plan == "x" and in_eight_bits(chosen) else None
        return ConvertedLayer(plan, chosen, SlimLayer(chosen.plan, cache_dtype=asked_for), {}, 0.0)
    fit = statistics[chosen.dtype]
    stored = store_value_coordinates(weights, fit, chosen.rank, matrix_dtype=matrix_dtype(model_dtype))
    exact = stored.double()
    error = relative_error(_value_weight(weights.W_K, exact).to(model_dtype).double(), weights.W_V)
    asked_for = chosen.dtype if choice.wider or in_eight_bits(chosen) else None
    stored_rotation = rotation if choice.rope == "unrotate" else None
    fits = _fits_float16(weights, exact, inputs if encoded is None else encoded, stored_rotation)
    entry = SlimLayer(chosen.plan, chosen.rank, fits, asked_for)
    return ConvertedLayer(plan, chosen, entry, _tensors(stored), error)


def recover_values(key: Tensor, key_bias: Tensor | None, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """An ordinary layer's value projection: ``W_V = W_K M + W_E B``, and its bias.

    Args:
        key: ``[e, d]``, of the key projection.
        key_bias: ``[e]`` or None.
        tensors: As `ConvertedLayer` has them.

    Returns:
        Weight ``[e_v, d]`` and bias ``[e_v]``, fp64; the bias is 0 but for rounding where the layer had none.
    """

    def matrix(name: str, shape: tuple[int, int]) -> Tensor:
        if f"slim.{name}.values" not in tensors:
            return torch.zeros(shape, dtype=torch.float64)
        return tensors[f"slim.{name}.values"].double() * tensors[f"slim.{name}.scales"].double()

    W_K, constant = key.double().mT, tensors["slim.constant"].double()
    from_keys = matrix("from_keys", (W_K.shape[1], len(constant)))
    exact = ValueCoordinates(
        tensors["slim.key_offset"].double(),
        from_keys,
        matrix("from_inputs", (len(W_K), 0)),
        matrix("directions", (0, len(constant))),
        constant,
    )
    none = torch.zeros_like(constant)
    bias = constant - value_constant(from_keys, exact.key_offset, bias_or_zero(key_bias, W_K), none)
    return _value_weight(W_K, exact).mT.contiguous(), bias


def _value_weight(W_K: Tensor, exact: ValueCoordinates) -> Tensor:
    return W_K @ exact.from_keys + exact.from_inputs @ exact.directions


def _fits_float16(
    weights: AttentionWeights, exact: ValueCoordinates, inputs: Tensor, stored_rotation: Rotation | None
) -> bool:
    try:
        cached_and_read(exact.cached_keys(weights, inputs), torch.float16, weights.head_dim, stored_rotation)
        check_range("V-coordinates", exact.coordinates(inputs), torch.float16)
    except ValueError:
        return False
    return True


def _tensors(stored: StoredValueCoordinates) -> dict[str, Tensor]:
    matrices = {"from_keys": (stored.from_keys.values, stored.from_keys.scales)}
    if len(stored.directions):
        ones = torch.ones(stored.directions.shape[1])
        matrices["from_inputs"] = (stored.from_inputs.values, stored.from_inputs.scales)
        matrices["directions"] = (stored.directions, ones)
    tensors = {"slim.key_offset": stored.key_offset.float(), "slim.constant": stored.constant.float()}
    for name, (values, scales) in matrices.items():
        tensors |= {f"slim.{name}.values": values, f"slim.{name}.scales": scales.float()}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
