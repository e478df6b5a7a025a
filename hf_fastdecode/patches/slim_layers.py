"""Cache layout of each layer of a slim model, as stored in its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

PLANS: Final = ("k", "k+r", "kv")
"""A layer caches keys; keys and r V-coordinates; keys and values."""

Rope = Literal["raw", "unrotate"]
"""Keys are cached before RoPE; after RoPE, with their positions."""

ROPES: Final[tuple[Rope, ...]] = get_args(Rope)

CACHE_DTYPES: Final = ("float16", "bfloat16", "int8", "float8_e4m3fn")
"""Dtypes that a layer's cache may have, whatever the model's dtype is."""

SELF_PLANS: Final = (*PLANS, "x")
"""Plans of self-attention without RoPE and QK-norm; ``x`` caches the layer's inputs."""

CROSS_PLANS: Final = (*PLANS, "e")
"""Plans of cross-attention; ``e`` caches nothing, as generation keeps the encoder's output once for all layers."""

ALL_PLANS: Final = (*PLANS, "x", "e")


@dataclass(frozen=True)
class SlimLayer:
    """Cache layout of one layer.

    Attributes:
        plan: One of `ALL_PLANS`; `read_layers` checks which of them a layer may have.
        rank: V-coordinates beside the keys for ``k+r``, else 0.
        float16: Whether keys and V-coordinates fit into fp16 with headroom, as measured in conversion: a model in bf16
            then caches them in fp16, which has three more bits in the same bytes.
        cache_dtype: One of `CACHE_DTYPES`, for keys and V-coordinates, or for inputs; None to follow the model's
            dtype, and for keys `float16`.

    Raises:
        ValueError: No such plan, or a rank or a cache dtype that the plan cannot have.
    """

    plan: str
    rank: int = 0
    float16: bool = True
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        check_plan(self.plan, ALL_PLANS)
        if type(self.rank) is not int or (self.rank < 1 if self.plan == "k+r" else self.rank != 0):
            bound = "an integer of at least 1" if self.plan == "k+r" else "0"
            raise ValueError(f"the rank of plan {self.plan!r} must be {bound}, got {self.rank!r}")
        if self.cache_dtype is not None and (self.plan in ("kv", "e") or self.cache_dtype not in CACHE_DTYPES):
            bound = (
                "None, the model's own" if self.plan in ("kv", "e") else f"None or one of {', '.join(CACHE_DTYPES)}"
            )
            raise ValueError(f"the cache_dtype of plan {self.plan!r} must be {bound}, got {self.cache_dtype!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the config; without a cache dtype, only fields that earlier versions read."""
        plain = {"plan": self.plan, "rank": self.rank, "float16": self.float16}
        return plain if self.cache_dtype is None else plain | {"cache_dtype": self.cache_dtype}


def check_plan(plan: object, allowed: Sequence[str]) -> None:
    """Raise ValueError for a plan that is not among those allowed."""
    if plan not in allowed:
        raise ValueError(f"a slim layer's plan must be one of {', '.join(allowed)}, got {plan!r}")


def check_threshold(threshold: object) -> None:
    """Raise ValueError for a threshold that is not a number of at least 0 and below 1."""
    if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
        raise ValueError(
            f"a sparsity threshold is a bound on attention weights, at least 0 (off) and below 1, got {threshold!r}"
        )


def read_layers(
    plain: Sequence[Mapping[str, Any]] | None, layers: int, plans: Sequence[Sequence[str]] = (PLANS,)
) -> list[SlimLayer]:
    """The cache layout of each layer.

    Args:
        plain: A config's `slim_layers`; None for keys and values everywhere.
        layers: Number of layers.
        plans: Allowed plans, in turns: ``plans[i % len(plans)]`` for layer i.

    Raises:
        ValueError: Fewer or more plans than layers, an unknown field or an invalid value.
    """
    if plain is None:
        return [SlimLayer("kv")] * layers
    if len(plain) != layers:
        raise ValueError(f"slim_layers must have a plan for each of {layers} layers, got {len(plain)}")
    known = set(SlimLayer.__dataclass_fields__)
    for index, entry in enumerate(plain):
        if "plan" not in entry or (other := sorted(set(entry) - known)):
            wrong = f"the unknown field {other[0]!r}" if "plan" in entry else "no field 'plan'"
            raise ValueError(f"an entry of slim_layers has {wrong}; it takes {', '.join(sorted(known))}")
        check_plan(entry["plan"], plans[index % len(plans)])
    return [SlimLayer(**entry) for entry in plain]
