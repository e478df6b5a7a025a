"""Operator cases as data, without torch: one decode step of one attention layer, and the named sets of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, groupby, product
from typing import Any, Final

from hf_fastdecode.measurement.rows import Case


@dataclass(frozen=True)
class NodeSpec:
    """A node of `length` tokens over rows ``row_start .. row_start + row_count - 1``, `depth` nodes below its root."""

    length: int
    row_start: int
    row_count: int
    depth: int = 0


@dataclass(frozen=True)
class OpCase(Case):
    """One decode step of one layer: every row asks one query of its nodes and of its own suffix."""

    name: str
    rows: int
    nodes: tuple[NodeSpec, ...]  # the shared context; each depth covers all rows without a gap, or there are none
    suffix: int  # tokens that each row holds alone, the new one among them
    heads: int
    kv_heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.suffix < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: suffix must be at least 1 and heads a multiple of kv_heads, got {self}")
        for depth, level in groupby(self.nodes, lambda node: node.depth):
            row = 0
            for node in level:
                if node.row_start != row:
                    raise ValueError(f"{self.name}: depth {depth} must cover all rows in order, got {node}")
                row += node.row_count
            if row != self.rows:
                raise ValueError(f"{self.name}: depth {depth} covers {row} of {self.rows} rows")

    @property
    def context_lengths(self) -> list[int]:
        lengths = [0] * self.rows
        for node in self.nodes:
            for row in range(node.row_start, node.row_start + node.row_count):
                lengths[row] += node.length
        return lengths

    @property
    def context(self) -> int:
        return max(self.context_lengths)

    @property
    def stored_tokens(self) -> int:
        return sum(node.length for node in self.nodes)

    def bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.kv_heads * self.head_dim * itemsize

    def bytes(self, itemsize: int) -> int:
        """Least bytes to move: every stored token once, every suffix once, queries in and outputs out."""
        tokens = self.stored_tokens + self.rows * self.suffix
        return tokens * self.bytes_per_token(itemsize) + 2 * self.rows * self.heads * self.head_dim * itemsize

    def copied_bytes(self, itemsize: int) -> int:
        return (sum(self.context_lengths) + self.rows * self.suffix) * self.bytes_per_token(itemsize)

    @property
    def flops(self) -> int:
        return 4 * self.heads * self.head_dim * (sum(self.context_lengths) + self.rows * self.suffix)

    @property
    def prefix_only(self) -> OpCase:
        return replace(self, suffix=1)

    @property
    def suffix_only(self) -> OpCase:
        return replace(self, nodes=())

    def columns(self) -> dict[str, Any]:
        """Those of a row; ``nodes`` are such as ``1x2400+8x512``: nodes of each depth, times their tokens."""
        levels = []
        for _, level in groupby(self.nodes, lambda node: node.depth):
            runs = [(length, len(list(run))) for length, run in groupby(node.length for node in level)]
            levels.append(",".join(f"{count}x{length}" for length, count in runs))
        names = ("rows", "context", "suffix", "heads", "kv_heads", "head_dim", "dtype")
        return {"case": self.name, **{name: getattr(self, name) for name in names}, "nodes": "+".join(levels)}


def shared(n: int, context: int, suffix: int, heads: int, kv_heads: int, **options: Any) -> OpCase:
    """`n` samples of one context, the paper's case."""
    case = OpCase("", n, (NodeSpec(context, 0, n),), suffix, heads, kv_heads, **options)
    head_dim = "" if case.head_dim == OpCase.head_dim else f"d{case.head_dim}"
    return replace(case, name=f"n{n}-m{context}-L{suffix}-h{heads}g{kv_heads}{head_dim}")


def tree_case(tree: Tree, heads: int, kv_heads: int, **options: Any) -> OpCase:
    """A published tree, whose last level is the rows' suffixes."""
    counts, lengths = tree
    levels = enumerate(zip(counts[:-1], lengths[:-1], strict=True))
    nodes = [_level([length] * count, counts[-1] // count, depth) for depth, (count, length) in levels]
    name = f"tree{'x'.join(map(str, counts))}-L{'x'.join(map(str, lengths))}-h{heads}g{kv_heads}"
    return OpCase(name, counts[-1], tuple(chain(*nodes)), lengths[-1], heads, kv_heads, **options)


def _level(lengths: Iterable[int], each: int, depth: int) -> tuple[NodeSpec, ...]:
    return tuple(NodeSpec(length, index * each, each, depth) for index, length in enumerate(lengths))


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


_HEADS = ((32, 32), (32, 8), (8, 1))

_GRID = tuple(
    shared(n, context, suffix, *heads)
    for heads, suffix, context, n in product(_HEADS, (64, 256), (2048, 8192, 16384, 32768), (1, 8, 32, 128, 512, 1024))
)
_ONE_ROW = tuple(shared(1, context, 64, 32, 8) for context in (8192, 65536))
_RAGGED = (OpCase("ragged-8-rows-1K-to-128K", 8, _level([1024 << step for step in range(8)], 1, 0), 64, 32, 8),)
_TWO_LEVEL = (
    OpCase("two-level", 1024, (NodeSpec(2400, 0, 1024), *_level([512] * 8, 128, 1)), 64, 32, 8),
    OpCase("two-level-as-one", 1024, _level([2912] * 8, 128, 0), 64, 32, 8),
    # Every row has its problem to itself, in front of what it added.
    OpCase("two-level-first-only", 1024, (NodeSpec(2400, 0, 1024),), 512 + 64, 32, 8),
)
_HEAD_DIMS = tuple(
    shared(n, 8192, 64, heads, kv_heads, head_dim=head_dim)
    for heads, kv_heads, head_dim in ((32, 8, 64), (32, 32, 80), (32, 32, 96), (8, 4, 256), (16, 16, 256))
    for n in (8, 128, 1024)
)
# What rows have drawn themselves; for one row, also as many tokens as a prompt.
_COMPLETIONS = tuple(
    shared(n, context, suffix, *heads)
    for heads in _HEADS[:2]
    for n, context, suffix in (
        *((1, 128, 8192), (1, 8192, 128), (1, 128, 65536), (1, 65536, 128)),
        *((4, 128, 16384), (16, 128, 4096), (64, 128, 2048), (128, 8192, 256)),
    )
)
_FASTTREE = tuple(tree_case(tree, *heads, dtype="float16") for heads, tree in product(FASTTREE_HEADS, FASTTREE))
_PAT = tuple(tree_case(tree, *heads, dtype="float16") for heads, tree in product(PAT_HEADS, PAT))
_SMALL = (
    shared(1, 8192, 64, 32, 8),
    shared(8, 2048, 64, 32, 32),
    shared(32, 16384, 64, 32, 8),
    shared(128, 2048, 256, 32, 32),
    shared(128, 8192, 64, 32, 8),
    shared(1024, 8192, 64, 32, 8),
    shared(128, 16384, 64, 8, 1),
)
_TINY = (
    shared(4, 96, 8, 4, 2, head_dim=32, dtype="float32"),
    OpCase("two-level-tiny", 6, (NodeSpec(48, 0, 6), *_level([17, 17], 3, 1)), 5, 4, 2, head_dim=32, dtype="float32"),
    OpCase("ragged-tiny", 3, _level([1, 63, 100], 1, 0), 3, 4, 1, head_dim=32, dtype="float32"),
)

OP_SETS: dict[str, tuple[OpCase, ...]] = {
    "grid": _GRID,
    "one-row": _ONE_ROW,
    "ragged": _RAGGED,
    "two-level": _TWO_LEVEL,
    "head-dims": _HEAD_DIMS,
    "completions": _COMPLETIONS,
    "fasttree": _FASTTREE,
    "pat": _PAT,
    "h200": (*_ONE_ROW, *_RAGGED, *_TWO_LEVEL, *_GRID),
    "small": _SMALL,
    "tiny": _TINY,
}
"""Named sets; the help of `ops` says what each is."""
