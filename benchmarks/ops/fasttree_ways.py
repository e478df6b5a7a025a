"""FastTree's kernels as a way: attention over a tree of nodes, planned before the timing.

FastTree (MLSys 2025, github.com/PanZaifeng/FastTree-Artifact) is no package: its folder ``kernel_bench``, with the
module of its Triton kernels, must be on Python's path. Every row's suffix is a leaf of its tree. Its plan joins short
nodes with those below them, splits long ones, and sorts what is left into two launches by the number of rows; a third
launch merges. New tokens are in their places, as for all baselines.

Parameters are those of its own benchmark. Two of its limits are worked around, so that results are right:

- Its plan starts at node 0 only, so several roots get an empty one above them.
- Its plan may change the query tiles that the kernels must run with, which its benchmark does not pass on.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, Final

import torch
from torch import Tensor

from hf_fastdecode.measurement.rows import NotAvailableError

from .cases import OpCase
from .inputs import OpInputs

QUERY_TILES: Final = {1: (64, 16), 4: (16, 4), 16: (4, 1)}
"""Rows per query tile in the first and the second launch, by query heads per KV head."""

_KEY_TILES = (32, 32)
_COST_WEIGHTS = (0.66, 0.33, 0.1)  # alpha, beta and gamma: of padded queries, of padded keys, and of merging
_SPLITS = (1024, 128)  # keys of a piece, and those where there are fewer pieces than the first thresholds
_THRESHOLDS = ((132, 528), (132, 132))

_MOST_NUMBERS = 2**31  # its kernels compute offsets in 32 bits

LAYOUTS: Final = ("NHD", "HND")
"""Orders of tokens and KV heads in memory; its kernels take any strides."""


@dataclass
class TreeNode:
    """A node as FastTree's plan reads it; `parent` is -1 for the root, `requests` are the node's rows."""

    parent: int
    id: int
    seqlen: int
    requests: list[int]
    num_children: int = field(default=0)


def fasttree_refusal(case: OpCase) -> str | None:
    """Why FastTree has no kernels or parameters for a case, or None."""
    group = case.heads // case.kv_heads
    if case.dtype not in ("float16", "bfloat16"):
        return f"FastTree takes float16 and bfloat16, got {case.dtype}"
    if group not in QUERY_TILES:
        known = ", ".join(map(str, QUERY_TILES))
        return f"FastTree has parameters for {known} query heads per KV head, got {group}"
    if case.head_dim & (case.head_dim - 1):
        return f"FastTree takes a head_dim that is a power of two, got {case.head_dim}"
    numbers = (case.stored_tokens + case.rows * case.suffix) * case.kv_heads * case.head_dim
    if numbers >= _MOST_NUMBERS:
        return f"FastTree addresses up to {_MOST_NUMBERS} numbers of keys, got {numbers}"
    return None


def fasttree_calls(sets: Sequence[OpInputs]) -> dict[str, list[Callable[[], Tensor]]]:
    """Its kernels over keys and values in both layouts; NotAvailableError where it cannot be imported."""
    try:
        fasttree = importlib.import_module("fasttree")
    except ImportError as error:
        raise NotAvailableError(f"fasttree cannot be imported: {error}") from error
    plan = _planned(fasttree, sets[0].case)
    return {layout: [_call(fasttree, plan, inputs, layout) for inputs in sets] for layout in LAYOUTS}


@dataclass(frozen=True)
class _Plan:
    """What `fasttree_preparation` made of a case's tree: tables and workspace, and tiles of both launches."""

    tables: Sequence[Any]
    query_tiles: Sequence[int]
    key_tiles: Sequence[int]


def _planned(fasttree: Any, case: OpCase) -> _Plan:
    nodes = tree_of(case)
    params = fasttree.FastTreeParams()
    params.set_values(*_COST_WEIGHTS)
    params.set_q_tile_sizes(list(QUERY_TILES[case.heads // case.kv_heads]))
    params.set_kv_tile_sizes(list(_KEY_TILES))
    params.set_kv_group_num(case.heads // case.kv_heads)
    first_tokens = list(accumulate((node.seqlen for node in nodes), initial=0))
    sizes = (case.rows, case.heads, case.kv_heads, case.head_dim)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its plan
        tables, _ = fasttree.fasttree_preparation(
            nodes, first_tokens, *sizes, list(_SPLITS), *map(list, _THRESHOLDS), params
        )
    return _Plan(tables, params.TSQs, params.TSKs)


def tree_of(case: OpCase) -> list[TreeNode]:
    """The nodes by depth and the suffixes as leaves, parents first, in the order of the tokens of `tokens_of`.

    Several roots are below an empty one.
    """
    levels = [list(level) for _, level in groupby(case.nodes, lambda node: node.depth)]
    placed = [[(node.length, range(node.row_start, node.row_start + node.row_count)) for node in lv] for lv in levels]
    placed.append([(case.suffix, range(row, row + 1)) for row in range(case.rows)])
    if len(placed[0]) > 1:
        placed.insert(0, [(0, range(case.rows))])
    tree: list[TreeNode] = []
    above = [-1] * case.rows  # of each row, its node on the level above
    for level in placed:
        for length, rows in level:
            node = TreeNode(above[rows[0]], len(tree), length, list(rows))
            tree.append(node)
            if node.parent >= 0:
                tree[node.parent].num_children += 1
            for row in rows:
                above[row] = node.id
    return tree


def tokens_of(nodes: Tensor, own: Tensor) -> Tensor:
    """Keys or values of all tokens, ``[kv_heads, tokens, head_dim]``: those of the nodes, then each row's suffix."""
    return torch.cat([nodes, own.transpose(0, 1).flatten(1, 2)], 1)


def _call(fasttree: Any, plan: _Plan, inputs: OpInputs, layout: str) -> Callable[[], Tensor]:
    query = inputs.query.squeeze(2)
    keys, values = (
        tokens_of(nodes, own).transpose(0, 1) for nodes, own in zip(inputs.segment, inputs.suffix, strict=True)
    )
    if layout == "NHD":
        keys, values = keys.contiguous(), values.contiguous()
    out = torch.empty_like(query)

    def call() -> Tensor:
        fasttree.fasttree_decode(
            query, keys, values, out, *plan.tables, plan.query_tiles, plan.key_tiles, inputs.scale
        )
        return out.unsqueeze(2)

    return call
