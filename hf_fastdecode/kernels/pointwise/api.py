"""`rms_norm`, `gated_rms_norm`, `rotate` and `gated`: one launch each, in the forms that models have.

They compute what PyTorch's operators do, with the same roundings, in a single pass over memory. `gradients`
joins them with their gradients. A form says where elements are rounded to the input's dtype, in which implementations
of one formula differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ahead import launch_named
from ..device import multiprocessors, overlap_options, power_of_two
from ..failures import Kernel
from ..limits import are_contiguous, refused


class NormForm(Enum):
    """How ``x / rms(x)``, computed in fp32, is multiplied by the weight."""

    ROUNDED = 0
    """``weight * normalized.to(dtype)``, as in Llama."""

    WHOLE = 1
    """``(weight * normalized).to(dtype)``, as in OLMo 2."""

    PLUS_ONE = 2
    """``((1 + weight) * normalized).to(dtype)``, as in Gemma."""


class GatedNormForm(Enum):
    """Whether ``silu(gate)``, in fp32, is applied before or after the norm; weights multiply as in `ROUNDED`."""

    AFTER = 0
    """``(weight * normalized) * silu(gate)``, as in Qwen3-Next."""

    BEFORE = 1
    """``weight * normalized(x * silu(gate))``, in groups of elements, as in Mamba-2."""


class RotaryForm(Enum):
    """How ``x * cos + rotate_half(x) * sin`` is rounded."""

    ROUNDED = 0
    """Products and sum, as PyTorch's operators on half precision do; most models."""

    WHOLE = 1
    """The sum alone: the model rotates in fp32."""


class Activation(Enum):
    """The function of the gate, whose value is rounded before it is multiplied."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2


MOST_COLUMNS = 16384
"""Elements of a row of `rms_norm`, which a program holds whole."""

MOST_NORMALIZED = 1024
"""Elements of a head that `rotate` normalizes."""

_ELEMENTS = 1024  # of a program of `rms_norm` whose rows are shorter, or of `gated`
_HEADS = 8  # of a program of `rotate`

# Of gradients of `rms_norm`; on an H200, other sizes and more programs take longer.
_GRADIENT_ELEMENTS = 4096  # of a program's block of rows, if these are shorter
_GRADIENT_WARPS = 16  # of a multiprocessor


class Plus(NamedTuple):
    """An addend, and the memory of the sum."""

    addend: Tensor  # of the shape and dtype of what it is added to, contiguous
    total: Tensor  # memory for the sum, likewise


class HeadNorms(NamedTuple):
    """`rms_norm` of each head of queries and keys, before they are rotated, and memory for the normalized heads."""

    query_weight: Tensor  # [head_dim], contiguous, of the dtype of queries for `NormForm.ROUNDED`
    key_weight: Tensor  # likewise
    eps: float
    form: NormForm
    queries: Tensor  # of the shape, strides and dtype of what is rotated
    keys: Tensor  # likewise


def _launch(name: str, grid: tuple[int, ...], x: Tensor, /, *arguments: Any, **options: Any) -> None:
    launch_named(Kernel.POINTWISE, f"pointwise.kernel.{name}", x.device, grid, x, *arguments, **options)


@lru_cache
def _norm_options(columns: int, device: torch.device, elements: int = _ELEMENTS) -> tuple[int, dict[str, int]]:
    """Rows of a program that normalizes so many columns, and its launch options."""
    block = power_of_two(columns)
    rows = max(1, elements // block)
    warps = min(16, max(4, rows * block // 512))
    return rows, {"COLUMNS": columns, "BLOCK_R": rows, "BLOCK_C": block, "num_warps": warps, **overlap_options(device)}


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, form: NormForm, plus: Plus | None = None, *, out: Tensor | None = None
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` along the last axis, times the weight.

    Args:
        x: ``[..., columns]``, contiguous, at most `MOST_COLUMNS` of them, fp32, fp16 or bf16.
        weight: ``[columns]``, of the same dtype for `NormForm.ROUNDED`.
        eps: Added to the mean.
        form: Where the result is rounded.
        plus: What is added to `x` before, and where the sum is written.
        out: Memory for the result, as `x`; new memory when None.

    Returns:
        As `x`, in its dtype.
    """
    columns, (addend, total) = x.shape[-1], plus or (x, x)
    out = torch.empty_like(x) if out is None else out
    alike = weight.shape == (columns,) and addend.shape == x.shape == total.shape == out.shape
    if not alike or not are_contiguous(x, weight, addend, total, out) or columns > MOST_COLUMNS:
        takes = f"contiguous x [..., columns] and weight [columns] of up to {MOST_COLUMNS} columns"
        raise refused(f"rms_norm takes {takes}", x, weight)
    rows = x.numel() // columns
    at_once, options = _norm_options(columns, x.device)
    options = options | {"ADDS": plus is not None, "ROUNDING": form.value, "enable_fp_fusion": False}  # as of `rotate`
    _launch("normalize", (-(-rows // at_once),), x, addend, total, weight, out, rows, eps, **options)
    return out


def rms_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, form: NormForm, *, of_weight: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `rms_norm` in `x` and, with `of_weight`, in the weight, rounded as those of PyTorch's operators.

    Args:
        grad: The result's gradient, in the dtype and shape of `x`.
    """
    columns, x, grad = x.shape[-1], x.contiguous(), grad.contiguous()
    if weight.shape != (columns,) or grad.shape != x.shape or not weight.is_contiguous() or columns > MOST_COLUMNS:
        takes = f"gradients of x's shape and contiguous weight [columns] of up to {MOST_COLUMNS} columns"
        raise refused(f"rms_norm takes {takes}", grad, x, weight)
    rows, grad_x = x.numel() // columns, torch.empty_like(x)
    at_once, options = _norm_options(columns, x.device, _GRADIENT_ELEMENTS)
    programs = min(-(-rows // at_once), _GRADIENT_WARPS // options["num_warps"] * multiprocessors(x.device))
    sums = torch.empty((programs, columns), dtype=torch.float32, device=x.device) if of_weight else None
    tensors, stages = (x, grad, weight, grad_x, sums), 3 if columns <= 2 * _GRADIENT_ELEMENTS else 2
    options = options | {"OF_WEIGHT": of_weight, "STAGES": stages}
    _launch("normalize_backward", (programs,), *tensors, rows, eps, ROUNDING=form.value, **options)
    return grad_x, sums.sum(0).to(weight.dtype) if sums is not None else None


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: GatedNormForm, *, group: int | None = None
) -> Tensor:
    """`rms_norm` along the last axis, or in groups of it, with a gate.

    Args:
        x: ``[..., columns]``, contiguous, fp32, fp16 or bf16.
        gate: Likewise, in any dtype; rows may be strided, as halves of one product are.
        weight: ``[columns]``, contiguous, in the dtype of `x`.
        eps: Added to the mean.
        form: Where the gate comes in.
        group: Elements of a group, at most `MOST_COLUMNS`; all columns when None.

    Returns:
        As `x`, in its dtype.
    """
    columns = x.shape[-1]
    group, gates = group or columns, gate.reshape(-1, columns)
    alike = gate.shape == x.shape and weight.shape == (columns,) and weight.dtype == x.dtype and columns % group == 0
    if not alike or not are_contiguous(x, weight) or group > MOST_COLUMNS:
        takes = "contiguous x [..., columns], gate of its shape and weight [columns] of its dtype, in groups of up to "
        raise refused(f"gated_rms_norm takes {takes}{MOST_COLUMNS}", x, gate, weight)
    if gates.stride(1) != 1:
        gates = gates.contiguous()
    rows, out = x.numel() // group, torch.empty_like(x)
    at_once, options = _norm_options(group, x.device)
    options = options | {"GROUPS": columns // group, "AFTER": form is GatedNormForm.AFTER}
    tensors = x, gates, weight, out
    _launch("normalize_gated", (-(-rows // at_once),), *tensors, rows, gates.stride(0), eps, **options)
    return out


def rotate(
    queries: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: RotaryForm,
    *,
    halves: bool = False,
    backward: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys: ``x * cos + rotate_half(x) * sin``, of each head's first elements.

    Args:
        queries: ``[batch, query_heads, length, head_dim]``, contiguous along head_dim.
        keys: ``[batch, key_heads, length, head_dim]``, likewise.
        cos: ``[batch or 1, length, rotary]``, rotary even and at most head_dim; with `halves` rotary / 2, once for
            both halves.
        sin: Likewise.
        form: Where results are rounded.
        halves: Whether `cos` and `sin` are half as long as what is rotated, as in gpt-oss.
        backward: Whether to compute the gradients of queries and keys, given those of their rotations.
        norms: Norms of heads of up to `MOST_NORMALIZED` elements, which are rotated then; without gradients.

    Returns:
        Rotated queries and keys, in new memory of the same strides where these are dense.
    """
    batch, query_heads, length, head_dim = queries.shape
    rotary, key_heads = cos.shape[-1] * (2 if halves else 1), keys.shape[1]
    shapes = keys.shape == (batch, key_heads, length, head_dim) and cos.shape == sin.shape
    shapes = shapes and cos.shape[:2] in ((batch, length), (1, length)) and rotary <= head_dim and rotary % 2 == 0
    inner = queries.stride(-1), keys.stride(-1), cos.stride(-1)
    if not shapes or inner != (1, 1, 1) or cos.stride() != sin.stride():
        takes = "queries and keys [batch, heads, length, head_dim] and cos and sin [batch or 1, length, rotary]"
        raise refused(f"rotate takes {takes}, contiguous along the last axis", queries, keys, cos, sin)
    outs = torch.empty_like(queries), torch.empty_like(keys)
    dense = outs[0].stride() == queries.stride() and outs[1].stride() == keys.stride()
    if norms is not None and (backward or not dense or not _fit(norms, queries, keys)):
        takes = (
            f"dense heads, memory alike, contiguous weights [head_dim] of up to {MOST_NORMALIZED}, and no gradients"
        )
        raise refused(f"rotate with norms takes {takes}", queries, keys, norms.query_weight, norms.key_weight)
    if not dense:  # views with gaps
        return rotate(queries.contiguous(), keys.contiguous(), cos, sin, form, halves=halves, backward=backward)
    normalizing: tuple[Any, ...] = (None, None, None, None, 0.0)
    heads = _HEADS
    if norms is not None:
        normalizing = *norms[:2], *norms[4:], norms.eps
        heads, _ = _norm_options(head_dim, queries.device)
    _launch(
        "rotate",
        (batch * length, -(-query_heads // heads) - (-key_heads // heads)),
        *(queries, keys, cos, sin, *outs, length),
        *(*queries.stride()[:3], *keys.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)),
        *normalizing,
        QUERY_HEADS=query_heads,
        KEY_HEADS=key_heads,
        HEAD_DIM=head_dim,
        ROTARY=rotary,
        HALVES=halves,
        ROUNDING=form.value,
        BACKWARD=backward,
        NORM=None if norms is None else norms.form.value,
        BLOCK_H=heads,
        enable_fp_fusion=False,  # a product and a sum in one instruction would not round the product
        **overlap_options(queries.device),
    )
    return outs


def _fit(norms: HeadNorms, queries: Tensor, keys: Tensor) -> bool:
    """Whether a launch that rotates can normalize these heads."""
    weights, width = norms[:2], queries.shape[-1]
    if norms.form is NormForm.ROUNDED and any(weight.dtype != queries.dtype for weight in weights):
        return False
    memory = ((norms.queries, queries), (norms.keys, keys))
    alike = all((one.shape, one.stride(), one.dtype) == (x.shape, x.stride(), x.dtype) for one, x in memory)
    fit = all(weight.shape == (width,) and weight.is_contiguous() for weight in weights)
    return alike and fit and width <= MOST_NORMALIZED


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """``activation(gate) * up``.

    Args:
        gate: ``[..., columns]``; rows may be strided, as halves of one product are.
        up: Likewise.

    Returns:
        ``[..., columns]``, contiguous, in the dtype of `gate`.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise refused("gated takes equal shapes and dtypes", gate, up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch_gate("gate", (gate, up), (out,), activation)
    return out


def gated_gradients(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Gradients of `gated` in `gate` and `up`, contiguous, given that of its result; see there."""
    if not grad.shape == gate.shape == up.shape or not grad.dtype == gate.dtype == up.dtype:
        raise refused("gated takes equal shapes and dtypes", grad, gate, up)
    grad_gate, grad_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    _launch_gate("gate_backward", (gate, up, grad), (grad_gate, grad_up), activation)
    return grad_gate, grad_up


def _launch_gate(name: str, given: Sequence[Tensor], outs: Sequence[Tensor], activation: Activation) -> None:
    columns = given[0].shape[-1]
    rows = [part.reshape(-1, columns) for part in given]
    rows = [part if part.stride(1) == 1 else part.contiguous() for part in rows]
    grid, strides = (len(rows[0]) * -(-columns // _ELEMENTS),), [part.stride(0) for part in rows]
    options = {"COLUMNS": columns, "ACTIVATION": activation.value, "BLOCK": _ELEMENTS}
    _launch(name, grid, *rows, *outs, *strides, **options)
