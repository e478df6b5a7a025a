"""Trees of prefixes that papers measured their kernels on: nodes of each level, and tokens of each node.

The last level is the rows' own tokens. Nodes are divided evenly below those of the level above.
"""

from __future__ import annotations

from typing import Final

Tree = tuple[tuple[int, ...], tuple[int, ...]]
"""Nodes of each level, and tokens of a node of each level."""

FASTTREE: Final[tuple[Tree, ...]] = (
    ((1, 2, 64), (8, 256, 32)),
    ((1, 4, 256), (8, 256, 32)),
    ((1, 4, 8, 256), (8, 256, 256, 32)),
    ((1, 256), (256, 32)),
    ((1, 1024), (2048, 32)),
    ((1, 16, 64), (1024, 256, 32)),
    ((1, 4, 16, 512), (1024, 256, 128, 32)),
    ((1, 4, 16, 64, 256, 1024), (256, 8, 256, 64, 32, 256)),
    ((1, 10), (4000, 400)),
    ((1, 2, 4, 8, 16, 32, 64, 128, 1024), (16, 16, 16, 16, 16, 16, 16, 16, 16)),
    ((1, 2, 4, 8, 16, 32, 64, 128, 1024), (256, 128, 64, 16, 16, 16, 16, 16, 16)),
    ((1, 8, 16, 32, 64, 128, 1024), (256, 128, 64, 16, 16, 16, 16)),
    ((1, 8, 16, 32, 64, 256, 1024), (256, 128, 64, 16, 16, 16, 16)),
    ((1, 16, 32, 64, 128, 1024), (256, 128, 64, 16, 16, 16)),
    ((1, 16, 32, 64, 256, 1024), (256, 128, 64, 16, 16, 16)),
)
"""FastTree (MLSys 2025): ``kernel_bench/run_benchmark.sh`` of PanZaifeng/FastTree-Artifact, in float16."""

FASTTREE_HEADS: Final = ((16, 1), (32, 8), (32, 32))
"""Query and KV heads of the same benchmark, of head_dim 128."""

PAT: Final[tuple[Tree, ...]] = (
    ((1, 10), (4096, 416)),
    ((1, 256), (256, 32)),
    ((1, 1024), (2048, 32)),
    ((1, 2, 64), (1024, 256, 256)),
    ((1, 4, 256), (32, 256, 32)),
    ((1, 8, 512), (32, 512, 256)),
    ((1, 8, 512), (32, 2048, 256)),
    ((1, 8, 512), (512, 512, 256)),
    ((1, 4, 8, 256), (32, 256, 256, 32)),
    ((1, 4, 16, 512), (1024, 256, 128, 32)),
    ((1, 4, 16, 64, 256, 1024), (256, 32, 256, 64, 32, 256)),
    ((1, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32)),
    ((1, 16, 32, 64, 256, 1024), (256, 128, 64, 32, 32, 32)),
    ((1, 8, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32, 32)),
    ((1, 8, 16, 32, 64, 256, 1024), (256, 128, 64, 32, 32, 32, 32)),
    ((2, 8, 16, 256), (256, 256, 32, 32)),
    ((4, 16, 256, 512), (512, 32, 128, 32)),
    ((8, 16, 32, 256), (512, 512, 256, 32)),
    ((256,), (1024,)),
    ((256,), (4096,)),
)
"""PAT, which has trees of DeFT, RelayAttention and FlashInfer among them: ``benchmark/run_kernel_bench.sh`` of
flashserve/PAT, in float16."""

PAT_HEADS: Final = ((32, 32), (16, 8), (32, 8), (64, 8))
"""Query and KV heads of the same benchmark, of head_dim 128."""
