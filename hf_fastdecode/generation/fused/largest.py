"""`LargestOfFew`: `torch.topk` of short rows in one short launch, as routers of experts call it.

PyTorch's takes two launches, of which each lasts several times as long as the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...kernels.device import interpreted
from ...kernels.experts.api import largest
from ...kernels.experts.config import MOST_EXPERTS, MOST_LARGEST, MOST_PAIRS
from ...kernels.failures import Kernel, KernelFailedError, failure
from ...kernels.forest_decode.limits import HALF_PRECISION

_DTYPES = (*HALF_PRECISION, torch.float32)


class LargestOfFew(TorchFunctionMode):
    """Context in which this thread's `torch.topk` of plain tensors on a GPU is the kernel, where that serves them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function in (torch.topk, Tensor.topk) and (served := _served(*args, **options)) is not None:
            try:
                return torch.return_types.topk(largest(*served))
            except KernelFailedError:
                pass
        return function(*args, **options)


def _served(
    input: Any,
    k: Any,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    out: Any = None,
) -> tuple[Tensor, int] | None:
    """What the kernel takes; None where it does not serve the call."""
    if type(input) is not Tensor or type(k) is not int or not largest or out is not None:
        return None
    if input.dim() != 2 or dim not in (1, -1) or not input.is_contiguous() or input.dtype not in _DTYPES:
        return None
    rows, columns = input.shape
    few = 1 <= k <= min(columns, MOST_LARGEST) and columns <= MOST_EXPERTS and 1 <= rows <= MOST_PAIRS
    if not few or not (input.is_cuda or interpreted()) or (torch.is_grad_enabled() and input.requires_grad):
        return None
    return (input, k) if failure(Kernel.EXPERTS, input.device) is None else None
