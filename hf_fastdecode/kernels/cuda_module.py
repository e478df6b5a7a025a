"""CUDA C++ kernels, compiled at run time with NVRTC for the GPU at hand.

cuda-bindings, which PyTorch installs with its CUDA builds, brings the compiler; no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def cuda_bindings_are_installed() -> bool:
    """Whether kernels can be compiled here."""
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # of the parent package
        return False


@dataclass(frozen=True)
class CudaKernel:
    """A loaded kernel.

    Attributes:
        function: The driver's handle.
        threads: Threads per block.
        shared_bytes: Dynamic shared memory per block.
    """

    function: Any
    threads: int
    shared_bytes: int

    def launch(self, blocks: int, arguments: Sequence[Any], device: torch.device) -> None:
        """Launch on the device's current stream.

        Args:
            blocks: Blocks of the one-dimensional grid.
            arguments: Tensor maps, tensors (passed as addresses), integers (64 bits) and floats (32 bits).
            device: The tensors' device.

        Raises:
            RuntimeError: The driver refuses.
        """
        from cuda.bindings import driver

        values, types = zip(*map(_argument, arguments))
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            _checked(
                driver.cuLaunchKernel(
                    self.function, blocks, 1, 1, self.threads, 1, 1, self.shared_bytes, stream, (values, types), 0
                )
            )

    def most_clusters(self, size: int) -> int:
        """Number of clusters of `size` blocks that the current device runs at the same time."""
        from cuda.bindings import driver

        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = size, 1, 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.attrs, config.numAttrs = [cluster], 1
        (count,) = _checked(driver.cuOccupancyMaxActiveClusters(self.function, config))
        return int(count)


def load_kernel(
    name: str,
    package: str,
    source: str,
    numbers: Mapping[str, int],
    *,
    headers: Sequence[str] = (),
    threads: int,
    shared_bytes: int,
) -> CudaKernel:
    """Compile a kernel for the current device, and load it.

    Args:
        name: The kernel's ``extern "C"`` name.
        package: Package with the source file and its headers.
        source: Name of the source file.
        numbers: Macros that the source reads.
        headers: Names of files that the source includes.
        threads: Threads per block.
        shared_bytes: Dynamic shared memory per block.

    Raises:
        RuntimeError: It does not compile, or the driver refuses; the message has the compiler's first error.
    """
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability()
    texts = {one: files(package).joinpath(one).read_text(encoding="utf-8") for one in (source, *headers)}
    text = texts.pop(source)
    torch.cuda.current_stream().synchronize()  # which makes PyTorch's context the current one
    architecture = f"sm_{major}{minor}" + ("a" if major >= 9 else "")  # with instructions of this architecture alone
    (module,) = _checked(driver.cuModuleLoadData(compiled(text, numbers, architecture, texts)))
    (function,) = _checked(driver.cuModuleGetFunction(module, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return CudaKernel(function, threads, shared_bytes)


def compiled(
    text: str, numbers: Mapping[str, int], architecture: str, headers: Mapping[str, str] | None = None
) -> bytes:
    """Machine code of a source text with macros and headers, for an architecture such as ``sm_90``; needs no GPU.

    Raises:
        RuntimeError: It does not compile.
    """
    from cuda.bindings import nvrtc

    texts, names = ([one.encode() for one in part] for part in ((headers or {}).values(), headers or {}))
    (program,) = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", len(names), texts, names))
    options = [
        f"--gpu-architecture={architecture}",
        "-std=c++17",
        "--device-as-default-execution-space",
        *(f"-D{key}={value}" for key, value in numbers.items()),
    ]
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
            log = bytes(size)
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            errors = [line for line in log.decode().splitlines() if "error" in line]
            raise RuntimeError(errors[0] if errors else f"NVRTC: {result}")
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
        code = bytes(size)
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@lru_cache(maxsize=1024)
def tensor_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], *, bf16: bool
) -> Any:
    """Describe a tensor of 16-bit elements, for copies of boxes into shared memory, with zeros outside the tensor.

    The last dimension of a box takes 128 bytes. Chunks of 16 bytes are permuted within them, by the index in the
    dimension before, modulo 8.

    Args:
        address: Address of the first element, a multiple of 16 bytes.
        shape: Up to five dimensions.
        strides: Strides of all dimensions but the last, in bytes, multiples of 16.
        box: Shape of a copy, with 64 in the last dimension.
        bf16: Whether elements are bf16, or else fp16.

    Raises:
        RuntimeError: The driver refuses.
    """
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    (described,) = _checked(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if bf16 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            len(shape),
            address,
            [driver.cuuint64_t(size) for size in reversed(shape)],
            [driver.cuuint64_t(max(stride, 16)) for stride in reversed(strides)],  # 0 in dimensions of size 1
            [driver.cuuint32_t(size) for size in reversed(box)],
            [driver.cuuint32_t(1)] * len(shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return described


def _argument(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Tensor):
        return value.data_ptr(), ctypes.c_void_p
    if isinstance(value, int | float):
        return value, ctypes.c_longlong if isinstance(value, int) else ctypes.c_float
    return value, None  # a structure of the driver's


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
    return tuple(values)
