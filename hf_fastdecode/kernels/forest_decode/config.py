"""Launch parameters of the kernels, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from ..failures import Kernel, failure
from ..installed import interpreted
from .limits import compute_capability


@dataclass(frozen=True)
class SuffixConfig:
    """Launch parameters of `attend_suffixes`.

    Attributes:
        block_n: Tokens of a tile.
        warps: Warps of a program.
        stages: Tiles in flight.
        merge: Partials of one query that are loaded at once.
    """

    block_n: int = 16
    warps: int = 1
    stages: int = 2
    merge: int = 4


@dataclass(frozen=True)
class Config:
    """Launch parameters.

    Attributes:
        block_m: Packed queries of a tile, 16 to 128.
        block_n: Keys of a node's tile.
        warps: Warps of a program of `node_partials`.
        stages: Key tiles in flight in the kernel of nodes.
        per_sm: Programs of the kernel of nodes for each multiprocessor.
        overlap: Launch a kernel while the one before it still runs, from compute capability 9.0 on.
        hopper: Use `hopper_node_partials`; needs compute capability 9.0, `block_m` 128 and no window.
        suffix: Of the kernel that follows; chosen at the launch, by its shape, when None.
        apart: Where a schedule leaves multiprocessors free, attend to suffixes on them beside the nodes, and merge in
            a third launch.
    """

    block_m: int
    block_n: int = 64
    warps: int = 4
    stages: int = 3
    per_sm: int = 1
    overlap: bool = True
    hopper: bool = False
    suffix: SuffixConfig | None = None
    overlap_suffix: bool = False


# From so many suffixes on, a third launch costs less than attending to them beside the nodes gains.
_MIN_OVERLAPPED_SUFFIXES = 512

# From so many KV heads on, a program has tiles enough for larger ones, or for more in flight, to pay: whatever the
# contexts, or where they are long.
_MANY_HEADS, _SOME_HEADS = 24, 8

# From so many keys on, contexts are long for tiles of few queries, and of many: what suits nodes is then worth more
# than what suffixes may lose by it.
_LONG, _LONG_FOR_WIDE = 768, 192


def choose_config(
    packed: int,
    head_dim: int,
    *,
    overlap: bool,
    queries_per_kv_head: int = 1,
    rows: int = 1,
    kv_heads: int = 1,
    keys: int = 0,
    windowed: bool = False,
    shared_memory: int = 227 * 1024,
    device: torch.device | None = None,
) -> Config:
    """Launch parameters, as measured on an H200, shrunk to what a program can hold elsewhere.

    Args:
        packed: Packed queries of the widest node for a KV head.
        head_dim: Numbers per head.
        overlap: Whether the device can overlap launches.
        each: Packed queries of one row for a KV head.
        rows: Rows of the step.
        kv_heads: KV heads of the layer.
        keys: How many each multiprocessor goes through: those of all nodes and KV heads, once for every 128 packed
            queries of a node.
        windowed: Whether there is a sliding window, which the Hopper kernel does not know.
        shared_memory: Bytes that a program may take.
        device: Where the kernels will run; the current CUDA device when None.
    """
    measured = 1 < queries_per_kv_head <= 8 and head_dim == 128  # with the suffixes' parameters for long contexts
    wide = packed > 64 and head_dim in (64, 128) and not windowed
    keys = 0 if windowed else keys  # what a window leaves of them is not known, and mostly little
    if overlap and wide and _hopper_kernel_runs(device):
        suffixes = rows * kv_heads
        # Suffixes of one query have no matrix products: they need all multiprocessors to go as fast as their bytes.
        overlap_suffix = queries_per_kv_head > 1 and suffixes >= _MIN_OVERLAPPED_SUFFIXES
        waiting = 64 < suffixes <= 128 and measured and keys >= _LONG_FOR_WIDE
        return Config(
            128,
            block_n=128,
            stages=2,
            hopper=True,
            suffix=_WAITING if waiting else None,
            overlap_suffix=overlap_suffix,
        )
    most = 64 if head_dim > 128 else 128  # the accumulator fills the registers
    block_m = min(most, max(16, triton.next_power_of_2(packed)))
    config = Config(block_m, overlap=overlap, warps=8 if block_m == most else 4)
    if packed == 1:  # measured so, at contexts from 8K on
        config = replace(config, per_sm=2)
    elif block_m == 64:
        config = replace(config, block_n=128)
    elif block_m < 64 and kv_heads >= _MANY_HEADS:
        larger = replace(config, block_n=128)  # leaves no room for suffixes that could begin beside the nodes
        pays = (block_m == 32 or keys >= _LONG) and _shared_bytes(larger, head_dim) <= shared_memory
        config = larger if pays else replace(config, stages=4)
    elif block_m == 32 and kv_heads >= _SOME_HEADS and keys >= _LONG and measured and overlap:
        deeper = replace(config, stages=4, suffix=_BESIDE)
        if _shared_bytes(deeper, head_dim) + _suffix_bytes(_BESIDE, head_dim) <= shared_memory:
            config = deeper
    if _shared_bytes(config, head_dim) > shared_memory and config.block_n == 128:  # two stages of these are slower
        config = replace(config, block_n=64)
    while _shared_bytes(config, head_dim) > shared_memory and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    while _shared_bytes(config, head_dim) > shared_memory and config.block_n > 32:
        config = replace(config, block_n=config.block_n // 2)
    return config


def _shared_bytes(config: Config, head_dim: int) -> int:
    """Of queries, and of keys and values of every stage, at two bytes a number."""
    return 2 * triton.next_power_of_2(head_dim) * (config.block_m + 2 * config.stages * config.block_n)


_SCRATCH = 16 * 1024  # bytes of shared memory for what a program of `attend_suffixes` exchanges between its threads


def _suffix_bytes(config: SuffixConfig, head_dim: int) -> int:
    """Of keys and values of every stage, and of what threads exchange."""
    return 4 * triton.next_power_of_2(head_dim) * config.block_n * config.stages + _SCRATCH


# For up to so many programs: the fewer they are, the more each must load at once.
_ONE_QUERY = (
    (64, SuffixConfig(128, warps=8, stages=2, merge=8)),
    (256, SuffixConfig(32, warps=1, stages=3, merge=8)),
    (1024, SuffixConfig(32, warps=1, stages=2, merge=8)),
    (2**31, SuffixConfig(16, warps=1, stages=2)),
)
_QUERIES = (
    (64, SuffixConfig(128, warps=4, stages=3, merge=8)),
    (128, SuffixConfig(64, warps=4, stages=3, merge=8)),
    (256, SuffixConfig(32, warps=2, stages=3, merge=8)),
    (512, SuffixConfig(32, warps=2, stages=2, merge=8)),
    (2**31, SuffixConfig(16, warps=1, stages=3, merge=8)),
)

# While long contexts are read: so small that programs can begin beside the nodes', or too large to.
_BESIDE = SuffixConfig(32, warps=2, stages=3, merge=8)
_WAITING = SuffixConfig(128, warps=4, stages=3, merge=8)


def choose_suffix_config(
    rows: int,
    kv_heads: int,
    group: int,
    queries: int,
    head_dim: int,
    *,
    overlap_suffix: bool = False,
    shared_memory: int = 227 * 1024,
) -> SuffixConfig:
    """Launch parameters as measured on an H200.

    Args:
        rows: Rows of the batch.
        kv_heads: KV heads of the layer.
        group: Query heads of a KV head.
        queries: Tokens of a row in the step.
        head_dim: Numbers per head.
        apart: Whether it may run beside the nodes, where few multiprocessors are to be filled.
        shared_memory: Bytes that a program may take.
    """
    programs, queries_per_kv_head = rows * kv_heads, group * queries
    if overlap_suffix:  # as many as there are on few multiprocessors would be
        programs = max(programs, _QUERIES[-2][0] + 1)
    if queries_per_kv_head == 1:
        config = next(config for most, config in _ONE_QUERY if programs <= most)
        held = 4096 * config.warps // triton.next_power_of_2(head_dim)  # more tokens would not fit the registers
        config = replace(config, block_n=max(16, min(config.block_n, held)))
    else:
        config = next(config for most, config in _QUERIES if programs <= most)
    if kv_heads == 1 and programs <= 64:  # each program of the nodes' kernel leaves a partial of the same queries
        config = replace(config, merge=32)
    # A thread holds at most 64 numbers of the sum, and 128 of partials that are loaded at once.
    wide = triton.next_power_of_2(queries_per_kv_head) * triton.next_power_of_2(head_dim)
    warps = min(8, max(config.warps, wide // 2048))
    config = replace(config, warps=warps, merge=max(1, min(config.merge, 4096 * warps // wide)))
    while config.block_n > 16 and _suffix_bytes(config, head_dim) > shared_memory:
        config = replace(config, block_n=config.block_n // 2)
    return config


class MergeConfig(NamedTuple):
    """Launch parameters of `merge_suffixes`.

    Attributes:
        rows: Rows of a program.
        warps: Its warps.
        merge: Partials of one query that are loaded at once.
    """

    rows: int
    warps: int
    merge: int


def choose_merge_config(queries_per_kv_head: int, head_dim: int) -> MergeConfig:
    """Launch parameters for so many packed queries of a row.

    A program takes 16 packed queries, or one row's if those are more. A thread holds at most 64 numbers of the sum,
    and 64 of partials that are loaded at once.
    """
    tile, width = triton.next_power_of_2(queries_per_kv_head), triton.next_power_of_2(head_dim)
    rows = max(1, 16 // tile)
    numbers = rows * tile * width
    warps = min(8, max(4, numbers // 2048))
    return MergeConfig(rows, warps, merge=max(1, min(4, 2048 * warps // numbers)))


def _hopper_kernel_runs(device: torch.device | None) -> bool:
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device is None or device.type != "cuda" or interpreted():
        return False
    return compute_capability(device)[0] == 9 and failure(Kernel.HOPPER, device) is None
