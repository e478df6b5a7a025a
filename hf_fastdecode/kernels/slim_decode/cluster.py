"""The slim decode kernel on thread block clusters, for GPUs of compute capability 9.0 and later."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..cuda_module import CudaKernel, load_kernel

_MOST_SUMS = 128  # per thread, of 255 registers
_RING = 4  # buffers of weights, as in the source


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
        rotated: Whether RoPE rotates whole heads; else none of them.
        offset: Whether keys have an offset.
        starts: Whether rows begin with padding.
        bf16: Whether keys are bf16; else fp16.
        config: Launch parameters.
    """

    heads: int
    head_dim: int
    rank: int
    rotated: bool
    offset: bool
    starts: bool
    bf16: bool
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
        turns = config.tile // config.warps * self.head_dim * 4 if self.rotated else 0
        return config.stages * config.tile * row + _RING * ring + own * config.tile * 4 + query + turns

    def fits(self, shared_memory: int) -> bool:
        """Whether a block has enough shared memory and registers, and each warp whole tokens."""
        config = self.config
        columns = self.heads // config.members * self.head_dim + -(-self.rank // (16 * config.members)) * 16
        sums = -(-columns // (16 * config.warps)) * -(-self.heads // 8) * 4
        whole = config.tile * self.head_dim % (512 * config.warps) == 0
        return whole and sums <= _MOST_SUMS and self.shared_bytes <= shared_memory

    def numbers(self) -> dict[str, int]:
        """Macros of the source."""
        config = self.config
        flags = {"ROTATED": self.rotated, "OFFSET": self.offset, "STARTS": self.starts, "BF16": self.bf16}
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
            threads=32 * shape.config.warps,
            shared_bytes=shape.shared_bytes,
        )
        return kernel, kernel.most_clusters(shape.config.members)
