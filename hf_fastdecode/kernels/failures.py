"""Kernels that could not be compiled or launched: each is tried once on a device, and then left alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

logger = logging.getLogger("hf_fastdecode")


class Kernel(Enum):
    """A group of kernels that are launched together, and its fallback."""

    HOPPER = "the kernel for Hopper GPUs", "the portable kernel"
    FOREST = "the decode kernels", "PyTorch's operators"
    SAMPLING = "the sampling kernel", "transformers' sampler"


class KernelFailedError(RuntimeError):
    """A kernel could not be compiled or launched; the message says why, and `failure` knows it from now on."""


_failures: dict[tuple[Kernel, torch.device], str] = {}


def failure(kernel: Kernel, device: torch.device) -> str | None:
    """Why a kernel cannot run on a device, or None when it did or was not tried."""
    return _failures.get((kernel, device))


@contextmanager
def launching(kernel: Kernel, device: torch.device) -> Iterator[None]:
    """Within, a kernel is compiled and launched. Its first error is logged; later attempts fail at once.

    Raises:
        KernelFailedError: It cannot be compiled or launched on this device.
        torch.OutOfMemoryError: There is no memory for it now, which tells nothing about the kernel.
    """
    name, other = kernel.value
    if (known := failure(kernel, device)) is not None:
        raise KernelFailedError(known)
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton and the drivers below it raise anything
        if "out of memory" in str(error):  # the CUDA driver's, for a kernel's code
            raise torch.OutOfMemoryError(str(error)) from error
        reason = f"{name} cannot run on {device}: {_in_one_line(error)}"
        _failures[kernel, device] = reason
        logger.warning("%s; where it is not forced, %s will be used instead", reason, other)
        raise KernelFailedError(reason) from error


def _in_one_line(error: BaseException) -> str:
    """The first line of what first went wrong: a CompilationError itself begins with the kernel's source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(getattr(error, "error_message", None) or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
