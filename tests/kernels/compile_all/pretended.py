"""A GPU that torch and Triton take for real, and tensors there that have no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

from hf_fastdecode.kernels import device


class Gpu(NamedTuple):
    """A GPU as CUDA describes it: name, multiprocessors, KiB of shared memory that one program can take."""

    name: str
    multiprocessors: int
    shared_memory: int
    cards: str  # of this generation, as users know them


GPUS = {
    (8, 0): Gpu("NVIDIA A100-SXM4-80GB", 108, 163, "A100, A30"),
    (8, 6): Gpu("NVIDIA A10", 72, 99, "A10, A40, RTX 30"),
    (8, 9): Gpu("NVIDIA L4", 58, 99, "L4, L40S, RTX 40"),
    (9, 0): Gpu("NVIDIA H100 80GB HBM3", 132, 227, "H100, H200"),
    (10, 0): Gpu("NVIDIA B200", 148, 227, "B200"),
    (12, 0): Gpu("NVIDIA GeForce RTX 5090", 170, 99, "RTX 50, RTX PRO 6000"),
}
LARGEST = max(gpu.shared_memory for gpu in GPUS.values())
CUDA = torch.device("cuda", 0)


class Claimed(Tensor):
    """A tensor without memory that claims to be on a GPU."""

    device = CUDA
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the pretended GPU, without memory."""
    return torch.empty(shape, dtype=dtype, device=CUDA)


class Claiming(TorchFunctionMode):
    """Within, tensors that are made on a GPU, or moved there, only claim to be. (FakeTensorMode takes much longer.)"""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.to and args[1:] == (CUDA,):
            return args[0].to("meta").as_subclass(Claimed)
        if (kwargs or {}).get("device") == CUDA:
            return function(*args, **kwargs | {"device": "meta"}).as_subclass(Claimed)
        if function in (Tensor.sum, Tensor.__getitem__, torch.empty_like):  # PyTorch's look at a meta tensor's device
            return function(args[0].as_subclass(Tensor), *args[1:]).as_subclass(Claimed)
        return function(*args, **(kwargs or {}))


@contextmanager
def pretending(capability: tuple[int, int], shared_memory: int | None = None) -> Iterator[None]:
    """Within, torch and Triton see one GPU, whose tensors have no memory; its KiB of shared memory may be others."""
    name, multiprocessors, kib, _ = GPUS[capability]
    device.shared_memory.cache_clear()
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=1024 * (shared_memory or kib),
        shared_memory_per_block=48 << 10,
        L2_cache_size=40 << 20,
        memory_clock_rate=1_500_000,
        memory_bus_width=4096,
    )
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _: 0
    )
    triton.runtime.driver.set_active(driver)
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda _: properties))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda _: capability))
        stack.enter_context(patch("torch.cuda.current_device", lambda: CUDA.index))
        stack.enter_context(Claiming())
        yield
