"""The user's choice of caches: the smallest accurate one per layer, one for all layers, or a list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_fastdecode.patches.slim_layers import ALL_PLANS, PLANS, read_layers

from ..cache_errors import CacheError
from ..layer_plan import LayerPlan

AUTO: Final = "auto"

NAMED: Final = (AUTO, "k", "x", "e", "kv")
"""Plans for all layers."""


class PlanError(ValueError):
    """A plan that the checkpoint cannot have, or that is none."""


@dataclass(frozen=True)
class PlanChoice:
    """Rule by which layers' caches are chosen.

    Attributes:
        plan: ``auto``, ``k``, ``kv``; for encoder-decoder models also ``x``, inputs for self-attention and the
            encoder's output for cross-attention, and ``e``, keys for self-attention and the encoder's output for
            cross-attention (option 2 of the paper); or a tuple of plan and rank per layer.
        rank: V-coordinates beside the keys of every layer, in the place of a plan; None to leave it to `plan`.
        tolerance: Of ``auto``: how many times the output error of an ordinary cache is acceptable.
    """

    plan: str | tuple[tuple[str, int], ...] = AUTO
    rank: int | None = None
    tolerance: float = 2.0

    def __post_init__(self) -> None:
        """Check.

        Raises:
            PlanError: No such plan, a rank or tolerance out of bounds, or both a plan and a rank.
        """
        if isinstance(self.plan, str) and self.plan not in NAMED:
            raise PlanError(f"plan must be {', '.join(NAMED)} or a plan per layer, got {self.plan!r}")
        if self.rank is not None and self.rank < 0:
            raise PlanError(f"rank must be at least 0 (keys alone), got {self.rank}")
        if self.rank is not None and self.plan != AUTO:
            raise PlanError(f"rank {self.rank} is a plan for all layers, and another was given; leave one out")
        if not self.tolerance >= 1:
            raise PlanError(f"tolerance must be at least 1 (an ordinary cache has 1 itself), got {self.tolerance}")

    def of_layer(self, index: int, layers: int, plans: Sequence[str] = PLANS) -> tuple[str, int]:
        """Plan and rank that are asked for; ``auto`` has rank 0.

        Args:
            index: Of the layer.
            layers: That the model has.
            plans: That the layer can have.

        Raises:
            PlanError: The layer cannot have what is asked for.
        """
        asked = self._asked(index, layers, plans)
        if asked[0] not in (AUTO, *plans):
            raise PlanError(f"layer {index} cannot have plan {asked[0]!r}, only one of {', '.join(plans)}")
        return asked

    def _asked(self, index: int, layers: int, plans: Sequence[str]) -> tuple[str, int]:
        if self.rank is not None:
            return ("k+r", self.rank) if self.rank else ("k", 0)
        if isinstance(self.plan, str):
            if self.plan == "x" and "e" in plans:
                return "e", 0
            if self.plan == "e" and "x" in plans:
                return "k", 0
            return self.plan, 0
        if len(self.plan) != layers:
            raise PlanError(f"the plan is for {len(self.plan)} layers, and the model has {layers}")
        return self.plan[index]


def pick(plan: LayerPlan, asked: tuple[str, int], index: int, plans: Sequence[str] = PLANS) -> CacheError:
    """The cache of a layer among those that were measured.

    Args:
        plan: What was measured.
        asked: Plan and rank, or ``auto``.
        index: Of the layer.
        plans: That ``auto`` chooses from.

    Raises:
        PlanError: The layer cannot have what was asked for.
    """
    if asked[0] == AUTO:
        bound = plan.tolerance * plan.ordinary.output_error
        return next(one for one in plan.candidates if one.plan in plans and one.output_error <= bound)
    for candidate in plan.candidates:
        if (candidate.plan, candidate.rank) == asked:
            return candidate
    reason = plan.refused.get(asked[0], "it was not measured")  # type: ignore[call-overload]
    raise PlanError(f"layer {index} cannot have plan {asked[0]!r}: {reason}")


def read_plan_file(path: Path) -> tuple[tuple[str, int], ...]:
    """Plans from a JSON file: a list with ``plan`` and ``rank`` per layer, or anything with such a list.

    A slim checkpoint's config.json serves, and a report of a conversion.

    Raises:
        PlanError: The file cannot be read, or holds no plan.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} is not a JSON file ({error}); name a list of plans, or a slim config.json") from error
    entries = content
    if isinstance(content, dict):
        entries = content.get("slim_layers", content.get("layers"))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PlanError(f'{path} holds no list of plans such as {{"plan": "k+r", "rank": 64}}, one per layer')
    return _pairs(path, entries)


def _pairs(path: Path, entries: Sequence[dict[str, Any]]) -> tuple[tuple[str, int], ...]:
    plain = [{"plan": entry.get("plan"), "rank": entry.get("rank", 0)} for entry in entries]
    try:
        layers = read_layers(plain, len(plain), (ALL_PLANS,))
    except ValueError as error:
        raise PlanError(f"{path}: {error} (plans are {', '.join(ALL_PLANS)})") from error
    return tuple((layer.plan, layer.rank) for layer in layers)
