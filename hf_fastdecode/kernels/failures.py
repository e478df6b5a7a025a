"""Records kernels that failed to compile or launch, so that each is tried once per device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum

import torch

logger = logging.getLogger("hf_fastdecode")


class Kernel(Enum):
    """A group of kernels that are launched together, and its fallback."""

    HOPPER = "the kernel for Hopper GPUs", "the portable kernel"
    FOREST = "the decode kernels", "PyTorch's operators"
    SAMPLING = "the sampling kernel", "transformers' sampler"
    SLIM = "the slim decode kernel", "PyTorch's operators"
    CLUSTER = "the slim decode kernel on clusters", "the one in two launches"
    PRODUCT = "the kernel for products with stored matrices", "PyTorch's operators"
    POINTWISE = "the kernels for norms, rotary embedding and gated activations", "PyTorch's operators"


class KernelFailedError(RuntimeError):
    """A kernel failed to compile or launch; the message gives the reason, which `failure` returns from now on."""


_failures: dict[tuple[Kernel, torch.device], str] = {}


def failure(kernel: Kernel, device: torch.device) -> str | None:
    """The reason why a kernel failed on a device; None when it ran or was not tried."""
    return _failures.get((kernel, device))


def forget(kernel: Kernel) -> None:
    """Try a kernel again that failed, as with other launch parameters."""
    for key in [key for key in _failures if key[0] == kernel]:
        del _failures[key]


@contextmanager
def launching(kernel: Kernel, device: torch.device) -> Iterator[None]:
    """Compile and launch a kernel on the device within: log its first error, and fail at once on later attempts.

    Raises:
        KernelFailedError: It cannot be compiled or launched on this device.
        torch.OutOfMemoryError: No memory now; this is not recorded as a failure of the kernel.
    """
    name, other = kernel.value
    if (known := failure(kernel, device)) is not None:
        raise KernelFailedError(known)
    try:
        # Triton launches on the current device, not on its arguments'.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton and the drivers raise errors of any type
        if "out of memory" in str(error):  # raised by the CUDA driver when it loads a kernel
            raise torch.OutOfMemoryError(str(error)) from error
        reason = f"{name} cannot run on {device}: {_in_one_line(error)}"
        _failures[kernel, device] = reason
        logger.warning("%s; where it is not forced, %s will be used instead", reason, other)
        raise KernelFailedError(reason) from error


def _in_one_line(error: BaseException) -> str:
    """The first line of the root cause; a CompilationError itself begins with the kernel's source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(getattr(error, "error_message", None) or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
