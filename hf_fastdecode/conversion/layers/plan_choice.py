"""The user's choice of caches: the smallest accurate one per layer, one for all layers, or a list."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch

from hf_fastdecode.dtypes import parse_dtype
from hf_fastdecode.patches.slim_layers import ALL_PLANS, CACHE_DTYPES, PLANS, ROPES, Rope, read_layers

from ..fit.cache_errors import CacheError
from ..fit.cached_numbers import EIGHT_BITS
from ..fit.layer_plan import LayerPlan, in_eight_bits

AUTO: Final = "auto"

NamedPlan = Literal["auto", "k", "x", "e", "kv"]
"""Plans for all layers."""

NAMED: Final[tuple[NamedPlan, ...]] = get_args(NamedPlan)


class PlanError(ValueError):
    """An invalid plan, or one that the model cannot have."""


@dataclass(frozen=True)
class PlanChoice:
    """Rule by which layers' caches are chosen.

    Attributes:
        plan: ``auto``, ``k``, ``kv``; without RoPE also ``x``, inputs, and the encoder's output for cross-attention;
            for encoder-decoder models also ``e``, keys for self-attention and the encoder's output for
            cross-attention (option 2 of the paper); or a tuple of plan and rank per layer.
        rank: V-coordinates beside the keys of every layer, instead of a plan; None to use `plan`.
        tolerance: For ``auto`` and for 8 bits: largest acceptable output error, as a multiple of that of an ordinary
            cache; for 8 bits of that of keys and values in int8.
        cache_dtype: Dtype of keys and V-coordinates, one of `CACHE_DTYPES`, in any spelling that `parse_dtype` takes.
            ``auto`` depends on the model's dtype; ``fp8`` and ``int8`` are for layers where they are accurate enough,
            and for inputs too.
        rope: ``raw`` caches keys before RoPE, ``unrotate`` after it.
    """

    plan: NamedPlan | tuple[tuple[str, int], ...] = AUTO
    rank: int | None = None
    tolerance: float = 2.0
    cache_dtype: str | torch.dtype = AUTO
    rope: Rope = "raw"

    def __post_init__(self) -> None:
        """Check; PlanError where a field is unknown or out of bounds, or both a plan and a rank are given."""
        if isinstance(self.plan, str):
            if self.plan not in NAMED:
                raise PlanError(f"plan must be {', '.join(NAMED)} or a plan per layer, got {self.plan!r}")
        else:
            object.__setattr__(self, "plan", _checked(self.plan))
        if self.rank is not None and (type(self.rank) is not int or self.rank < 0):
            raise PlanError(
                f"`rank` must be an integer of at least 0 (keys alone), got {self.rank!r}; leave it out for `plan`"
            )
        if self.rank is not None and self.plan != AUTO:
            raise PlanError(f"rank {self.rank} is a plan for all layers, and another was given; leave one out")
        if not isinstance(self.tolerance, int | float) or not 1 <= self.tolerance < math.inf:
            raise PlanError(
                "`tolerance` must be a number of at least 1 (the error of keys and values themselves), got "
                f"{self.tolerance!r}; leave it out for 2"
            )
        dtype = parse_dtype(self.cache_dtype, known=CACHE_DTYPES, argument="cache_dtype")
        object.__setattr__(self, "cache_dtype", dtype)
        if self.rope not in ROPES:
            raise PlanError(f"`rope` must be one of {', '.join(ROPES)}, got {self.rope!r}; choose one")

    @property
    def eight_bits(self) -> torch.dtype | None:
        """The cache dtype if it has 8 bits."""
        return self._dtype if self._dtype in EIGHT_BITS else None

    @property
    def wider(self) -> torch.dtype | None:
        """The cache dtype if it has more bits."""
        return None if self.eight_bits else self._dtype

    @property
    def _dtype(self) -> torch.dtype | None:
        return None if self.cache_dtype == AUTO else getattr(torch, str(self.cache_dtype))

    def of_layer(self, index: int, layers: int, plans: Sequence[str] = PLANS) -> tuple[str, int]:
        """Plan and rank asked for layer `index` of `layers`; ``auto`` has rank 0.

        Raises PlanError where the layer, which can have `plans`, cannot have it.
        """
        asked = self._asked(index, layers)
        if asked[0] not in (AUTO, *plans):
            reason = ", as RoPE or QK-norm stands before the scores" if asked[0] == "x" and "e" not in plans else ""
            raise PlanError(f"layer {index} cannot have plan {asked[0]!r}, only one of {', '.join(plans)}{reason}")
        return asked

    def _asked(self, index: int, layers: int) -> tuple[str, int]:
        if self.rank is not None:
            return ("k+r", self.rank) if self.rank else ("k", 0)
        if isinstance(self.plan, str):
            return self.plan, 0
        if len(self.plan) != layers:
            raise PlanError(f"the plan is for {len(self.plan)} layers, and the model has {layers}: name one for each")
        return self.plan[index]


def _checked(plan: Any) -> tuple[tuple[str, int], ...]:
    """Plan and rank of each layer, as a tuple of pairs."""
    try:
        pairs = [(name, rank) for name, rank in plan]
        layers = read_layers([{"plan": name, "rank": rank} for name, rank in pairs], len(pairs), (ALL_PLANS,))
    except (TypeError, ValueError) as error:
        raise PlanError(
            f'plan must be {", ".join(NAMED)} or a pair such as ("k+r", 64) for each layer, got {plan!r} ({error})'
        ) from error
    return tuple((layer.plan, layer.rank) for layer in layers)


def pick(plan: LayerPlan, asked: tuple[str, int], index: int, plans: Sequence[str] = PLANS) -> CacheError:
    """The cache of layer `index` among those measured in `plan`; ``auto`` chooses from `plans`.

    Raises PlanError where the layer cannot have the plan and rank that were asked for.
    """
    if asked[0] == AUTO:
        return next(one for one in plan.candidates if one.plan in plans and plan.accepts(one))
    for candidate in plan.candidates:
        if (candidate.plan, candidate.rank) == asked and (not in_eight_bits(candidate) or plan.accepts(candidate)):
            return candidate
    reason = plan.refused.get(asked[0], "it was not measured")  # type: ignore[call-overload]
    raise PlanError(f"layer {index} cannot have plan {asked[0]!r}: {reason}")


def read_plan_file(path: Path) -> tuple[tuple[str, int], ...]:
    """Plans from a JSON file: a list with ``plan`` and ``rank`` per layer, a slim config.json, or a conversion report.

    Raises PlanError where the file cannot be read, or holds no plan.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last where lists are nested too deeply
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise PlanError(f"{path} is neither a plan ({', '.join(NAMED)}) nor a JSON file of plans: {reason}") from error
    entries = content
    if isinstance(content, dict):
        inner = content.get("text_config")  # of a multimodal model's config
        content = inner if isinstance(inner, dict) else content
        entries = content.get("slim_layers", content.get("layers"))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PlanError(f'{path} holds no list of plans such as {{"plan": "k+r", "rank": 64}}, one per layer')
    plain = [{"plan": entry.get("plan"), "rank": entry.get("rank", 0)} for entry in entries]
    try:
        layers = read_layers(plain, len(plain), (ALL_PLANS,))
    except ValueError as error:
        raise PlanError(f"{path}: {error} (plans are {', '.join(ALL_PLANS)})") from error
    return tuple((layer.plan, layer.rank) for layer in layers)
