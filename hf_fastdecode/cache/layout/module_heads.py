"""The heads that a layer's modules have on this device: code, or tensor parallelism, may differ from the config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn

from ...errors import Unsupported
from ...parallel.groups import local_part
from .stores import Store

_FUSED: Final = ("query_key_value", "qkv_proj")
"""Names of projections to queries, keys and values at once."""


def with_heads_of(module: nn.Module, store: Store, whole: frozenset[str]) -> Store:
    """The store with the heads that a layer's own projections have: its code, or tensor parallelism, may differ.

    `whole` names projections whose outputs each process has whole, although it computes only its part of them.
    """
    for name in _FUSED:
        part, outputs = part_here(getattr(module, name, None), whole=name in whole)
        if part != outputs:
            if store.query_heads * part % outputs or store.kv_heads * part % outputs:
                raise Unsupported(
                    f"this process has {part} of the {outputs} outputs of {name}, which are no whole part of the "
                    f"layer's {store.query_heads} query heads and {store.kv_heads} KV heads"
                )
            heads, kv_heads = store.query_heads * part // outputs, store.kv_heads * part // outputs
            return replace(store, query_heads=heads, kv_heads=kv_heads)
    keys = _outputs(k_proj := getattr(module, "k_proj", None), whole="k_proj" in whole)
    values = _outputs(getattr(module, "v_proj", None), whole="v_proj" in whole)
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int) or head_dim < 1 or (not keys and not getattr(k_proj, "out_features", 0)):
        return store
    if not keys or keys % head_dim:
        part, outputs = part_here(k_proj, whole="k_proj" in whole)
        if part != outputs:
            raise Unsupported(
                f"this process has {part} of the {outputs} outputs of k_proj, which are no whole number of KV heads "
                f"of {head_dim}",
                "split the model between as many processes as it has KV heads at most, or its other layers only, see "
                "hf_fastdecode.sequence_parallel_plan",
            )
        return store
    kv_heads = keys // head_dim
    heads = kv_heads * (getattr(module, "num_key_value_groups", None) or store.group_size)
    value_dim = values // kv_heads or head_dim  # some layers have no projection of values, which are their keys
    if (heads, kv_heads, head_dim, value_dim) == (store.query_heads, store.kv_heads, store.head_dim, store.value_dim):
        return store
    return replace(store, query_heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)


def _outputs(projection: Any, *, whole: bool) -> int:
    """Outputs of a projection on this device; 0 if it is none."""
    part, outputs = part_here(projection, whole=whole)
    return int(getattr(projection, "out_features", 0)) * part // outputs


def part_here(projection: Any, *, whole: bool) -> tuple[int, int]:
    """How many of a projection's outputs this process has, and of how many; as many but with tensor parallelism."""
    weight = getattr(projection, "weight", None)
    if whole or not isinstance(weight, Tensor) or (local := local_part(weight)) is weight:
        return 1, 1
    return local.shape[0], weight.shape[0]
