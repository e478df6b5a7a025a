"""Launches of the slim decode kernels: on clusters, or two of one kernel; and of the merge."""

from __future__ import annotations

from math import gcd

import torch
import triton
from torch import Tensor

from ..ahead import launch
from ..device import interpreted, multiprocessors
from ..failures import Kernel, launching
from ..forest_decode.node_kernel import LOG2E
from .arguments import Arguments
from .cluster import ClusterConfig, ClusterShape, cluster_kernel, tensor_maps
from .config import TwoLaunchConfig, padded_heads, rank_block
from .inputs import EIGHT_BITS
from .merge import merge_pieces
from .partials import AVERAGES, SCORES, slim_partials

_PIECES_AT_ONCE = 16
"""Pieces of a row that the merge loads at most before it waits for one."""


def launch_all(
    given: Arguments, config: TwoLaunchConfig | ClusterConfig, result: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Run the kernels and merge their pieces into `result`, a `SlimPartial`; arguments and parameters are checked.

    Raises:
        KernelFailedError: A kernel cannot be compiled or launched here.
    """
    rows, heads, _, head_dim = given.query.shape
    rank, device, on_clusters = given.coordinates.shape[2], given.keys.device, isinstance(config, ClusterConfig)
    with launching(Kernel.CLUSTER if on_clusters else Kernel.SLIM, device):
        if isinstance(config, ClusterConfig):
            groups, tile, parts = _on_clusters(given, config)
        else:
            groups, tile, parts = _in_two_launches(given, config)
        block = 512
        most_tiles = rows * triton.cdiv(given.keys.shape[1], tile)
        launch(
            merge_pieces,
            (rows * heads, triton.cdiv(heads * head_dim, block) + triton.cdiv(rank, block)),
            *parts,
            given.first_slots,
            given.lengths,
            *result,
            rows,
            groups,
            KEYS=heads * head_dim,
            BLOCK=block,
            MERGE=_pieces_at_once(groups, rows) if not interpreted() else 1,
            HEADS=heads,
            RANK=rank,
            WIDE=(most_tiles + 1) * (groups + 1) >= 2**31,
            STARTS=given.starts is not None,
            BLOCK_T=tile,
            BLOCK_ROWS=triton.next_power_of_2(rows),
            num_warps=4,
        )


def _pieces_at_once(groups: int, rows: int) -> int:
    """At least the pieces of a row, where rows are as long as each other."""
    return min(_PIECES_AT_ONCE, triton.next_power_of_2(triton.cdiv(groups, rows) + 1))


_Launched = tuple[int, int, tuple[Tensor, Tensor]]
"""Groups, tokens per tile, and what their pieces hold."""


def cluster_shape(given: Arguments, config: ClusterConfig) -> ClusterShape:
    """What the cluster kernel is compiled for; without RoPE it ignores the offset, which `slim_decode` adds behind."""
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
            query,
            *tensor_maps(keys, coordinates, shape),
            *(given.scales or (lse, lse)),
            *given.read_only(lse)[2:],
            turns,
            given.first_slots,
            given.lengths,
            averages,
            lse,
            rows,
            given.scale * LOG2E.value,
            *query.stride()[:2],
            given.table_row_stride,
            *scale_strides,
        ],
        device,
    )
    return groups, config.tile, parts


def groups_of(config: TwoLaunchConfig, heads: int, device: torch.device) -> tuple[int, int]:
    """Programs per group, and groups."""
    members = -(-heads // config.own_heads)
    return members, (config.programs or multiprocessors(device)) // members


def _strides(part: Tensor) -> tuple[int, int, int]:
    """Strides of rows and slots of a part of the cache in units, and the unit: up to 16 numbers, a power of 2."""
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
    numbers = [part.view(torch.int8) if scales else part for part in (keys, coordinates)]
    for phase in (SCORES, AVERAGES):
        launch(
            slim_partials,
            (groups * members,),
            query,
            *numbers,
            *(scales or (lse, lse)),
            *given.read_only(lse)[2:],
            given.first_slots,
            given.lengths,
            scores,
            averages,
            lse,
            rows,
            groups,
            given.scale * LOG2E.value,
            *query.stride()[:2],
            *key_strides,
            *coordinate_strides,
            given.table_row_stride,
            HEADS=heads,
            HEAD_DIM=head_dim,
            ROTARY=given.rotary_dim,
            RANK=rank,
            OFFSET=given.key_offset is not None,
            STARTS=given.starts is not None,
            MEMBERS=members,
            OWN=config.own_heads,
            HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_H=block_h,
            BLOCK_R=block_r,
            BLOCK_T=config.block_t,
            BLOCK_ROWS=triton.next_power_of_2(rows),
            PARTS=1 if keys.dtype == torch.float32 else config.parts,
            APART=config.apart,
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
