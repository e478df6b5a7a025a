"""Launch parameters of the slim decode kernels: on clusters, and in two launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import torch

from ..device import fitted, power_of_two
from .cluster import ClusterConfig, ClusterShape
from .inputs import EIGHT_BITS


@dataclass(frozen=True)
class TwoLaunchConfig:
    """Launch parameters of `slim_decode` in two launches."""

    own_heads: int  # heads per program, a power of 2; a group has ``ceil(heads / own_heads)`` programs
    block_t: int = 32  # tokens per tile, a power of 2 from 16
    warps: int = 8  # warps per program
    stages: int = 4  # tiles in flight
    # Parts in which weights are multiplied, 1 or 2. Two parts of fp16 are as precise as fp32. A weight's error is that
    # of its token's value too, as with keys and values, so that one part errs as fused attention does.
    parts: int = 2
    programs: int | None = None  # programs at most; one per multiprocessor when None


@lru_cache(maxsize=256)  # the search takes as long as a step's attention
def choose_cluster_config(
    heads: int,
    head_dim: int,
    rank: int,
    dtype: torch.dtype,
    *,
    rotary_dim: int,
    offset: bool,
    shared_memory: int = 227 * 1024,
) -> ClusterConfig | None:
    """Launch parameters on clusters for a layer's shape; None where the kernel does not take it.

    The largest tiles, each of which costs a round of messages, then the most of them, and then the smallest cluster
    that fit into the blocks' shared memory and registers. `dtype` is that of the cached keys.
    """
    offset = offset and rotary_dim > 0  # which `slim_decode` adds to scores without RoPE
    stages_and_copies: list[tuple[int, int | None]] = [(6, None), (5, None), (4, None)]
    if dtype in EIGHT_BITS:  # dequantised tiles wait for weights only
        stages_and_copies = [(4, 4), (4, 3), (4, 2), (3, 3), (3, 2)]
    buffers = ((stages, copies, lead) for stages, copies in stages_and_copies for lead in (4, 3, 2))
    for tile, (stages, copies, lead) in product((64, 32), buffers):
        for members in (1, 2, 4, 8):
            config = ClusterConfig(members, tile, stages, lead, copies=copies)
            shape = ClusterShape(heads, head_dim, rank, rotary_dim, offset, True, dtype, config)
            if shape.refusal(shared_memory) is None:
                return config
    return None


_SUMS = 16 * 1024  # sums of keys per program: a quarter of a multiprocessor's registers


def choose_two_launch_config(
    heads: int, head_dim: int, rank: int, dtype: torch.dtype, *, shared_memory: int = 227 * 1024
) -> TwoLaunchConfig:
    """Launch parameters in two launches for a layer's shape.

    A program has as many heads as the sums of all heads over their columns allow: tables of RoPE, which each program
    of a group reads, then cost the least. `dtype` is that of the cached keys.
    """
    padded, width = padded_heads(heads), power_of_two(head_dim)
    at_once = max(1, min(power_of_two(heads), _SUMS // (padded * width)))
    config = TwoLaunchConfig(at_once, warps=8 if padded * at_once * width >= _SUMS // 2 else 4)
    taken = partial(_shared_bytes, width=width, coordinates=rank_block(rank, -(-heads // at_once)), dtype=dtype)
    return fitted(config, taken, shared_memory, ("stages", 2), ("block_t", 16))


def padded_heads(heads: int) -> int:
    """Heads, padded to a size that matrix units take."""
    return max(16, power_of_two(heads))


def rank_block(rank: int, members: int) -> int:
    """V-coordinates per program of a group, at least 8 for each of up to 8 warps; 0 without any."""
    return max(64, power_of_two(-(-rank // members))) if rank else 0


def _shared_bytes(config: TwoLaunchConfig, width: int, coordinates: int, dtype: torch.dtype) -> int:
    """Shared memory: keys, V-coordinates and tables of RoPE of each tile in flight, and operands of the products."""
    keys = config.own_heads * width * dtype.itemsize
    token = keys + coordinates * dtype.itemsize + 4 * width
    return config.block_t * ((config.stages - 1) * token + keys) + 8 * 1024


def check_two_launch_config(config: TwoLaunchConfig, members: int, groups: int) -> None:
    """Raise ValueError for launch parameters out of bounds, with `members` programs per group."""
    for name, value, least in (("own_heads", config.own_heads, 1), ("block_t", config.block_t, 16)):
        if value < least or value & (value - 1):
            raise ValueError(f"{name} must be a power of 2 from {least}, got {value}")
    if config.parts not in (1, 2):
        raise ValueError(f"parts must be 1 or 2, got {config.parts}")
    if not groups:
        raise ValueError(f"a group needs {members} programs; raise own_heads or programs")
