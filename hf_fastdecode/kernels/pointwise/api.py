"""`rms_norm`, `gated_rms_norm`, `rotate` and `gated`: one launch each, in the forms that models have.

They compute what PyTorch's operators do, with the same roundings, in a single pass over memory. They have no backward
pass. A form says where elements are rounded to the input's dtype, in which implementations of one formula differ.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..ahead import launch
from ..device import overlap_options
from ..failures import Kernel, launching


class NormForm(Enum):
    """How ``x / rms(x)``, computed in fp32, is multiplied by the weight."""

    ROUNDED = 0
    """``weight * normalized.to(dtype)``, as in Llama."""

    WHOLE = 1
    """``(weight * normalized).to(dtype)``, as in OLMo 2."""

    PLUS_ONE = 2
    """``((1 + weight) * normalized).to(dtype)``, as in Gemma."""


class GatedNormForm(Enum):
    """Where ``silu(gate)``, computed in fp32, comes in; the weight multiplies rounded elements, as `ROUNDED`."""

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

_NUMBERS = 1024  # of a program of `rms_norm` whose rows are shorter, or of `gated`
_HEADS = 8  # of a program of `rotate`


class Plus(NamedTuple):
    """A sum on the way.

    Attributes:
        addend: Of the shape and dtype of what it is added to, contiguous.
        total: Memory for the sum, likewise.
    """

    addend: Tensor
    total: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm, plus: Plus | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` along the last axis, times the weight.

    Args:
        x: ``[..., columns]``, contiguous, at most `MOST_COLUMNS` of them, fp32, fp16 or bf16.
        weight: ``[columns]``, of the same dtype for `NormForm.ROUNDED`.
        eps: Added to the mean.
        form: Where the result is rounded.
        plus: What is added to `x` before, and where the sum is written.

    Returns:
        As `x`, in its dtype.

    Raises:
        ValueError: Shapes or strides are others.
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    columns, (addend, total) = x.shape[-1], plus or (x, x)
    contiguous = all(part.is_contiguous() for part in (x, weight, addend, total))
    alike = weight.shape == (columns,) and addend.shape == x.shape == total.shape
    if not contiguous or not alike or columns > MOST_COLUMNS:
        raise ValueError(
            f"rms_norm takes contiguous x [..., columns] and weight [columns] of up to {MOST_COLUMNS} columns, got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    block = _power_of_two(columns)
    at_once = max(1, _NUMBERS // block)
    rows, out = x.numel() // columns, torch.empty_like(x)
    with launching(Kernel.POINTWISE, x.device):
        from . import kernel  # it imports triton, which may be missing

        launch(
            kernel.normalize,
            (-(-rows // at_once),),
            x,
            addend,
            total,
            weight,
            out,
            rows,
            eps,
            COLUMNS=columns,
            ADDS=plus is not None,
            ROUNDING=form.value,
            BLOCK_R=at_once,
            BLOCK_C=block,
            num_warps=min(16, max(4, at_once * block // 512)),
            **overlap_options(x.device),
        )
    return out


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

    Raises:
        ValueError: Shapes, strides or dtypes are others.
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    columns = x.shape[-1]
    group, gates = group or columns, gate.reshape(-1, columns)
    alike = gate.shape == x.shape and weight.shape == (columns,) and weight.dtype == x.dtype and columns % group == 0
    if not alike or not (x.is_contiguous() and weight.is_contiguous()) or group > MOST_COLUMNS:
        raise ValueError(
            f"gated_rms_norm takes contiguous x [..., columns], gate of its shape and weight [columns] of its dtype, "
            f"in groups of up to {MOST_COLUMNS}, got {tuple(x.shape)}, {tuple(gate.shape)} and {tuple(weight.shape)}"
        )
    if gates.stride(1) != 1:
        gates = gates.contiguous()
    block = _power_of_two(group)
    at_once = max(1, _NUMBERS // block)
    rows, out = x.numel() // group, torch.empty_like(x)
    with launching(Kernel.POINTWISE, x.device):
        from . import kernel  # it imports triton, which may be missing

        launch(
            kernel.normalize_gated,
            (-(-rows // at_once),),
            x,
            gates,
            weight,
            out,
            rows,
            gates.stride(0),
            eps,
            COLUMNS=group,
            GROUPS=columns // group,
            AFTER=form is GatedNormForm.AFTER,
            BLOCK_R=at_once,
            BLOCK_C=block,
            num_warps=min(16, max(4, at_once * block // 512)),
            **overlap_options(x.device),
        )
    return out


def rotate(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm, *, halves: bool = False
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

    Returns:
        Rotated queries and keys, in new memory of the same strides where these are dense.

    Raises:
        ValueError: Shapes or strides are others.
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    batch, query_heads, length, head_dim = queries.shape
    rotary, key_heads = cos.shape[-1] * (2 if halves else 1), keys.shape[1]
    shapes = keys.shape == (batch, key_heads, length, head_dim) and cos.shape == sin.shape
    shapes = shapes and cos.shape[:2] in ((batch, length), (1, length)) and rotary <= head_dim and rotary % 2 == 0
    if not shapes or any(part.stride(-1) != 1 for part in (queries, keys, cos, sin)) or cos.stride() != sin.stride():
        raise ValueError(
            "rotate takes queries and keys [batch, heads, length, head_dim] and cos and sin [batch or 1, length, "
            f"rotary], contiguous along the last axis, got {[tuple(part.shape) for part in (queries, keys, cos, sin)]}"
        )
    outs = torch.empty_like(queries), torch.empty_like(keys)
    if outs[0].stride() != queries.stride() or outs[1].stride() != keys.stride():  # views with gaps
        return rotate(queries.contiguous(), keys.contiguous(), cos, sin, form, halves=halves)
    with launching(Kernel.POINTWISE, queries.device):
        from . import kernel  # it imports triton, which may be missing

        launch(
            kernel.rotate,
            (batch * length, -(-query_heads // _HEADS) - (-key_heads // _HEADS)),
            queries,
            keys,
            cos,
            sin,
            *outs,
            length,
            *queries.stride()[:3],
            *keys.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1),
            QUERY_HEADS=query_heads,
            KEY_HEADS=key_heads,
            HEAD_DIM=head_dim,
            ROTARY=rotary,
            HALVES=halves,
            ROUNDING=form.value,
            BLOCK_H=_HEADS,
            BLOCK_D=_power_of_two(rotary // 2),
            BLOCK_REST=_power_of_two(max(1, head_dim - rotary)),
            enable_fp_fusion=False,  # a product and a sum in one instruction would not round the product
            **overlap_options(queries.device),
        )
    return outs


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """``activation(gate) * up``.

    Args:
        gate: ``[..., columns]``; rows may be strided, as halves of one product are.
        up: Likewise.

    Returns:
        ``[..., columns]``, contiguous, in the dtype of `gate`.

    Raises:
        ValueError: Shapes or dtypes differ.
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gated takes equal shapes and dtypes, got {tuple(gate.shape)} and {tuple(up.shape)}")
    columns = gate.shape[-1]
    gates, ups = gate.reshape(-1, columns), up.reshape(-1, columns)
    if gates.stride(1) != 1 or ups.stride(1) != 1:
        gates, ups = gates.contiguous(), ups.contiguous()
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    with launching(Kernel.POINTWISE, gate.device):
        from . import kernel  # it imports triton, which may be missing

        launch(
            kernel.gate,
            (len(gates) * -(-columns // _NUMBERS),),
            gates,
            ups,
            out,
            gates.stride(0),
            ups.stride(0),
            COLUMNS=columns,
            ACTIVATION=activation.value,
            BLOCK=_NUMBERS,
        )
    return out


def _power_of_two(number: int) -> int:
    """The least power of two that is at least `number`; Triton's own function takes as long as a launch."""
    return 1 << (number - 1).bit_length()
