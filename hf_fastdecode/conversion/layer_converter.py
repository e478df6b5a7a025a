"""Convert attention layers one by one: measure each on its calibration inputs, choose its cache, round its matrices.

Layers of a checkpoint and of a loaded model are converted by one class. The choice is the user's: the smallest
accurate cache per layer, one plan for all layers, or a list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from hf_fastdecode.dtypes import parse_dtype
from hf_fastdecode.patches.config_base import (
    ALL_PLANS,
    CACHE_DTYPES,
    CROSS_PLANS,
    PLANS,
    ROPES,
    SELF_PLANS,
    Rope,
    SlimLayer,
    read_layers,
)

from ..patches.layers.family import Family
from .fit.attention import AttentionInputs, AttentionWeights, bias_or_zero, value_constant
from .fit.layer_plan import RANK_SHARES, CacheError, CacheErrors, LayerPlan, fit_layer, in_eight_bits, relative_error
from .fit.value_coordinates import (
    StoredValueCoordinates,
    ValueCoordinates,
    cached_and_read,
    check_range,
    matrix_dtype,
    store_value_coordinates,
)

AUTO: Final = "auto"

NamedPlan = Literal["auto", "k", "x", "e", "kv"]
"""Plans for all layers."""

NAMED: Final[tuple[NamedPlan, ...]] = get_args(NamedPlan)


@dataclass(frozen=True)
class PlanChoice:
    """Rule by which layers' caches are chosen, see `to_slim`.

    Attributes:
        plan: Also, for encoder-decoder models, ``x``, the inputs of self-attention, and ``e``, keys for self-attention
            (option 2 of the paper); cross-attention then reads the encoder's output.
        tolerance: For ``auto`` and for 8 bits: largest acceptable output error, as a multiple of that of an ordinary
            cache; for 8 bits of that of keys and values in int8.
        cache_dtype: One of `CACHE_DTYPES`, in any spelling that `parse_dtype` takes, or ``auto``.
    """

    plan: NamedPlan | tuple[tuple[str, int], ...] = AUTO
    rank: int | None = None
    tolerance: float = 2.0
    cache_dtype: str | torch.dtype = AUTO
    rope: Rope = "raw"

    def __post_init__(self) -> None:
        if isinstance(self.plan, str):
            if self.plan not in NAMED:
                raise ValueError(f"plan must be {', '.join(NAMED)} or a plan per layer, got {self.plan!r}")
        else:
            try:
                pairs = _pairs([{"plan": name, "rank": rank} for name, rank in self.plan])
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f'plan must be {", ".join(NAMED)} or a pair such as ("k+r", 64) for each layer, got {self.plan!r} '
                    f"({error})"
                ) from error
            object.__setattr__(self, "plan", pairs)
        if self.rank is not None and (type(self.rank) is not int or self.rank < 0):
            raise ValueError(
                f"`rank` must be an integer of at least 0 (keys alone), got {self.rank!r}; leave it out for `plan`"
            )
        if self.rank is not None and self.plan != AUTO:
            raise ValueError(f"rank {self.rank} is a plan for all layers, and another was given; leave one out")
        if not isinstance(self.tolerance, int | float) or not 1 <= self.tolerance < math.inf:
            raise ValueError(
                "`tolerance` must be a number of at least 1 (the error of keys and values themselves), got "
                f"{self.tolerance!r}; leave it out for 2"
            )
        dtype = parse_dtype(self.cache_dtype, known=CACHE_DTYPES, argument="cache_dtype")
        object.__setattr__(self, "cache_dtype", dtype)
        if self.rope not in ROPES:
            raise ValueError(f"`rope` must be one of {', '.join(ROPES)}, got {self.rope!r}; choose one")

    def of_layer(self, index: int, layers: int, plans: Sequence[str] = PLANS) -> tuple[str, int]:
        """Plan and rank asked for layer `index` of `layers`; ``auto`` has rank 0.

        Raises ValueError where the layer, which can have `plans`, cannot have it.
        """
        if self.rank is not None:
            plan, rank = "k+r" if self.rank else "k", self.rank
        elif isinstance(self.plan, str):
            plan, rank = self.plan, 0
        elif len(self.plan) == layers:
            plan, rank = self.plan[index]
        else:
            raise ValueError(f"the plan is for {len(self.plan)} layers, and the model has {layers}: name one for each")
        if plan not in (AUTO, *plans):
            reason = ", as RoPE or QK-norm stands before the scores" if plan == "x" and "e" not in plans else ""
            raise ValueError(f"layer {index} cannot have plan {plan!r}, only one of {', '.join(plans)}{reason}")
        return plan, rank


def _pairs(entries: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    plain = [{"plan": entry.get("plan"), "rank": entry.get("rank", 0)} for entry in entries]
    return tuple((layer.plan, layer.rank) for layer in read_layers(plain, len(plain), (ALL_PLANS,)))


def pick(plan: LayerPlan, asked: tuple[str, int], index: int, plans: Sequence[str] = PLANS) -> CacheError:
    """The cache of layer `index` among those measured in `plan`; ``auto`` chooses from `plans`.

    Raises ValueError where the layer cannot have the plan and rank that were asked for.
    """
    if asked[0] == AUTO:
        return next(one for one in plan.candidates if one.plan in plans and plan.accepts(one))
    for candidate in plan.candidates:
        if (candidate.plan, candidate.rank) == asked and (not in_eight_bits(candidate) or plan.accepts(candidate)):
            return candidate
    reason = plan.refused.get(asked[0], "it was not measured")  # type: ignore[call-overload]
    raise ValueError(f"layer {index} cannot have plan {asked[0]!r}: {reason}")


def read_plan_file(path: Path) -> tuple[tuple[str, int], ...]:
    """Plans from a JSON file: a list with ``plan`` and ``rank`` per layer, a slim config.json, or a conversion report.

    Raises ValueError where the file cannot be read, or holds no plan.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last where lists are nested too deeply
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise ValueError(
            f"{path} is neither a plan ({', '.join(NAMED)}) nor a JSON file of plans: {reason}"
        ) from error
    entries = content
    if isinstance(content, dict):
        inner = content.get("text_config")  # of a multimodal model's config
        content = inner if isinstance(inner, dict) else content
        entries = content.get("slim_layers", content.get("layers"))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f'{path} holds no list of plans such as {{"plan": "k+r", "rank": 64}}, one per layer')
    try:
        return _pairs(entries)
    except ValueError as error:
        raise ValueError(f"{path}: {error} (plans are {', '.join(ALL_PLANS)})") from error


_IN_TURNS: Final = {"x": (("x", 0), ("e", 0)), "e": (("k", 0), ("e", 0))}
"""Plans for all layers of an encoder-decoder that differ between self-attention and cross-attention."""


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer of a slim model: all measured caches, and the chosen one, with its error and as an entry for the config.

    `tensors` are those of the slim attention, by their names below it; `recovered_error` is the relative error of
    ``W_V`` as `recover_values` returns it, in the model's dtype, else 0.
    """

    plan: LayerPlan
    chosen: CacheError
    entry: SlimLayer
    tensors: dict[str, Tensor]
    recovered_error: float = 0.0

    def report(self) -> dict[str, Any]:
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
    """Tensors whose names have a prefix, by their names below it."""
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
        family: Family,
        config: Any,
        choice: PlanChoice,
        source: Callable[[int], tuple[Mapping[str, Tensor], AttentionInputs]],
    ) -> None:
        self.family, self.config, self.source = family, config, source
        self.count = len(family.attentions(config))
        self.choice = choice
        if family.has_encoder and choice.plan in _IN_TURNS:
            self.choice = replace(choice, plan=_IN_TURNS[str(choice.plan)] * (self.count // 2))

    def convert(self, index: int) -> ConvertedLayer:
        """Measure, choose and round.

        Raises ValueError where the attention cannot have the plan that was asked for, some layers' cross-attention
        alone is asked to read the encoder's output, or the text is too short or not finite.
        """
        layer_tensors, text = self.source(index)
        plain = self.family.plain(self.config, layer_tensors)
        weights = self._weights(plain, index)
        rotation = self.family.rotation(self.config, len(text.inputs))
        text = replace(text, rotation=rotation, unrotate=self.choice.rope == "unrotate")
        plans = self._plans[index % len(self._plans)]
        choice, model_dtype = self.choice, weights.key.dtype
        asked = choice.of_layer(index, self.count, plans)
        plan, statistics = fit_layer(
            weights,
            text,
            model_dtype=model_dtype,
            cache_dtype=None if choice.cache_dtype == AUTO else getattr(torch, str(choice.cache_dtype)),
            tolerance=choice.tolerance,
            rank_shares=RANK_SHARES if asked[0] == AUTO else (),
            ranks=(asked[1],),
        )
        chosen = pick(plan, asked, index, plans)
        if chosen.plan == "kv":
            return ConvertedLayer(plan, chosen, SlimLayer("kv"), dict(layer_tensors))
        if chosen.plan not in ("k", "k+r"):
            cache_dtype = chosen.dtype if in_eight_bits(chosen) else None
            return ConvertedLayer(plan, chosen, SlimLayer(chosen.plan, cache_dtype=cache_dtype), plain)
        stored = store_value_coordinates(
            weights, statistics[chosen.dtype], chosen.rank, matrix_dtype=matrix_dtype(model_dtype)
        )
        exact = stored.double()
        recovered = weights.W_K @ exact.from_keys + exact.from_inputs @ exact.directions
        recovered_error = relative_error(recovered.to(model_dtype).double(), weights.W_V)
        fits = _fits_float16(weights, exact, text)
        cache_dtype = chosen.dtype if chosen.dtype == choice.cache_dtype else None  # not chosen for the model's dtype
        entry = SlimLayer(chosen.plan, chosen.rank, fits, cache_dtype)
        value = f"{self.family.projection('v')}."
        tensors = {name: one for name, one in plain.items() if not name.startswith(value)} | _slim_tensors(stored)
        return ConvertedLayer(plan, chosen, entry, tensors, recovered_error)

    def _weights(self, plain: Mapping[str, Tensor], index: int) -> AttentionWeights:
        return self.family.weights(self.config, {name: one.cpu() for name, one in plain.items()}, index)

    @cached_property
    def _plans(self) -> tuple[Sequence[str], ...]:
        if not self.family.has_encoder:
            return (self.family.slim_config.plans,)
        return SELF_PLANS, CROSS_PLANS if self._reads_encoder() else PLANS

    def _reads_encoder(self) -> bool:
        """Whether cross-attention has plan ``e``, which is for all layers or none, or may have it.

        With ``auto`` it may where it is accurate enough in every layer.
        """
        crosses = range(1, self.count, 2)
        asked = [self.choice.of_layer(index, self.count, CROSS_PLANS)[0] for index in crosses]
        if "e" in asked and set(asked) != {"e"}:
            raise ValueError(
                "cross-attention reads the encoder's output in all layers or in none (plan 'e'), got "
                f"{', '.join(asked)}; plan 'e' for all of them"
            )
        return "e" in asked or (AUTO in asked and all(map(self._accurate_from_encoder, crosses)))

    def _accurate_from_encoder(self, index: int) -> bool:
        """Whether plan ``e`` is accurate enough, on the half of the text that plans are judged on."""
        layer_tensors, text = self.source(index)
        assert text.encoded is not None
        weights = self._weights(self.family.plain(self.config, layer_tensors), index)
        errors = CacheErrors(weights, text.part(slice(len(text.encoded) // 2, None)))
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


def _fits_float16(weights: AttentionWeights, exact: ValueCoordinates, text: AttentionInputs) -> bool:
    keys, rotation = exact.cached_keys(weights, text.key_inputs), text.stored_rotation
    try:
        cached_and_read(keys, torch.float16, weights.head_dim, rotation)
        check_range("V-coordinates", exact.coordinates(text.key_inputs), torch.float16)
    except ValueError:
        return False
    return True


def _slim_tensors(stored: StoredValueCoordinates) -> dict[str, Tensor]:
    tensors = {"slim.key_offset": stored.key_offset.float(), "slim.constant": stored.constant.float()}
    for name in ("from_keys", "from_inputs", "directions")[: 3 if stored.rank else 1]:
        matrix = getattr(stored, name)
        tensors |= {f"slim.{name}.values": matrix.values, f"slim.{name}.scales": matrix.scales}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
