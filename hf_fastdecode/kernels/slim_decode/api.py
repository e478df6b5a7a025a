"""`slim_decode`: attention of one decode step over a slim cache, before its averages are multiplied by ``W_KV``."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..ahead import launch
from ..device import compute_capability, interpreted, multiprocessors, power_of_two, shared_memory
from ..failures import Kernel, KernelFailedError, failure, launching
from ..forest_decode.node_kernel import LOG2E
from .cluster import ClusterConfig, ClusterShape, cluster_kernel, cuda_bindings_are_installed, tensor_maps
from .config import (
    TwoLaunchConfig,
    check_two_launch_config,
    choose_cluster_config,
    choose_two_launch_config,
    padded_heads,
    rank_block,
)
from .inputs import EIGHT_BITS, Arguments, RotaryTables, Scales, check_alignment, check_arguments, is_aligned
from .partials import AVERAGES, SCORES, merge_pieces, slim_partials

__all__ = ["ClusterConfig", "RotaryTables", "Scales", "SlimPartial", "TwoLaunchConfig", "choose_config", "slim_decode"]


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
        dtype: Dtype of the cached keys.
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
    if interpreted() or compute_capability(device)[0] != 9 or not cuda_bindings_are_installed():  # others lack wgmma
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
        scales: Scales of keys and V-coordinates in 8 bits, by which elements are multiplied in fp32.

    Returns:
        Averages and log-sum-exp; 0 and ``-inf`` for rows without tokens.
    """
    given = Arguments(query, keys, coordinates, lengths, scale, key_offset, rotary, starts, scales)
    check_arguments(given)
    rows, heads, _, head_dim = query.shape
    rank, device, chosen = coordinates.shape[2], keys.device, config is None
    if config is None:
        options: dict[str, Any] = {"rotary": rotary, "offset": key_offset is not None}
        config = choose_config(heads, head_dim, rank, keys.dtype, device, **options)
        if isinstance(config, ClusterConfig) and not all(is_aligned(*part) for part in given.copied.values()):
            config = choose_two_launch_config(heads, head_dim, rank, keys.dtype, shared_memory=shared_memory(device))
    shapes = (rows, heads, heads * head_dim), (rows, heads, rank), (rows, heads)
    result = SlimPartial(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))
    if not rows:
        return result
    _check_config(given, config)
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


def _check_config(given: Arguments, config: TwoLaunchConfig | ClusterConfig) -> None:
    """Raise ValueError for launch parameters that are out of bounds, or do not take these arguments."""
    heads, device = given.query.shape[1], given.keys.device
    if isinstance(config, TwoLaunchConfig):
        check_two_launch_config(config, *groups_of(config, heads, device))
        return
    if given.rotary is not None and given.rotary.turns is None:
        raise ValueError(
            "clusters need tables of RoPE with turns, as RotaryTables.of makes; or pass a TwoLaunchConfig"
        )
    if reason := cluster_shape(given, config).refusal(shared_memory(device)):
        raise ValueError(f"{reason}; pass a TwoLaunchConfig, or None")
    for name, part in given.copied.items():
        check_alignment(name, *part)


_PIECES_AT_ONCE = 16
"""Pieces of a row that the merge loads at most before it waits for one."""


def launch_all(
    given: Arguments, config: TwoLaunchConfig | ClusterConfig, result: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Run the kernels and merge their pieces into `result`, a `SlimPartial`; arguments and parameters are checked."""
    rows, heads, _, head_dim = given.query.shape
    rank, device, on_clusters = given.coordinates.shape[2], given.keys.device, isinstance(config, ClusterConfig)
    with launching(Kernel.CLUSTER if on_clusters else Kernel.SLIM, device):
        if isinstance(config, ClusterConfig):
            groups, tile, parts = _on_clusters(given, config)
        else:
            groups, tile, parts = _in_two_launches(given, config)
        block = 512
        most_tiles = rows * triton.cdiv(given.keys.shape[1], tile)
        # At least the pieces of a row, where rows are as long as each other.
        at_once = min(_PIECES_AT_ONCE, power_of_two(triton.cdiv(groups, rows) + 1))
        launch(
            merge_pieces,
            (rows * heads, triton.cdiv(heads * head_dim, block) + triton.cdiv(rank, block)),
            *(*parts, given.first_slots, given.lengths, *result, rows, groups),
            KEYS=heads * head_dim,
            BLOCK=block,
            MERGE=at_once if not interpreted() else 1,
            HEADS=heads,
            RANK=rank,
            WIDE=(most_tiles + 1) * (groups + 1) >= 2**31,
            STARTS=given.starts is not None,
            BLOCK_T=tile,
            BLOCK_ROWS=power_of_two(rows),
            num_warps=4,
        )


_Launched = tuple[int, int, tuple[Tensor, Tensor]]
"""Groups, tokens per tile, and the pieces' averages and log-sum-exp."""


def cluster_shape(given: Arguments, config: ClusterConfig) -> ClusterShape:
    """The shape that the kernel is compiled for; without RoPE it has no offset, which `slim_decode` adds later."""
    _, heads, _, head_dim = given.query.shape
    return ClusterShape(
        heads,
        head_dim,
        given.coordinates.shape[2],
        given.rotary_dim,
        given.rotary is not None and given.key_offset is not None,
        given.starts is not None,
        given.keys.dtype,
        config,
    )


def _on_clusters(given: Arguments, config: ClusterConfig) -> _Launched:
    query, keys, coordinates = given.query.float(), given.keys, given.coordinates
    rows, device = query.shape[0], keys.device
    shape = cluster_shape(given, config)
    kernel, clusters = cluster_kernel(shape, device)
    groups = min(clusters, config.clusters or clusters)
    averages, lse = parts = given.parts(groups)
    turns = lse if given.rotary is None else given.rotary.turns
    # In bf16, strides of two bytes.
    scale_strides = [stride // 2 for part in (keys, coordinates) for stride in part.stride()[:2]]
    kernel.launch(
        groups * config.members,
        [
            *(query, *tensor_maps(keys, coordinates, shape), *(given.scales or (lse, lse))),
            *(*given.read_only(lse), turns, given.first_slots, given.lengths, averages, lse),
            *(rows, given.scale * LOG2E.value, *query.stride()[:2], given.table_row_stride, *scale_strides),
        ],
        device,
    )
    return groups, config.tile, parts


def groups_of(config: TwoLaunchConfig, heads: int, device: torch.device) -> tuple[int, int]:
    """Programs per group, and groups."""
    members = -(-heads // config.own_heads)
    return members, (config.programs or multiprocessors(device)) // members


def _strides(part: Tensor) -> tuple[int, int, int]:
    """Strides of rows and slots of a part of the cache in units, and the unit: up to 16 elements, a power of 2."""
    row, slot = part.stride()[:2]
    unit = gcd(16, row, slot)
    return row // unit, slot // unit, unit


def _in_two_launches(given: Arguments, config: TwoLaunchConfig) -> _Launched:
    query, keys, coordinates = given.query, given.keys, given.coordinates
    rows, heads, _, head_dim = query.shape
    rank, device, scales = coordinates.shape[2], keys.device, given.scales
    members, groups = groups_of(config, heads, device)
    block_r = rank_block(rank, members)
    (*key_strides, key_unit), (*coordinate_strides, coordinate_unit) = map(_strides, (keys, coordinates))
    block_h = padded_heads(heads)
    averages, lse = parts = given.parts(groups)
    tiles = rows * triton.cdiv(keys.shape[1], config.block_t)
    scores = torch.empty(tiles, block_h, config.block_t, dtype=torch.float32, device=device)
    stored = [part.view(torch.int8) if scales else part for part in (keys, coordinates)]
    for phase in (SCORES, AVERAGES):
        launch(
            slim_partials,
            (groups * members,),
            *(query, *stored, *(scales or (lse, lse)), *given.read_only(lse)),
            *(given.first_slots, given.lengths, scores, averages, lse),
            *(rows, groups, given.scale * LOG2E.value, *query.stride()[:2]),
            *(*key_strides, *coordinate_strides, given.table_row_stride),
            HEADS=heads,
            HEAD_DIM=head_dim,
            ROTARY=given.rotary_dim,
            RANK=rank,
            OFFSET=given.key_offset is not None,
            STARTS=given.starts is not None,
            MEMBERS=members,
            OWN=config.own_heads,
            HALF=power_of_two(head_dim // 2),
            BLOCK_H=block_h,
            BLOCK_R=block_r,
            BLOCK_T=config.block_t,
            BLOCK_ROWS=power_of_two(rows),
            PARTS=1 if keys.dtype == torch.float32 else config.parts,
            WIDE=keys.dtype == torch.bfloat16 and interpreted(),  # whose products of bf16 are wrong
            SHIFT=14 if keys.dtype in (torch.float16, *EIGHT_BITS) else 0,
            PHASE=phase.value,
            STAGES=config.stages,
            SCALED=scales is not None,
            FP8=keys.dtype == torch.float8_e4m3fn,
            KEY_UNIT=key_unit,
            COORDINATE_UNIT=coordinate_unit,
            SHARED_SCALE=gcd(block_r, head_dim),
            num_warps=config.warps,
            maxnreg=min(255, 65536 // (32 * config.warps)),  # all, as there is one program per multiprocessor
            enable_fp_fusion=True,  # Triton 3.9 warns about the default, which 3.10 changes
        )
    return groups, config.block_t, parts
