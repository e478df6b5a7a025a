"""Calls the decode kernels on tensors of any strides, on a CUDA device that need not be the current one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...kernels.forest_decode.schedule import Schedule
from ..partial import Partial
from ..scoring import Scoring

if TYPE_CHECKING:  # it imports triton, which may be missing
    from ...kernels.forest_decode.api import Config


def run_kernels(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    node_addresses: Tensor,
    suffix_addresses: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: Schedule,
    config: Config,
    scoring: Scoring,
    origins: Tensor | None = None,
) -> Tensor:
    """`forest_decode` on tensors of any strides, on a CUDA device that need not be the current one.

    The arguments are those of `forest_decode`, of which ``nodes`` and ``suffix`` are tables of device addresses. It
    needs the last dimension of queries, keys and values to be contiguous: they are copied where it is not.

    Returns:
        ``[rows, heads, queries, head_dim]`` in the query's dtype.
    """
    from ...kernels.forest_decode.api import forest_decode

    if query.stride(-1) != 1:
        query = query.contiguous()
    if new_keys.stride(-1) != 1:
        new_keys = new_keys.contiguous()
    if new_values.stride(-1) != 1:
        new_values = new_values.contiguous()
    tables = (node_addresses, suffix_addresses, slots, lengths, schedule, config)
    out, _ = forest_decode(
        query,
        new_keys,
        new_values,
        *tables,
        scale=scoring.scale,
        soft_cap=scoring.softcap,
        window=scoring.window,
        sinks=scoring.sinks,
        origins=origins,
    )
    return out


def run_node_kernels(
    query: Tensor, node_addresses: Tensor, slots: Tensor, schedule: Schedule, config: Config, scale: float
) -> Partial:
    """`forest_partial` likewise, of a layer with as many KV heads as query heads.

    Returns:
        The partial of the nodes, in fp32.
    """
    from ...kernels.forest_decode.api import forest_partial

    if query.stride(-1) != 1:
        query = query.contiguous()
    parts = forest_partial(query, node_addresses, slots, schedule, config, kv_heads=query.shape[1], scale=scale)
    return Partial(*parts)
