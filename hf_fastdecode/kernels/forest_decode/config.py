"""Launch parameters of the decode kernels, chosen from measured tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, NamedTuple

import torch

from ..device import compute_capability, fitted, interpreted, power_of_two
from ..failures import Kernel, failure


@dataclass(frozen=True)
class SuffixConfig:
    """Launch parameters of `attend_suffixes`."""

    block_n: int = 16  # tokens per key tile
    warps: int = 1  # warps per program
    stages: int = 2  # key tiles in flight
    merge: int = 4  # partials of a query loaded at once


@dataclass(frozen=True)
class Config:
    """Launch parameters of a decode step."""

    block_m: int  # packed queries per query tile of a node, 16 to 128
    block_n: int = 64  # keys per key tile of a node
    warps: int = 4  # warps per program of `node_partials`
    stages: int = 3  # key tiles in flight in the node kernel
    per_sm: int = 1  # programs of the node kernel per multiprocessor
    overlap: bool = True  # use programmatic dependent launch (PDL), from compute capability 9.0 on
    hopper: bool = False  # use `hopper_node_partials`; needs compute capability 9.0, `block_m` 128 and no window
    # Launch parameters of the suffix kernel; chosen at the launch, by its shape, when None
    suffix: SuffixConfig | None = None
    # Where a schedule leaves multiprocessors free, run the suffix kernel on them beside the node kernel, and merge in
    # a third launch
    overlap_suffix: bool = False
    # Most nodes that a query tile reads as one, see `attention.launch.plan`; the portable kernel's alone
    chain: int = 1


CHAINED: Final = {
    Config(64, block_n=64, warps=4, stages=2, per_sm=2, chain=8): 1.75,
    Config(16, block_n=32, warps=2, stages=3, per_sm=6, chain=4): 2.8,
}
"""Launch parameters for trees of many short nodes, and microseconds that a key tile takes, measured on an H200."""

# Suffixes from which running them beside the nodes gains more than the third launch costs.
_MIN_OVERLAPPED_SUFFIXES = 512

# KV heads from which larger key tiles, or more of them in flight, pay: at any context length (many), or at long ones
# (some).
_MANY_HEADS, _SOME_HEADS = 24, 8

# Keys per multiprocessor from which contexts count as long, for narrow and for wide query tiles: parameters that suit
# the nodes then outweigh what suffixes lose by them.
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
    biased: bool = False,
    own_dominate: bool = False,
    latents: bool = False,
    rest: int = 0,
    shared_memory: int = 227 * 1024,
    device: torch.device | None = None,
) -> Config:
    """Launch parameters as measured on an H200, reduced to the shared memory of other devices.

    Args:
        packed: Packed queries per KV head of the widest node.
        overlap: Whether the device supports PDL.
        queries_per_kv_head: Packed queries of one row per KV head.
        keys: Keys that each multiprocessor reads: those of all nodes and KV heads, once per 128 packed queries of a
            node.
        windowed: Whether there is a sliding window, or `biased`, which the Hopper kernel does not support.
        biased: Whether scores have biases by distance, whose tiles are in flight beside those of keys.
        own_dominate: Whether nodes of one row each hold most of the keys.
        latents: Whether nodes hold latents, of which keys have `head_dim` elements.
        rest: Elements of keys beside the `head_dim` of each head, stored once for all KV heads.
        shared_memory: Bytes of shared memory per program.
        device: Where the kernels will run; the current CUDA device when None.
    """
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if latents:
        return _config_of_latents(packed, head_dim, overlap=overlap, shared_memory=shared_memory, device=device)
    if rest:
        return _config_with_rest(packed, head_dim, rest, overlap=overlap, shared_memory=shared_memory)
    # Shapes for which suffix parameters at long contexts were measured.
    measured = 1 < queries_per_kv_head <= 8 and head_dim == 128
    wide = packed > 64 and head_dim in (64, 128) and not windowed and not own_dominate
    keys = 0 if windowed else keys  # how many keys a window keeps is unknown, and mostly few
    if overlap and wide and _hopper_kernel_runs(device):
        suffixes = rows * kv_heads
        # Suffixes of one query have no matrix products and need all multiprocessors to reach the memory bandwidth.
        overlap_suffix = queries_per_kv_head > 1 and suffixes >= _MIN_OVERLAPPED_SUFFIXES
        waiting = _WAITING if 64 < suffixes <= 128 and measured and keys >= _LONG_FOR_WIDE else None
        return Config(128, block_n=128, stages=2, hopper=True, suffix=waiting, overlap_suffix=overlap_suffix)
    if own_dominate:
        config = Config(16, overlap=overlap, per_sm=2)
    else:
        config = _portable_config(packed, head_dim, kv_heads, keys, shared_memory, overlap=overlap, measured=measured)
    taken = partial(_shared_bytes, head_dim=head_dim, biased=biased)
    # Fewer stages of 128 keys are slower. Few queries: with biases, of large heads on small devices.
    limits = ("block_n", 64), ("stages", 2), ("block_n", 32), ("block_m", 16)
    return fitted(config, taken, shared_memory, *limits)


def _portable_config(
    packed: int, head_dim: int, kv_heads: int, keys: int, shared_memory: int, *, overlap: bool, measured: bool
) -> Config:
    most = 64 if head_dim > 128 else 128  # the accumulator fills the registers
    block_m = min(most, max(16, power_of_two(packed)))
    config = Config(block_m, overlap=overlap, warps=8 if block_m == most else 4)
    if packed == 1:  # measured so, at contexts from 8K on
        return replace(config, per_sm=2)
    if block_m == 64:
        return replace(config, block_n=128)
    if block_m < 64 and kv_heads >= _MANY_HEADS:
        larger = replace(config, block_n=128)  # too large for suffix programs to fit beside the nodes'
        pays = (block_m == 32 or keys >= _LONG) and _shared_bytes(larger, head_dim) <= shared_memory
        return larger if pays else replace(config, stages=4)
    if block_m == 32 and kv_heads >= _SOME_HEADS and keys >= _LONG and measured and overlap:
        # With less memory, two programs would share some multiprocessors, and leave others idle.
        deeper = replace(config, stages=5, suffix=_BESIDE)
        held = replace(deeper, stages=deeper.stages - 1)  # tiles in memory while one more is computed with
        if _shared_bytes(held, head_dim) + _suffix_bytes(_BESIDE, head_dim) <= shared_memory:
            return deeper
    return config


def _config_of_latents(
    packed: int, head_dim: int, *, overlap: bool, shared_memory: int, device: torch.device | None
) -> Config:
    """As measured on an H200 for latents of 512 + 64 elements: of few queries, several narrow tiles read the keys."""
    config = Config(16 if packed <= 64 else 64, stages=2, overlap=overlap)
    # On a B200 Triton passes the sums of 64 queries, in fp32, through shared memory beside the tiles (by compiling).
    passes_sums = _generation(device) == 10

    def taken(config: Config) -> int:
        sums = 4 * head_dim * config.block_m if passes_sums and config.block_m == 64 else 0
        return 2 * head_dim * (config.block_m + config.stages * config.block_n) + sums

    if passes_sums:  # 32 queries have none, and leave room for tiles of as many keys
        config = fitted(config, taken, shared_memory, ("block_m", 32))
    config = fitted(config, taken, shared_memory, ("block_n", 32), ("block_m", 16))
    return replace(config, warps=8) if config.block_m == 64 else config  # whose accumulator fills the registers


def _config_with_rest(packed: int, head_dim: int, rest: int, *, overlap: bool, shared_memory: int) -> Config:
    """As measured on an H200 for 128 + 64 elements: 64 queries, of which half are padding, are faster than 32."""
    wide = packed > 64 and head_dim <= 128  # else the accumulator fills the registers
    config = Config(128 if wide else 64, warps=8 if wide or head_dim > 128 else 4, overlap=overlap)
    width, more = power_of_two(head_dim), power_of_two(rest)

    def taken(config: Config) -> int:
        keys = config.stages * config.block_n
        return 2 * (width * (config.block_m + 2 * keys) + more * (config.block_m + keys))

    return fitted(config, taken, shared_memory, ("stages", 2), ("block_n", 32), ("block_m", 16))


def _shared_bytes(config: Config, head_dim: int, *, biased: bool = False) -> int:
    """Shared memory of the node kernel: queries, and keys and values of every stage, at two bytes per element.

    Biases are loaded in fp32, one for each pair of query and key.
    """
    biases = 4 * (config.stages - 1) * config.block_m * config.block_n if biased else 0
    return 2 * power_of_two(head_dim) * (config.block_m + 2 * config.stages * config.block_n) + biases


_SCRATCH = 16 * 1024  # bytes of shared memory by which threads of `attend_suffixes` exchange data, at least


def _suffix_bytes(config: SuffixConfig, head_dim: int, queries_per_kv_head: int = 1) -> int:
    """Shared memory of the suffix kernel: keys and values of every stage, and scratch.

    Threads exchange the packed queries in 16 bits, and 16 of them at a time in fp32.
    """
    width, packed = power_of_two(head_dim), power_of_two(queries_per_kv_head)
    return 4 * width * config.block_n * config.stages + max(_SCRATCH, width * (2 * packed + 4 * 16))


# By the largest number of programs: the fewer there are, the more each must load at once.
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

# For long contexts: small enough to start beside the nodes' programs, or too large to, so that they wait.
_BESIDE = SuffixConfig(32, warps=2, stages=3, merge=8)
_WAITING = SuffixConfig(128, warps=4, stages=3, merge=8)


@lru_cache(maxsize=256)  # each layer of an eager step asks
def choose_suffix_config(
    rows: int,
    kv_heads: int,
    group: int,
    queries: int,
    head_dim: int,
    *,
    overlap_suffix: bool = False,
    latents: bool = False,
    shared_memory: int = 227 * 1024,
) -> SuffixConfig:
    """Launch parameters of the suffix kernel as measured on an H200, for `group` query heads per KV head.

    With `overlap_suffix` the kernel runs beside the node kernel, on few multiprocessors.
    """
    programs, queries_per_kv_head = rows * kv_heads, group * queries
    if latents:
        tile = power_of_two(queries_per_kv_head)
        capacity = shared_memory // (2 * head_dim) - max(16, tile)  # for tokens, beside queries
        return SuffixConfig(32 if capacity >= 2 * 32 + 16 else 16, warps=8, stages=2, merge=2)
    if overlap_suffix:  # on few multiprocessors, any number of programs is many
        programs = max(programs, _QUERIES[-2][0] + 1)
    if queries_per_kv_head == 1:
        config = next(config for most, config in _ONE_QUERY if programs <= most)
        held = 4096 * config.warps // power_of_two(head_dim)  # more tokens would not fit in the registers
        config = replace(config, block_n=max(16, min(config.block_n, held)))
    else:
        config = next(config for most, config in _QUERIES if programs <= most)
    if kv_heads == 1 and programs <= 64:  # every program of the node kernel writes a partial of the same queries
        config = replace(config, merge=32)
    # A thread holds at most 64 elements of the accumulator, and 128 of partials loaded at once.
    wide = power_of_two(queries_per_kv_head) * power_of_two(head_dim)
    warps = min(8, max(config.warps, wide // 2048))
    config = replace(config, warps=warps, merge=max(1, min(config.merge, 4096 * warps // wide)))
    taken = partial(_suffix_bytes, head_dim=head_dim, queries_per_kv_head=queries_per_kv_head)
    return fitted(config, taken, shared_memory, ("block_n", 16), ("stages", 1))


class MergeConfig(NamedTuple):
    """Launch parameters of `merge_rows`."""

    rows: int  # rows per program
    warps: int  # warps per program
    merge: int  # partials of a query loaded at once


def choose_merge_config(queries_per_kv_head: int, head_dim: int) -> MergeConfig:
    """Launch parameters of the merge kernel.

    A program merges 16 packed queries, or one row's if those are more. A thread holds at most 64 elements of the
    accumulator, and 64 of partials loaded at once.
    """
    tile, width = power_of_two(queries_per_kv_head), power_of_two(head_dim)
    rows = max(1, 16 // tile)
    elements = rows * tile * width
    warps = min(8, max(4, elements // 2048))
    return MergeConfig(rows, warps, merge=max(1, min(4, 2048 * warps // elements)))


def _hopper_kernel_runs(device: torch.device | None) -> bool:
    return device is not None and _generation(device) == 9 and failure(Kernel.HOPPER, device) is None


def _generation(device: torch.device | None) -> int:
    """First number of the compute capability that kernels are compiled for; 0 where Triton interprets them."""
    if device is None or device.type != "cuda" or interpreted():
        return 0
    return compute_capability(device)[0]
