"""Memory for the time of a call, at the same addresses in every call.

A captured step reads weights where they lay when it was captured, and a trainer needs the memory between calls. So
addresses are reserved once, and each call maps memory there: on a GPU by the management of virtual memory (the
CUDA driver API, section "Virtual Memory Management"), on a CPU by pages that the kernel provides as they are written.
Elsewhere PyTorch allocates it, at any address.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final, Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Bytes of one device, `vector`, ``[nbytes]`` uint8, which may be read and written between `take` and `free`."""

    vector: Tensor

    def take(self) -> None:
        """Provide memory, of any content; raises torch.OutOfMemoryError."""

    def free(self) -> None:
        """Give the memory back, once the device has done what is queued."""


class Allocated:
    """Memory of PyTorch's allocator, whose address may be another one in each call."""

    def __init__(self, nbytes: int, device: torch.device):
        self.vector = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def take(self) -> None:
        storage = self.vector.untyped_storage()
        if not storage.size():
            storage.resize_(self.vector.numel())

    def free(self) -> None:
        self.vector.untyped_storage().resize_(0)


class OfHost:
    """Private pages, which the kernel takes back."""

    def __init__(self, nbytes: int):
        self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.vector = torch.frombuffer(self._pages, dtype=torch.uint8)

    def take(self) -> None: ...

    def free(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)


_PINNED, _DEVICE, _READ_AND_WRITE = 1, 1, 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("of_windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class OfCuda:
    """Memory of a GPU at reserved addresses; these are never given back, as they take no memory.

    Raises OSError where there is no CUDA driver, RuntimeError where it refused.
    """

    vector: Tensor

    def __init__(self, nbytes: int, device: torch.device):
        self._driver, self._device = ctypes.CDLL("libcuda.so.1"), device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, index))
        self._handle: ctypes.c_ulonglong | None = None
        granularity, address = ctypes.c_size_t(), ctypes.c_ulonglong()
        with torch.cuda.device(device):
            self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
            self._size = ctypes.c_size_t(-(-nbytes // granularity.value) * granularity.value)
            zero = ctypes.c_ulonglong(0)
            self._call("cuMemAddressReserve", ctypes.byref(address), self._size, ctypes.c_size_t(0), zero, zero)
        self._address = address
        self.take()
        self.vector = torch.as_tensor(_Array(address.value, nbytes), device=device)

    def take(self) -> None:
        if self._handle is not None:
            return
        handle, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        with torch.cuda.device(self._device):
            if torch.cuda.mem_get_info(self._device)[0] < self._size.value:
                torch.cuda.empty_cache()  # the allocator's memory is not the driver's
            self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(self._properties), zero)
            try:
                self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, zero)
                self._handle = handle
                access = _Access(self._properties.location, _READ_AND_WRITE)
                self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
            except BaseException:
                if self._handle is None:
                    self._call("cuMemRelease", handle)
                self.free()
                raise

    def free(self) -> None:
        if self._handle is None:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._call("cuMemUnmap", self._address, self._size)
            handle, self._handle = self._handle, None
            self._call("cuMemRelease", handle)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: {self._size.value / 2**30:.1f} GiB are not free on {self._device}")
        if code:
            raise RuntimeError(f"{name} failed with error {code} of the CUDA driver")


class _Array:
    """Bytes at an address of a GPU, as PyTorch takes them."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


_PAGES: Final = hasattr(mmap.mmap, "madvise") and hasattr(mmap, "MADV_DONTNEED")


def memory_on(device: torch.device, nbytes: int) -> Memory:
    """Memory that is taken already; raises torch.OutOfMemoryError."""
    if device.type == "cpu" and _PAGES:
        return OfHost(nbytes)
    if device.type == "cuda":
        try:
            return OfCuda(nbytes, device)
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError):  # such as AMD's driver
            pass
    return Allocated(nbytes, device)
