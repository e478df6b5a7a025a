"""The slim decode kernel on thread block clusters, for GPUs of compute capability 9.0 and later."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..cuda_module import CudaKernel, load_kernel

_MOST_SUMS = 128  # per thread, of 255 registers
_RING = 4  # buffers of weights, as in cluster.cu


@dataclass(frozen=True)
class ClusterConfig:
    """Launch parameters of `slim_decode` on thread block clusters.

    Attributes:
        members: Blocks per cluster, which divide the heads: 1, 2, 4 or 8.
        tile: Tokens per tile: 32 or 64.
        stages: Tiles in shared memory, at least 3: one whose scores are computed, one that is being added, the others
            on their way.
        warps: Warps per block.
        clusters: Clusters at most; as many as run at the same time when None.
    """

    members: int
    tile: int = 64
    stages: int = 3
    warps: int = 8
    clusters: int | None = None


@dataclass(frozen=True)
class ClusterShape:
    """What a kernel is compiled for.

    Attributes:
        heads: Heads of the layer.
        head_dim: Numbers per head.
        rank: V-coordinates.
        rotary_dim: Numbers of a head that RoPE rotates: all or none.
        offset: Whether keys have an offset.
        starts: Whether rows begin with padding.
        dtype: Of the cached keys, fp16 or bf16.
        config: Launch parameters.
    """

    heads: int
    head_dim: int
    rank: int
    rotary_dim: int
    offset: bool
    starts: bool
    dtype: torch.dtype
    config: ClusterConfig

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        config = self.config
        own, padded = self.heads // config.members, -(-self.heads // 8) * 8
        columns = own * self.head_dim + -(-self.rank // (16 * config.members)) * 16
        row = -(-2 * columns // 128) * 128
        ring = padded * config.tile * 2 + padded * 8 + 8  # weights, factors and a barrier
        query = own * self.head_dim * 4 * (2 if self.offset else 1)
        turns = config.tile // config.warps * self.head_dim * 4 if self.rotary_dim else 0
        return config.stages * config.tile * row + _RING * ring + own * config.tile * 4 + query + turns

    def refusal(self, shared_memory: int) -> str | None:
        """Why the kernel does not take this shape, or None.

        Args:
            shared_memory: Bytes of shared memory per block.
        """
        config = self.config
        if self.dtype not in (torch.float16, torch.bfloat16):
            return f"clusters take keys in fp16 and bf16, got {self.dtype}"
        if self.head_dim not in (64, 128, 256) or self.rotary_dim not in (0, self.head_dim) or self.rank % 8:
            return (
                "clusters take heads of 64, 128 or 256 numbers, of which RoPE rotates all or none, and multiples of 8 "
                f"V-coordinates, got {self.head_dim}, {self.rotary_dim} and {self.rank}"
            )
        if config.members not in (1, 2, 4, 8) or self.heads % config.members:
            return f"clusters have 1, 2, 4 or 8 members, which divide the heads, got {config.members} and {self.heads}"
        # Each warp computes the scores of whole tokens, several lanes one of them.
        whole = config.tile * self.head_dim % (512 * config.warps) == 0
        if config.tile not in (32, 64) or config.stages < 3 or not whole:
            return (
                "clusters take tiles of 32 or 64 tokens, at least 3 stages, and warps that share a tile's tokens, got "
                f"{config.tile}, {config.stages} and {config.warps}"
            )
        columns = self.heads // config.members * self.head_dim + -(-self.rank // (16 * config.members)) * 16
        sums = -(-columns // (16 * config.warps)) * -(-self.heads // 8) * 4
        if sums > _MOST_SUMS:
            return f"clusters have up to {_MOST_SUMS} sums per thread, got {sums}; raise members or warps"
        if self.shared_bytes > shared_memory:
            return f"clusters have {shared_memory} bytes of shared memory per block, and need {self.shared_bytes}"
        return None

    def numbers(self) -> dict[str, int]:
        """Macros of ``cluster.cu``."""
        config = self.config
        flags = {"ROTATED": self.rotary_dim > 0, "OFFSET": self.offset, "STARTS": self.starts}
        flags["BF16"] = self.dtype == torch.bfloat16
        sizes = {"HEADS": self.heads, "HEAD_DIM": self.head_dim, "RANK": self.rank, "SHARED_BYTES": self.shared_bytes}
        launch = {"MEMBERS": config.members, "TILE": config.tile, "STAGES": config.stages, "WARPS": config.warps}
        return sizes | launch | {name: int(value) for name, value in flags.items()}


@lru_cache
def cluster_kernel(shape: ClusterShape, device: torch.device) -> tuple[CudaKernel, int]:
    """The kernel for a device, and the number of clusters that run on it at the same time."""
    with torch.cuda.device(device):
        kernel = load_kernel(
            "slim_cluster",
            __package__,
            "cluster.cu",
            shape.numbers(),
            headers=["instructions.cuh"],
            threads=32 * shape.config.warps,
            shared_bytes=shape.shared_bytes,
        )
        return kernel, kernel.most_clusters(shape.config.members)
