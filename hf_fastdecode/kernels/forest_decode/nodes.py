"""Launch of the node kernel: the first of a decode step, attention of all rows over their nodes.

TMA, the bulk tensor copy engine of Hopper GPUs, reads through descriptors. Making one per node costs a kernel some
microseconds before its first load. One descriptor whose tensor begins near address zero and covers all memory finds
rows of one length anywhere; only the tiles that a kernel loads are read.
"""

from __future__ import annotations

from contextvars import copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..ahead import launch
from ..failures import Kernel, launching
from .config import Config
from .limits import compute_capability
from .node_kernel import node_partials
from .schedule import Schedule

if TYPE_CHECKING:  # only some versions of Triton have it
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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
    """Partials of the pieces of a schedule, in base 2; `Schedule.unit_slots` maps units to pieces.

    Attributes:
        out: ``[pieces, block_m, head_dim]`` fp32.
        lse: ``[pieces, block_m]`` fp32, in base 2.
    """

    out: Tensor
    lse: Tensor


def overlaps(query: Tensor, schedule: Schedule, config: Config) -> bool:
    """Whether kernels of a step start before the previous one ends (programmatic dependent launch, PDL)."""
    if not (config.overlap and schedule.piece_count > 0 and query.is_cuda):
        return False
    return compute_capability(query.device) >= (9, 0)


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

    With `rest`, the last numbers of keys lie apart: those of latents in the place of values, else of all KV heads at
    the fourth address of each node.

    Raises:
        ValueError: A window, or biases by distance, are combined with the Hopper kernel or chains.
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    placed = window is not None or biases is not None
    if placed and config.hopper:
        raise ValueError("the Hopper kernel takes no window; choose_config(..., windowed=True) leaves it out")
    if config.chain > 1 and (config.hopper or placed):
        raise ValueError(f"chains of {config.chain} nodes need the portable kernel and no window")
    heads, queries, width = query.shape[1:]
    head_dim = width - rest
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    workspace = NodeWorkspace(
        torch.empty(schedule.piece_count, schedule.block_m, head_dim, **fp32),
        torch.empty(schedule.piece_count, schedule.block_m, **fp32),
    )
    if not schedule.piece_count:
        return workspace
    overlap = overlaps(query, schedule, config)
    tensors = (query, nodes, schedule.pieces, *workspace)
    strides = query.stride()[:3]
    options: dict[str, Any] = {
        "GROUP": heads // kv_heads,
        "QUERIES": queries,
        "HEAD_DIM": head_dim,
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "SOFT_CAP": soft_cap is not None,
        "STAGES": config.stages,
        "PDL": overlap,
        "enable_fp_fusion": True,  # Triton 3.9 warns about the default, which 3.10 changes
    }
    if overlap:
        options["launch_pdl"] = True
    if not config.hopper:
        with launching(Kernel.FOREST, query.device):
            launch(
                node_partials,
                (schedule.programs,),
                *tensors,
                schedule.chains,
                schedule.contexts,
                lengths,
                biases if biases is not None else lengths,
                nodes.shape[1],
                scale,
                soft_cap or 0.0,
                window or 0,
                *strides,
                **options,
                BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
                REST=rest,
                BLOCK_R=max(16, triton.next_power_of_2(rest)),
                LATENTS=latents,
                WINDOW=window is not None,
                DISTANCES=0 if biases is None else biases.shape[1],
                CHAIN=config.chain,
                num_warps=config.warps,
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
        options.update(PLANE=PLANE, ADDRESS_BITS=ADDRESS_BITS)
        launch(
            hopper_node_partials, (schedule.programs,), *tensors, memory, *numbers, *strides, **options, num_warps=4
        )

    with launching(Kernel.HOPPER, query.device):
        copy_context().run(launch_hopper)  # keeps Triton's allocator as it was outside
    return workspace
