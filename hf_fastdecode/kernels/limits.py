"""Checks that operators share: which tensors, devices and dtypes their kernels serve, and errors for other arguments.

A *refusal* is the reason why a kernel does not serve some tensors, for callers that then choose another
implementation. Checks raise ValueError against out-of-bounds accesses and division by zero. The contents of device
tensors are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .device import compute_capability, interpreted, triton_is_installed
from .failures import Kernel, failure

MAX_HEAD_DIM: Final = 256
HALF_PRECISION: Final = (torch.float16, torch.bfloat16)
FLOATS: Final = (*HALF_PRECISION, torch.float32)


def refusal_of_any_shape(keys: Tensor, *others: Tensor, dtypes: Sequence[torch.dtype] = HALF_PRECISION) -> str | None:
    """Why attention kernels do not support cached keys of this dtype and device, or gradients; None when they do.

    Args:
        keys: Cached keys.
        others: Other tensors of the call.
        dtypes: Dtypes that the keys may have; any where Triton interprets.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for part in (keys, *others)):
        return "it computes no gradients; call it under torch.no_grad()"
    if not triton_is_installed():
        return "triton is not installed"
    if keys.device.type != "cuda" and not interpreted():
        return f"it runs on CUDA devices, got {keys.device.type!r}"
    if keys.dtype not in dtypes and not interpreted():  # Triton's dot computes float32 in tf32
        *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it takes {', '.join(names)} and {last}, got {keys.dtype}"
    if keys.device.type == "cuda" and compute_capability(keys.device) < (8, 0):
        return f"it needs compute capability 8.0, got {'.'.join(map(str, compute_capability(keys.device)))}"
    return None


def refusal_of_mixture(parts: Sequence[Tensor]) -> str | None:
    """Why queries, keys and values of different dtypes or devices are refused; None when they have one of each."""
    kinds = {(part.dtype, part.device) for part in parts}
    if len(kinds) > 1:  # kernels may read keys through raw addresses, as the query's dtype
        return f"query, keys and values need one dtype and device, got {', '.join(sorted(map(str, kinds)))}"
    return None


def refusal_of_operands(x: Tensor, *parameters: Tensor, of_other_dtypes: Sequence[Tensor] = ()) -> str | None:
    """Why kernels of a module's products do not read these tensors, whatever their shapes; None when they do.

    Args:
        x: Hidden states.
        parameters: Weights and biases.
        of_other_dtypes: Tensors of any dtype that are not parameters.
    """
    kinds = {(type(part), part.layout, part.dtype, part.device) for part in (x, *parameters)}
    plain = {(kind, torch.strided, x.dtype, x.device) for kind in (Tensor, torch.nn.Parameter)}
    if not kinds <= plain or any(type(part) is not Tensor for part in of_other_dtypes):
        return "it takes plain tensors of one dtype and device"
    if any(part.device != x.device for part in of_other_dtypes):
        return "it takes tensors of one device"
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype:
        return "autocast chooses another dtype"
    if torch.is_grad_enabled() and any(part.requires_grad for part in (x, *parameters, *of_other_dtypes)):
        return "it computes no gradients"
    return None


def refusal_in_half(x: Tensor, kernel: Kernel) -> str | None:
    """Why a kernel does not run in the dtype of `x` or on its device, or failed there; None when it runs."""
    if x.dtype not in HALF_PRECISION and not interpreted():
        return f"it takes fp16 and bf16, got {x.dtype}"
    if not interpreted() and (x.device.type != "cuda" or compute_capability(x.device) < (8, 0)):
        return "it runs on CUDA devices of compute capability 8.0"
    return failure(kernel, x.device)


def refusal_of_weights(weights: Sequence[Tensor]) -> str | None:
    """Why kernels do not read weights that lie like these, which must be contiguous and aligned; None when they do."""
    if any(not part.is_contiguous() or part.data_ptr() % 16 for part in weights):
        return "it takes contiguous weights that begin at multiples of 16 bytes"
    return None


def refusal_of_logits(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the sampling kernel does not support logits of this dtype and device; None when it does."""
    if not triton_is_installed():
        return "triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"it runs on CUDA devices, got {device.type!r}"
    if dtype not in FLOATS:
        return f"it takes logits in float32 and half precision, got {str(dtype).removeprefix('torch.')}"
    return failure(Kernel.SAMPLING, device)


def refused(takes: str, *given: Tensor) -> ValueError:
    """The error for arguments of other shapes, dtypes or strides than an operator takes.

    Args:
        takes: The operator and its arguments, as in "rotate takes queries [batch, heads, length, head_dim]".
    """
    return ValueError(f"{takes}, got {', '.join(str(tuple(part.shape)) for part in given)}")


def are_contiguous(*tensors: Tensor | None) -> bool:
    for one in tensors:  # noqa: SIM110 - called for each launch: a generator takes several times as long
        if one is not None and not one.is_contiguous():
            return False
    return True


def check_table(name: str, table: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check shape, dtype and contiguity of a table, if it is given."""
    if table is not None and (table.shape != shape or table.dtype != dtype or not table.is_contiguous()):
        raise ValueError(f"{name} must be {_in_words(shape, dtype)}, got {_found(table)}")


def check_rows(name: str, part: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check shape and dtype of a tensor, and that its last dimension is contiguous."""
    if part.shape != shape or part.dtype != dtype or part.stride(-1) != 1:
        raise ValueError(f"{name} must be {_in_words(shape, dtype)}, got {_found(part)}")


def check_query(query: Tensor, kv_heads: int) -> None:
    """Check strides, dtype and heads of queries."""
    heads = query.shape[1]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of the KV heads, got {heads} and {kv_heads}")
    check_rows("query", query, query.shape, query.dtype)
    if query.dtype not in FLOATS:
        raise ValueError(f"query must be fp16, bf16 or fp32, got {query.dtype}")


def check_numbers(scale: float, soft_cap: float | None = None, window: int | None = None) -> None:
    """Check the bounds of scale, soft cap and window."""
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0, or None for none, got {soft_cap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, or None for none, got {window}")


def _in_words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}, contiguous in the last dimension"


def _found(part: Tensor) -> str:
    return f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')} with strides {part.stride()}"
