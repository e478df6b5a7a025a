"""Records kernels that failed to compile or launch, so that each is tried once per device."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn

import torch

from ..log import logger
from .device import triton_is_installed


class Kernel(Enum):
    """A group of kernels that are launched together, and its fallback."""

    HOPPER = "the kernel for Hopper GPUs", "the portable kernel"
    FOREST = "the decode kernels", "PyTorch's operators"
    PREFILL = "the prefill kernel", "PyTorch's operators"
    MERGE = "the kernel that merges partials of several devices", "PyTorch's operators"
    SAMPLING = "the sampling kernel", "transformers' sampler"
    SLIM = "the slim decode kernel", "PyTorch's operators"
    CLUSTER = "the slim decode kernel on clusters", "the one in two launches"
    PRODUCT = "the kernel for products with stored matrices", "PyTorch's operators"
    APPEND = "the kernel that appends to slim caches", "PyTorch's operators"
    EXPERTS = "the kernels of experts of a few rows", "transformers' implementation"
    ROWS = "the kernel for products of few rows", "PyTorch's operators"
    WIDE_ROWS = "the kernel for products of 33 to 128 rows", "PyTorch's operators"
    STATES = "the kernels that update states", "transformers' implementation"
    SCANS = "the kernels that scan many tokens into states", "transformers' implementation"
    LATENTS = "the kernel for queries over latents", "PyTorch's operators"
    POINTWISE = "the kernels for norms, rotary embedding and gated activations", "PyTorch's operators"


class KernelFailedError(RuntimeError):
    """A kernel failed to compile or launch; the message gives the reason, which `failure` returns from now on."""


_failures: dict[tuple[Kernel, torch.device], str] = {}


def failure(kernel: Kernel, device: torch.device) -> str | None:
    """The reason why a kernel failed on a device, or cannot be tried; None when it ran or was not tried."""
    return _failures.get((kernel, device)) if triton_is_installed() else "triton is not installed"


def forget(kernel: Kernel) -> None:
    """Forget a kernel's failure, so that it is tried again, as with other launch parameters."""
    for key in [key for key in _failures if key[0] == kernel]:
        del _failures[key]


class launching:  # noqa: N801 - it reads as the others of `contextlib`, a generator of which takes several times as long
    """Compile and launch a kernel on the device within: log its first error, and fail at once on later attempts.

    Raises:
        KernelFailedError: It cannot be compiled or launched on this device.
        torch.OutOfMemoryError: No memory now; this is not recorded as a failure of the kernel.
    """

    __slots__ = ("_device", "_kernel", "_scope")

    def __init__(self, kernel: Kernel, device: torch.device):
        if _failures and (known := failure(kernel, device)) is not None:
            raise KernelFailedError(known)
        self._kernel, self._device = kernel, device
        self._scope: torch.cuda.device | None = None

    def __enter__(self) -> None:
        try:
            # Triton launches on the current device, not on its arguments'.
            if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
                self._scope = torch.cuda.device(self._device)
                self._scope.__enter__()
        except Exception as error:
            self._record(error)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._scope is not None:
            self._scope.__exit__(kind, error, trace)
        if isinstance(error, Exception):  # of any type: Triton's, or the drivers'
            self._record(error)

    def _record(self, error: Exception) -> NoReturn:
        """Raise the error, or a lasting failure of the kernel that it shows."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if "out of memory" in str(error):  # raised by the CUDA driver when it loads a kernel
            raise torch.OutOfMemoryError(str(error)) from error
        (name, other), device = self._kernel.value, self._device
        reason = f"{name} cannot run on {device}: {_in_one_line(error)}"
        _failures[self._kernel, device] = reason
        logger.warning("%s; where it is not forced, %s will be used instead", reason, other)
        raise KernelFailedError(reason) from error


def _in_one_line(error: BaseException) -> str:
    """The first line of the root cause; a CompilationError itself begins with the kernel's source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(getattr(error, "error_message", None) or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
