"""`slim_decode`: attention of one decode step over a slim cache, before its averages are multiplied by ``W_KV``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cuda_module import cuda_bindings_are_installed
from ..device import compute_capability, interpreted, shared_memory
from ..failures import Kernel, KernelFailedError, failure
from .arguments import Arguments, check_alignment, check_arguments, is_aligned
from .cluster import ClusterConfig
from .config import TwoLaunchConfig, check_two_launch_config, choose_cluster_config, choose_two_launch_config
from .inputs import RotaryTables, Scales
from .launches import cluster_shape, groups_of, launch_all

__all__ = [
    "ClusterConfig",
    "RotaryTables",
    "Scales",
    "SlimPartial",
    "TwoLaunchConfig",
    "choose_config",
    "slim_decode",
]


class SlimPartial(NamedTuple):
    """Attention over a slim cache; merges with attention to other keys by its log-sum-exp.

    Attributes:
        keys: ``[rows, heads, e]`` fp32: averages of the cached keys, less the key offset, over all columns.
        coordinates: ``[rows, heads, r]`` fp32: averages of the V-coordinates.
        lse: ``[rows, heads]`` fp32: natural-log log-sum-exp of the scores; ``-inf`` for rows without tokens.
    """

    keys: Tensor
    coordinates: Tensor
    lse: Tensor


def choose_config(
    heads: int,
    head_dim: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rotary: RotaryTables | None = None,
    offset: bool = False,
) -> TwoLaunchConfig | ClusterConfig:
    """Launch parameters for a layer on a device: on clusters where the GPU has them and the kernel takes the shape.

    Args:
        heads: Heads of the layer.
        head_dim: Numbers per head.
        rank: V-coordinates.
        dtype: Dtype of the cached keys.
        device: Device that runs the kernel.
        rotary: Tables of RoPE, or None without it; clusters need their ``turns``.
        offset: Whether keys have an offset.
    """
    memory = shared_memory(device)
    if _has_clusters(device) and (rotary is None or rotary.turns is not None):
        rotary_dim = 2 * rotary.cos.shape[-1] if rotary else 0
        config = choose_cluster_config(
            heads, head_dim, rank, dtype, rotary_dim=rotary_dim, offset=offset, shared_memory=memory
        )
        if config is not None:
            return config
    return choose_two_launch_config(heads, head_dim, rank, dtype, shared_memory=memory)


def _has_clusters(device: torch.device) -> bool:
    if interpreted() or compute_capability(device) < (9, 0) or not cuda_bindings_are_installed():
        return False
    return failure(Kernel.CLUSTER, device) is None


def slim_decode(
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    lengths: Tensor,
    config: TwoLaunchConfig | ClusterConfig | None = None,
    *,
    scale: float,
    key_offset: Tensor | None = None,
    rotary: RotaryTables | None = None,
    starts: Tensor | None = None,
    scales: Scales | None = None,
) -> SlimPartial:
    """Attend with one query per row, and average the cached keys of all heads for each head.

    Slim attention, section 3 and eq. 2.1: values follow from keys, ``V = K W_KV``, so that attention is
    ``(softmax(Q K^T) K) W_KV``; the product with ``W_KV`` is the caller's. ``score[h, t] = scale * query[h] .
    RoPE_t(keys[t, h] + key_offset[h])``. On thread block clusters keys are read from device memory once, in two
    launches twice. Work is split into equal shares of the tokens of all rows (LeanAttention, section 4). Results
    are bitwise reproducible on one device. Keys in 8 bits are dequantised on chip.

    Lengths and starts are read on the device, so that a captured CUDA graph follows growing lengths.

    Args:
        query: ``[rows, heads, 1, head_dim]``, fp32 or the keys' dtype (fp32 for 8 bits), rotated; the last dimension
            contiguous.
        keys: ``[rows, slots, heads * head_dim]``, fp16, bf16 or fp32, or int8 or float8_e4m3fn with `scales`: before
            RoPE, less `key_offset`; the last dimension contiguous, rows and slots at multiples of 16 bytes, for 8 bits
            on clusters only.
        coordinates: ``[rows, slots, r]`` in the keys' dtype, for clusters likewise; r may be 0.
        lengths: ``[rows]`` int32: slots of each row that are filled, at most ``slots``.
        config: Launch parameters; those of `choose_config` when None.
        scale: Factor on the scores, positive.
        key_offset: ``[heads * head_dim]`` fp32, when given.
        rotary: Tables of RoPE; None without it. Clusters need ``turns``.
        starts: ``[rows]`` int32: first slot of each row that is not padding; 0 when None.
        scales: Scales of keys and V-coordinates in 8 bits, by which numbers are multiplied in fp32.

    Returns:
        Averages and log-sum-exp; 0 and ``-inf`` for rows without tokens.

    Raises:
        ValueError: A shape, stride, dtype or number is not as documented.
        KernelFailedError: A kernel cannot be compiled or launched here.
    """
    given = Arguments(query, keys, coordinates, lengths, scale, key_offset, rotary, starts, scales)
    check_arguments(given)
    rows, heads, _, head_dim = query.shape
    rank = coordinates.shape[2]
    device = keys.device
    chosen = config is None
    if config is None:
        options: dict[str, Any] = {"rotary": rotary, "offset": key_offset is not None}
        config = choose_config(heads, head_dim, rank, keys.dtype, device, **options)
        if isinstance(config, ClusterConfig) and not all(is_aligned(*part) for part in given.copied.values()):
            config = choose_two_launch_config(heads, head_dim, rank, keys.dtype, shared_memory=shared_memory(device))
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    result = SlimPartial(
        torch.empty(rows, heads, heads * head_dim, **fp32),
        torch.empty(rows, heads, rank, **fp32),
        torch.empty(rows, heads, **fp32),
    )
    if not rows:
        return result
    if isinstance(config, TwoLaunchConfig):
        check_two_launch_config(config, *groups_of(config, heads, device))
    elif rotary is not None and rotary.turns is None:
        raise ValueError(
            "clusters need tables of RoPE with turns, as RotaryTables.of makes; or pass a TwoLaunchConfig"
        )
    elif reason := cluster_shape(given, config).refusal(shared_memory(device)):
        raise ValueError(f"{reason}; pass a TwoLaunchConfig, or None")
    else:
        for name, part in given.copied.items():
            check_alignment(name, *part)
    try:
        launch_all(given, config, result)
    except KernelFailedError:
        if chosen and isinstance(config, ClusterConfig):  # which is not chosen again
            options = {"key_offset": key_offset, "rotary": rotary, "starts": starts, "scales": scales}
            return slim_decode(*given[:4], scale=scale, **options)
        raise
    if isinstance(config, ClusterConfig) and rotary is None and key_offset is not None:
        # Without RoPE the offset adds one number to all scores of a head.
        heads_of_offset = key_offset.view(heads, head_dim)
        result.lse.add_((query[:, :, 0].float() * heads_of_offset).sum(-1), alpha=scale)
    return result
