"""`forest_decode`, attention of one layer in one decode step over a forest, and `forest_partial`, over nodes alone.

The node kernel is launched first: attention of all rows over their nodes. TMA, the bulk tensor copy engine of Hopper
GPUs, reads through descriptors. Making one per node costs a kernel some microseconds before its first load. One
descriptor whose tensor begins near address zero and covers all memory finds rows of one length anywhere; only the
tiles that a kernel loads are read.
"""

from __future__ import annotations

from contextvars import copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..ahead import launch
from ..device import compute_capability, power_of_two, shared_memory
from ..failures import Kernel, launching
from ..limits import check_numbers, check_query, check_table
from .config import Config, SuffixConfig, choose_config, choose_merge_config, choose_suffix_config
from .limits import check_combination, check_partial, check_schedule, check_step, check_tokens
from .merge import merge_rows
from .node_kernel import node_partials
from .schedule import Schedule
from .suffix import attend_suffixes

__all__ = ["Config", "SuffixConfig", "choose_config", "forest_decode"]

if TYPE_CHECKING:  # only some versions of Triton have it
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def forest_decode(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    nodes: Tensor,
    suffix: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: Schedule,
    config: Config,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    biases: Tensor | None = None,
    origins: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Append the new tokens' keys and values to the suffixes, and attend to nodes and suffixes.

    Query ``j`` sees its row's nodes, the suffix before this step, and new tokens ``0..j``. Everything that differs
    between steps is read on the device, keys and values through their addresses, so that a captured CUDA graph serves
    other prompts, lengths and storage.

    Where suffixes are divided between devices, each of them appends and sees a part of the new tokens, possibly none,
    and a query may see no key at all: then ``out`` is 0 and the log-sum-exp ``-inf``.

    Latents (multi-head latent attention with absorbed queries) are keys whose first elements are the values too. They
    are stored once: these elements as keys, the others as values. All query heads read the same,
    in groups that stand for KV heads with a stride of 0.

    Args:
        query: ``[rows, heads, queries, head_dim]``, fp16, bf16 or fp32; the last dimension contiguous. Of latents
            ``head_dim + rest``.
        new_keys: ``[rows, kv_heads, queries, head_dim]``, likewise.
        new_values: The same shape, likewise. Of latents ``[rows, kv_heads, queries, rest]``.
        nodes: ``[3, capacity]`` int64: device address of each node's keys ``[kv_heads, length, head_dim]``, of its
            values, and elements from one KV head to the next in both; multiples of 16 bytes. Table, schedule
            and nodes must be complete before the preceding kernel in the stream starts, because they are read while
            it may still run (PDL).
        suffix: ``[4]`` int64: device address of the suffixes' keys ``[slots, kv_heads, capacity, head_dim]``, of their
            values, and elements from one slot and from one KV head to the next in both; written at ``lengths``.
        slots: ``[rows]`` int32: slot of each row's suffix; -1 for an inactive row, whose output is 0.
        lengths: ``[rows]`` int32: tokens in each suffix before this step. ``[3, rows]`` where suffixes are divided:
            tokens that are stored here, and of the new ones, counted from 0, the first that is, and the first after it
            that is not; both may be beyond the last. Not with a window.
        schedule: For these nodes, rows, and ``heads / kv_heads * queries`` packed queries.
        config: Launch parameters, with the block sizes of the schedule.
        scale: Factor on the scores, positive.
        soft_cap: When given, scores become ``soft_cap * tanh(scores / soft_cap)``.
        window: When given, a query sees only the last ``window`` tokens up to its position, counted over nodes in
            order of depth, suffix and new tokens.
        sinks: ``[heads]`` fp32: when given, attention sinks: one more score per query head, without a value, in the
            softmax's denominator and the log-sum-exp.
        biases: ``[heads, distances]`` fp32: when given, added to the score of a key by how many tokens it is before
            the query, counted like a window; the last for all farther keys. Not with a soft cap or divided suffixes.
        origins: ``[rows, >= longest suffix]`` int32, contiguous: when given, the slot that holds each token of each
            row's suffix (beam search). New tokens are written to the row's slot.
        into: When given, where to write the partial, contiguous: ``out`` in fp32 or the query's dtype, and the
            natural-log log-sum-exp ``[rows, heads, queries]`` in fp32.

    Returns:
        ``out`` ``[rows, heads, queries, head_dim]`` in the query's dtype, and None; or `into`.
    """
    check_tokens(query, new_keys, new_values)
    rows, heads, queries, head_dim = shape = (*query.shape[:3], new_keys.shape[3])
    kv_heads, rest, divided = new_keys.shape[1], query.shape[3] - head_dim, lengths.dim() > 1
    check_step(shape, (nodes, suffix, slots, lengths), sinks, biases, origins)
    check_combination(divided=divided, soft_cap=soft_cap, window=window, biases=biases)
    check_schedule(schedule, config, rows)
    check_numbers(scale, soft_cap, window)
    scores: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "window": window, "biases": biases}
    workspace = attend_nodes(query, nodes, lengths, schedule, config, kv_heads, **scores, rest=rest, latents=rest > 0)
    lse: Tensor | None = None
    if into is None:
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    else:
        check_partial("into", into, shape, query.dtype)
        out, lse = into
    options = _options(query, schedule, config, kv_heads, head_dim, lse=lse is not None, divided=divided)
    has_nodes, packed = options["DEPTHS"] > 0, heads // kv_heads * queries
    overlap_suffix = config.overlap_suffix and has_nodes
    # Tensor cores need at least 16 queries; what they compute goes through memory to be merged without the padding.
    block_p = max(16, power_of_two(packed)) if packed > 1 or overlap_suffix or rest else 1
    through_memory = overlap_suffix or (has_nodes and block_p > 1)
    suffix_partial = _partial(shape, query.device) if through_memory else (None, None)
    own_config = config.suffix or choose_suffix_config(
        rows,
        kv_heads,
        heads // kv_heads,
        queries,
        head_dim + rest,
        overlap_suffix=overlap_suffix,
        latents=rest > 0,
        shared_memory=shared_memory(query.device),
    )
    tables = (suffix, slots, lengths, *_unit_tables(schedule))
    partials = (*workspace, *suffix_partial, out, lse)
    strides = (*query.stride()[:3], *new_keys.stride()[:3], *new_values.stride()[:3])
    with launching(Kernel.FOREST, query.device):
        launch(
            attend_suffixes,
            (rows * kv_heads,),
            *(query, new_keys, new_values),
            *tables,
            *partials,
            *(schedule.overlap_suffix, sinks, biases, origins),
            *(rows, kv_heads, _block_m_log2(schedule), 0 if origins is None else origins.stride(0)),
            *(scale, soft_cap or 0.0, window or 0),
            *strides,
            REST=rest,
            BLOCK_R=max(16, power_of_two(rest)),
            BLOCK_P=block_p,
            BLOCK_Q=1 if block_p == 1 else 16,
            BLOCK_N=own_config.block_n,
            STAGES=own_config.stages,
            MERGE=own_config.merge,
            SINKS=sinks is not None,
            ORIGINS=origins is not None,
            OVERLAP_SUFFIX=overlap_suffix,
            num_warps=own_config.warps,
            **_placing(soft_cap, window, biases),
            **options,
        )
        if overlap_suffix:
            _merge(slots, schedule, workspace, suffix_partial, (out, lse), options)
    return out, lse


def forest_partial(
    query: Tensor,
    nodes: Tensor,
    slots: Tensor,
    schedule: Schedule,
    config: Config,
    *,
    kv_heads: int,
    scale: float,
    soft_cap: float | None = None,
    rest: int = 0,
    other: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to each row's nodes, without a causal rule.

    For cross-attention, layers that attend to suffixes by themselves, and nodes that are spread over devices: partials
    of each device's nodes merge to the partial of all (Tree Attention, section 5).

    Args:
        query: ``[rows, heads, queries, head_dim + rest]``, fp16, bf16 or fp32; the last dimension contiguous.
        nodes: As for `forest_decode`; with `rest` ``[4, capacity]``, the last the address of the other elements of
            keys, ``[length, rest]``.
        slots: ``[rows]`` int32: -1 for an inactive row, whose result is that of no keys.
        schedule: For these nodes, rows, and ``heads / kv_heads * queries`` packed queries.
        config: Launch parameters, with the block sizes of the schedule.
        scale: Factor on the scores, positive.
        soft_cap: When given, scores become ``soft_cap * tanh(scores / soft_cap)``.
        rest: Elements of keys that are the same for all KV heads, and are stored separately, once.
        other: When given, the partial of further keys, contiguous: ``out`` ``[rows, heads, queries, head_dim]`` in
            fp32 or the query's dtype, and the natural-log log-sum-exp ``[rows, heads, queries]``, fp32.

    Returns:
        ``out`` ``[rows, heads, queries, head_dim]`` and the natural-log log-sum-exp ``[rows, heads, queries]``, both
        fp32, or with `other` ``out`` in its dtype; 0 and ``-inf`` for rows without keys.
    """
    rows, heads, queries, width = query.shape
    shape = (rows, heads, queries, width - rest)
    check_query(query, kv_heads)
    check_table("nodes", nodes, (4 if rest else 3, *nodes.shape[1:2]), torch.int64)
    check_table("slots", slots, (rows,), torch.int32)
    check_schedule(schedule, config, rows)
    check_numbers(scale, soft_cap)
    if other is not None:
        check_partial("other", other, shape, query.dtype)
    out, lse = _partial(shape, query.device, torch.float32 if other is None else other[0].dtype)
    if not schedule.piece_count or not rows:
        return other or (out.zero_(), lse.fill_(-torch.inf))
    scores: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    workspace = attend_nodes(query, nodes, slots, schedule, config, kv_heads, **scores, rest=rest)
    with launching(Kernel.FOREST, query.device):
        options = _options(query, schedule, config, kv_heads, width - rest, lse=True, divided=False)
        _merge(slots, schedule, workspace, other or (None, None), (out, lse), options, other=other is not None)
    return out, lse


def _partial(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Memory for ``out`` of this shape, and for its log-sum-exp."""
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    return torch.empty(shape, dtype=dtype, device=device), lse


def _placing(soft_cap: float | None, window: int | None, biases: Tensor | None) -> dict[str, int]:
    """Compile-time arguments by which scores are capped, hidden and biased."""
    distances = 0 if biases is None else biases.shape[1]
    return {"SOFT_CAP": soft_cap is not None, "WINDOW": window is not None, "DISTANCES": distances}


def _common(query: Tensor, schedule: Schedule, config: Config, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Compile-time arguments and launch options of all kernels of a step.

    With programmatic dependent launch (PDL) they start before the previous kernel ends.
    """
    _, heads, queries, _ = query.shape
    overlap = config.overlap and schedule.piece_count > 0 and query.is_cuda
    overlap = overlap and compute_capability(query.device) >= (9, 0)
    options: dict[str, Any] = {"GROUP": heads // kv_heads, "QUERIES": queries, "HEAD_DIM": head_dim, "PDL": overlap}
    options["enable_fp_fusion"] = True  # Triton 3.9 warns about the default, which 3.10 changes
    return options | ({"launch_pdl": True} if overlap else {})


def _options(
    query: Tensor, schedule: Schedule, config: Config, kv_heads: int, head_dim: int, *, lse: bool, divided: bool
) -> dict[str, Any]:
    """Compile-time arguments and launch options of the kernels after `attend_nodes`."""
    options = _common(query, schedule, config, kv_heads, head_dim)
    tile, depths = power_of_two(options["GROUP"] * options["QUERIES"]), schedule.row_units.shape[0]
    sizes = {"BLOCK_D": max(16, power_of_two(head_dim)), "TILE": tile, "DEPTHS": depths}
    return options | sizes | {"LSE": lse, "DIVIDED": divided}


def _unit_tables(schedule: Schedule) -> tuple[Tensor, ...]:
    return schedule.row_units, schedule.row_offsets, schedule.row_tiles, schedule.unit_slots


def _block_m_log2(schedule: Schedule) -> int:
    """Logarithm of the packed queries of a tile, which is not compiled in: it differs between numbers of rows."""
    return schedule.block_m.bit_length() - 1


def _merge(
    slots: Tensor,
    schedule: Schedule,
    workspace: NodeWorkspace,
    suffix_partial: tuple[Tensor | None, Tensor | None],
    results: tuple[Tensor, Tensor | None],
    options: dict[str, Any],
    *,
    other: bool = False,
) -> None:
    """Merge the partials of each row's nodes, and of its suffix if `suffix_partial` is given, into `results`.

    With `other`, `suffix_partial` is a partial of other code, whose log-sum-exp is a natural logarithm.
    """
    rows, heads, _, head_dim = results[0].shape
    kv_heads = heads // options["GROUP"]
    merging = choose_merge_config(options["GROUP"] * options["QUERIES"], head_dim)
    launch(
        merge_rows,
        (triton.cdiv(rows, merging.rows) * kv_heads,),
        slots,
        *_unit_tables(schedule),
        *workspace,
        *suffix_partial,
        *results,
        *(schedule.overlap_suffix, rows, kv_heads, _block_m_log2(schedule)),
        ROWS=merging.rows,
        OWN=suffix_partial[0] is not None,
        OTHER=other,
        MERGE=merging.merge,
        num_warps=merging.warps,
        **options,
    )


PLANE = 1 << 30
"""Rows per plane: indices of rows and planes must fit 32 bits."""

ADDRESS_BITS = 49
"""Bits of an address on a GPU."""


class _Address(NamedTuple):
    """Stands for a descriptor's tensor: has what Triton reads of one."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@lru_cache
def all_memory(dtype: torch.dtype, block_n: int, head_dim: int, plane: int) -> TensorDescriptor:
    """A descriptor of all memory as ``[planes, plane, head_dim]``, in boxes of ``[1, block_n, head_dim]``.

    For rows of ``b`` bytes, address ``(i + 1) b`` is row ``i`` counted through all planes, because no tensor may begin
    at address zero.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.float16: float16, torch.bfloat16: bfloat16}[dtype]
    tile = NVMMASharedLayout.get_default_for([block_n, head_dim], element)
    box = NVMMASharedLayout(tile.swizzle_byte_width, 16, rank=3)
    row = head_dim * dtype.itemsize
    shape = [(1 << ADDRESS_BITS) // (plane * row), plane, head_dim]
    strides = [plane * head_dim, head_dim, 1]
    return TensorDescriptor(_Address(dtype, row), shape, strides, [1, block_n, head_dim], box)


class NodeWorkspace(NamedTuple):
    """Partials of the pieces of a schedule, in base 2; `Schedule.unit_slots` maps units to pieces."""

    out: Tensor  # ``[pieces, block_m, head_dim]`` fp32
    lse: Tensor  # ``[pieces, block_m]`` fp32, in base 2


def attend_nodes(
    query: Tensor,
    nodes: Tensor,
    lengths: Tensor,
    schedule: Schedule,
    config: Config,
    kv_heads: int,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    biases: Tensor | None = None,
    rest: int = 0,
    latents: bool = False,
) -> NodeWorkspace:
    """Launch the node kernel; arguments as for `forest_decode`.

    With `rest`, the last elements of keys are stored separately: those of latents as values, else of all KV heads at
    the fourth address of each node.
    """
    placed = window is not None or biases is not None
    if placed and config.hopper:
        raise ValueError("the Hopper kernel takes no window; choose_config(..., windowed=True) leaves it out")
    if config.chain > 1 and (config.hopper or placed):
        raise ValueError(f"chains of {config.chain} nodes need the portable kernel and no window")
    head_dim, device = query.shape[-1] - rest, query.device
    workspace = NodeWorkspace(*_partial((schedule.piece_count, schedule.block_m, head_dim), device))
    if not schedule.piece_count:
        return workspace
    tensors = (query, nodes, schedule.pieces, *workspace)
    strides = query.stride()[:3]
    options = _common(query, schedule, config, kv_heads, head_dim)
    options |= {"BLOCK_M": schedule.block_m, "BLOCK_N": schedule.block_n, "STAGES": config.stages}
    if not config.hopper:
        with launching(Kernel.FOREST, device):
            launch(
                node_partials,
                (schedule.programs,),
                *tensors,
                *(schedule.chains, schedule.contexts, lengths, biases, nodes.shape[1]),
                *(scale, soft_cap or 0.0, window or 0),
                *strides,
                BLOCK_D=max(16, power_of_two(head_dim)),
                REST=rest,
                BLOCK_R=max(16, power_of_two(rest)),
                LATENTS=latents,
                CHAIN=config.chain,
                num_warps=config.warps,
                **_placing(soft_cap, window, biases),
                **options,
            )
        return workspace

    def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
        if size > schedule.scratch.nbytes:
            raise RuntimeError(
                f"a launch needs {size} bytes for descriptors, but its schedule has {schedule.scratch.nbytes}"
            )
        return schedule.scratch

    def launch_hopper() -> None:
        from .hopper import hopper_node_partials  # needs Gluon

        triton.set_allocator(scratch)
        numbers = (nodes.shape[1], kv_heads, scale, soft_cap or 0.0)
        memory = all_memory(query.dtype, schedule.block_n, head_dim, PLANE)
        options.update(SOFT_CAP=soft_cap is not None, PLANE=PLANE, ADDRESS_BITS=ADDRESS_BITS)
        launch(
            hopper_node_partials, (schedule.programs,), *tensors, memory, *numbers, *strides, **options, num_warps=4
        )

    with launching(Kernel.HOPPER, device):
        copy_context().run(launch_hopper)  # keeps Triton's allocator as it was outside
    return workspace
