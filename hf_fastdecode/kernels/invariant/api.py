"""`linear` and `attend`: a row's bits do not depend on the other rows of a launch, nor on where it stands in it.

Tiles, the instructions that multiply them, and the order in which a program adds up are the same for any number of
rows, so that a decode step and a forward pass over whole rows give a token the same bits. Nothing is cut into parts by
the number of rows or of multiprocessors (no split-K and no stream-K: He et al., "Defeating nondeterminism in LLM
inference", 2025, on which rules make kernels batch-invariant). Half precision and fp32, by fp32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ahead import launch_named
from ..device import interpreted, power_of_two, triton_is_installed
from ..failures import Kernel
from ..limits import FLOATS, are_contiguous, check_numbers, refused
from ..pointwise.gradients import Gradients, Operator
from .schedule import Config, Tables

LINEAR: Final = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 3, "num_warps": 4}
"""The tile of all products."""

MOST_HEAD_DIM: Final = 128
_MERGED = 16  # heads of queries that a program merges


def attention_config(head_dim: int, dtype: torch.dtype) -> Config:
    """The constants of attention with heads of so many elements."""
    if dtype == torch.float32:  # which no tensor core multiplies: larger tiles do not fit in registers
        return Config(16, 16, 512, 1)
    return Config(64, 64, 512, 2)


def refusal(device: torch.device) -> str | None:
    """Why these kernels do not run on a device; None if they do."""
    if not triton_is_installed():
        return "triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"its kernels run on CUDA devices, got {device.type!r} (TRITON_INTERPRET=1 runs them slowly on a CPU)"
    return None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in a fixed order of sums; gradients are PyTorch's products.

    Args:
        x: ``[..., width]``, fp32, fp16 or bf16.
        weight: ``[columns, width]``, as `bias` in the same dtype.
        bias: ``[columns]``.

    Returns:
        ``[..., columns]`` in the dtype of `x`.

    Raises:
        ValueError: Other shapes or dtypes.
        KernelFailedError: The kernel cannot be compiled or launched.
    """
    columns, width = weight.shape
    alike = x.dtype == weight.dtype and x.dtype in FLOATS and (bias is None or bias.dtype == x.dtype)
    if not alike or x.shape[-1] != width or (bias is not None and bias.shape != (columns,)):
        raise refused("linear takes x [..., width], weight [columns, width] and bias [columns] of a dtype", x, weight)
    x, weight = aligned(x), aligned(weight)
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    rows = x.numel() // width
    if rows:
        grid = -(-rows // LINEAR["BLOCK_M"]), -(-columns // LINEAR["BLOCK_N"])
        tensors = x, weight, out if bias is None else bias.contiguous(), out
        sizes = {"COLUMNS": columns, "WIDTH": width, "BIAS": bias is not None, "WIDE": _wide(x)}
        launch_named(Kernel.INVARIANT, "invariant.kernel.linear", x.device, grid, *tensors, rows, **sizes, **LINEAR)
    return out


def _gradients(grads: tuple[Tensor], needed: Sequence[bool], x: Tensor, weight: Tensor, *bias: Tensor) -> Gradients:
    (grad,) = grads
    rows = grad.flatten(0, -2)
    of_x = grad @ weight if needed[0] else None
    of_weight = rows.T @ x.flatten(0, -2) if needed[1] else None
    return of_x, of_weight, *(rows.sum(0) if needs else None for needs in needed[2:])


linear = Operator(_linear, F.linear, _gradients)
"""`_linear` with its gradients; without a bias it takes two tensors."""


def _wide(part: Tensor) -> bool:
    return interpreted() and part.dtype == torch.bfloat16


def aligned(part: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on: kernels are compiled anew for other addresses."""
    part = part.contiguous()
    return part if part.data_ptr() % 16 == 0 else part.clone()


def addresses(runs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Where `attend` finds runs of keys and values: ``[runs, 6]`` int64.

    They are ``[kv_heads, length, head_dim]`` each, or several at once, ``[runs, kv_heads, length, head_dim]``.
    """
    rows: list[tuple[int, ...]] = []
    for keys, values in runs:
        strides = *keys.stride()[-3:-1], *values.stride()[-3:-1]
        of_keys, of_values = (part.stride(0) * part.itemsize if part.dim() == 4 else 0 for part in (keys, values))
        for run in range(len(keys) if keys.dim() == 4 else 1):
            rows.append((keys.data_ptr() + run * of_keys, values.data_ptr() + run * of_values, *strides))
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(runs[0][0].device)


def attend(
    query: Tensor, found_at: Tensor, launches: Sequence[Tables], kv_heads: int, scale: float, config: Config
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its path, in a fixed order of sums. There is no backward pass.

    Args:
        query: ``[queries, heads, head_dim]``, fp32, fp16 or bf16.
        found_at: As `addresses` returns it, of runs in the query's dtype whose rows begin at multiples of 16 bytes and
            are contiguous. They must stay alive, and are not checked.
        launches: As `schedule` returns them for these queries, on the device.

    Returns:
        ``out`` ``[queries, heads, head_dim]`` in the query's dtype, and ``lse`` ``[heads, queries]`` fp32.

    Raises:
        ValueError: Other shapes or dtypes.
        KernelFailedError: The kernels cannot be compiled or launched.
    """
    queries, heads, head_dim = query.shape
    check_numbers(scale)
    every = [part for one in launches for part in one[1:]]
    if heads % kv_heads or head_dim > MOST_HEAD_DIM or query.dtype not in FLOATS or not are_contiguous(*every):
        raise refused(f"attend takes queries [queries, heads, head_dim], at most {MOST_HEAD_DIM}", query)
    query, device = aligned(query), query.device
    out = torch.empty_like(query), torch.empty(heads, queries, dtype=torch.float32, device=device)
    sizes: dict[str, Any] = {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_D": max(16, power_of_two(head_dim))}
    tile = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SPLIT": config.split, "STAGES": config.stages}
    by_row = {**sizes, "BLOCK_R": _MERGED}
    by_item: dict[str, Any] = {**sizes, **tile, "GROUP": heads // kv_heads, "WIDE": _wide(query), "num_warps": 4}
    for first, items, entries, runs, slots in launches:
        sizes_of = (len(entries), heads, head_dim), (len(entries), heads), (len(entries), heads)
        partials = [torch.empty(size, dtype=torch.float32, device=device) for size in sizes_of]  # aligned, each
        tables = query, items, entries, runs, found_at, *partials
        grid: tuple[int, ...] = (len(items), kv_heads)
        launch_named(Kernel.INVARIANT, "invariant.kernel.attend_split", device, grid, *tables, float(scale), **by_item)
        grid, numbers = (-(-len(slots) * heads // _MERGED),), (first, len(slots), queries, slots.shape[1])
        merged = slots, *partials, *out, *numbers
        launch_named(Kernel.INVARIANT, "invariant.kernel.merge_splits", device, grid, *merged, **by_row)
    return out
