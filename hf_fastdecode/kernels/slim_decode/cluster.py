"""The slim decode kernel on thread block clusters, for GPUs of compute capability 9.0.

It is CUDA C++, compiled at run time with NVRTC for the GPU at hand. cuda-bindings, which PyTorch installs with its
CUDA builds, brings the compiler; no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .inputs import EIGHT_BITS

_HEADERS = ("instructions.cuh", "layout.cuh", "scales.cuh", "scores.cuh", "averages.cuh")
_THREADS = 512  # per block: three warpgroups that score or add, and one of warps with other roles
_MOST_SUMS = {1: 160, 2: 120}  # accumulators per thread that fit into registers, by the number of adding warpgroups


@dataclass(frozen=True)
class ClusterConfig:
    """Launch parameters of `slim_decode` on thread block clusters."""

    members: int  # blocks per cluster, which divide the heads: 1, 2, 4 or 8
    tile: int = 32  # tokens per tile: 32 or 64
    # Tiles in shared memory, 4 to 6 (8 bits: 3 to 6): one that is being scored, one or two whose weights are
    # exchanged, one that is being added, and the others in flight
    stages: int = 6
    # Tiles by which weights are ahead of sums at most, 2 to 4; there are twice as many buffers of weights
    lead: int = 4
    clusters: int | None = None  # clusters at most; as many as run at the same time when None
    # Tiles of 8 bits in shared memory, 2 to as many as `stages`, which then hold dequantised tiles; None for 16 bits
    copies: int | None = None


@dataclass(frozen=True)
class ClusterShape:
    """The layer, cache and launch parameters that a kernel is compiled for."""

    heads: int
    head_dim: int
    rank: int
    rotary_dim: int  # elements of a head that RoPE rotates: all or none
    offset: bool  # whether keys have an offset
    starts: bool  # whether rows begin with padding
    dtype: torch.dtype  # dtype of the cached keys: fp16, bf16, or one of 8 bits
    config: ClusterConfig  # launch parameters

    @property
    def shared_bytes(self) -> int:
        config = self.config
        heads, padded = self.heads // config.members, self.padded_heads
        weights = 2 * config.lead * (padded * config.tile * 2 + padded * 8 + 8)  # buffers with factors and a barrier
        stage = config.tile * self.boxes * 128 + heads * config.tile * 4 + 2 * 8  # with scores and two barriers
        queries = heads * self.head_dim * 4 * (4 if self.offset else 3) + 2 * 8  # given, turned twice, and the offset
        tiles, copies = config.stages, 0
        if self.scaled:
            tiles = config.copies or 0
            boxes = heads * self.head_dim // 128 + -(-self.rank_columns // 128)
            groups = (self.head_dim - 17 + self.rank_columns) // self.head_dim + 1 if self.rank else 0
            scales = 2 * (heads + groups) * config.tile * 4  # of two tiles
            units = (config.stages + 2) * (heads + (self.rank > 0)) * 8
            copies = tiles * config.tile * boxes * 128 + scales + units
        return config.stages * stage + copies + tiles * 8 + weights + queries

    @property
    def scaled(self) -> bool:
        """Whether keys are in 8 bits, with scales."""
        return self.dtype in EIGHT_BITS

    @property
    def padded_heads(self) -> int:
        """Heads, padded to a multiple of 8 for matrix products."""
        return -(-self.heads // 8) * 8

    @property
    def rank_columns(self) -> int:
        """V-coordinates per block, padded to a multiple of 16."""
        return -(-self.rank // (16 * self.config.members)) * 16

    @property
    def boxes(self) -> int:
        """Boxes of 64 columns per block, each one copy of a tile and one matrix product."""
        return self.heads // self.config.members * self.head_dim // 64 + -(-self.rank_columns // 64)

    @property
    def adders(self) -> int:
        """Warpgroups that add; the others of three score."""
        return 1 if self.sums(1) <= _MOST_SUMS[1] else 2

    def sums(self, adders: int) -> int:
        """Accumulators per thread of `adders` adding warpgroups."""
        return -(-self.boxes // adders) * self.padded_heads // 2

    def refusal(self, shared_memory: int) -> str | None:
        """Why the kernel does not take this shape with these bytes of shared memory per block, or None."""
        config = self.config
        if self.dtype not in (torch.float16, torch.bfloat16, *EIGHT_BITS):
            return f"clusters take keys in fp16, bf16, int8 and float8_e4m3fn, got {self.dtype}"
        if self.head_dim not in (64, 128, 256) or self.rotary_dim not in (0, self.head_dim) or self.rank % 8:
            return (
                "clusters take heads of 64, 128 or 256 elements, of which RoPE rotates all or none, and V-coordinates "
                f"in multiples of 8, got {self.head_dim}, {self.rotary_dim} and {self.rank}"
            )
        if config.members not in (1, 2, 4, 8) or self.heads % config.members:
            return f"clusters have 1, 2, 4 or 8 members, which divide the heads, got {config.members} and {self.heads}"
        if self.scaled and (columns := self.heads // config.members * self.head_dim) % 128:
            return f"clusters take keys in 8 bits with multiples of 128 columns per member, got {columns}"
        # Each scoring warp has whole tokens, several lanes one of them.
        adders = self.adders
        tokens, remainder = divmod(config.tile * self.head_dim, 512 * 4 * (3 - adders))
        if config.tile not in (32, 64) or remainder or not tokens:
            return f"clusters take tiles of 32 or 64 tokens, of 64 for head_dim 64, got {config.tile}"
        least = 3 if self.scaled else 4
        if not least <= config.stages <= 6 or not 2 <= config.lead <= min(4, config.stages):
            return f"clusters have {least} to 6 stages and a lead of 2 to 4, got {config.stages} and {config.lead}"
        if self.scaled != (config.copies in range(2, config.stages + 1)):
            return f"clusters have 2 copies to as many as stages in 8 bits, else None, got {config.copies}"
        if (sums := self.sums(adders)) > _MOST_SUMS[adders]:
            return f"clusters have up to {_MOST_SUMS[adders]} accumulators per thread, got {sums}; raise members"
        if self.shared_bytes > shared_memory:
            return f"clusters have {shared_memory} bytes of shared memory per block, and need {self.shared_bytes}"
        return None

    def numbers(self) -> dict[str, int]:
        """Macros of ``cuda/cluster.cu``."""
        config = self.config
        flags = {"ROTATED": self.rotary_dim > 0, "OFFSET": self.offset, "STARTS": self.starts}
        flags |= {"BF16": self.dtype == torch.bfloat16, "SCALED": self.scaled, "FP8": self.dtype == EIGHT_BITS[1]}
        sizes = {"HEADS": self.heads, "HEAD_DIM": self.head_dim, "RANK": self.rank, "SHARED_BYTES": self.shared_bytes}
        launch = {"MEMBERS": config.members, "TILE": config.tile, "STAGES": config.stages, "LEAD": config.lead}
        launch |= {"ADDERS": self.adders, "SCORERS": 3 - self.adders, "COPIES": config.copies or 0}
        return sizes | launch | {name: int(value) for name, value in flags.items()}


@lru_cache
def cluster_kernel(shape: ClusterShape, device: torch.device) -> tuple[CudaKernel, int]:
    """The kernel for a device, and the number of clusters that run on it at the same time.

    Raises:
        RuntimeError: It does not compile, or the driver refuses; the message has the compiler's first error.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability()
        torch.cuda.current_stream().synchronize()  # which makes PyTorch's context the current one
        architecture = f"sm_{major}{minor}a"  # with architecture-specific instructions
        (module,) = _checked(driver.cuModuleLoadData(_compiled(shape.numbers(), architecture)))
        (function,) = _checked(driver.cuModuleGetFunction(module, b"slim_cluster"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, limit, shape.shared_bytes))
        kernel = CudaKernel(function, _THREADS, shape.shared_bytes)
        return kernel, kernel.most_clusters(shape.config.members)


def tensor_maps(keys: Tensor, coordinates: Tensor, shape: ClusterShape) -> tuple[Any, Any]:
    """Describe a cache for the kernel's copies: keys in boxes of 128 bytes, all of a block's columns at once.

    Elements of 8 bits are copied by two, as if they were one of 16.

    Args:
        keys: ``[rows, slots, heads * head_dim]``.
        coordinates: ``[rows, slots, r]``; not described where r is 0.
        shape: Shape that the kernel was compiled for.
    """
    rows, slots, width = keys.shape
    size, bf16 = keys.element_size(), keys.dtype == torch.bfloat16
    tile, columns = shape.config.tile, shape.heads // shape.config.members * shape.head_dim
    row, token = (stride * size for stride in keys.stride()[:2])
    sizes, box = (rows, width * size // 128, slots, 64), (1, columns * size // 128, tile, 64)
    of_keys = tensor_map(keys.data_ptr(), sizes, (row, 128, token), box, bf16=bf16)
    if not shape.rank:
        return of_keys, of_keys
    row, token = (stride * size for stride in coordinates.stride()[:2])
    sizes = (rows, 1, slots, shape.rank * size // 2)
    return of_keys, tensor_map(coordinates.data_ptr(), sizes, (row, 16, token), (1, 1, tile, 64), bf16=bf16)


def cuda_bindings_are_installed() -> bool:
    """Whether kernels can be compiled here."""
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # of the parent package
        return False


@dataclass(frozen=True)
class CudaKernel:
    function: Any  # the driver's handle
    threads: int  # threads per block
    shared_bytes: int  # dynamic shared memory per block

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


def _compiled(numbers: Mapping[str, int], architecture: str) -> bytes:
    """Machine code of the source with these macros, for an architecture such as ``sm_90``; needs no GPU."""
    from cuda.bindings import nvrtc

    folder = Path(__file__).with_name("cuda")
    source, *headers = ((folder / name).read_bytes() for name in ("cluster.cu", *_HEADERS))
    names = [name.encode() for name in _HEADERS]
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", len(names), headers, names))
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
