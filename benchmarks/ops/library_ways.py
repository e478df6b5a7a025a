"""Other libraries' attention as ways, planned before the timing.

FlashInfer's wrappers, over pages of 16 tokens and tables that CUDA graphs can replay: `decode_calls` attends to each
row's whole context (what rows share is stored once and read once a row, as servers do without cascade attention),
`cascade_calls` to a level for each depth of nodes and one for the suffixes. Equal pages are stored once, those of a
sequence one after the other. New tokens are in their positions, as for all baselines. Tokens of a case are numbered:
those of the nodes, end to end as in their segment, then each row's suffix.

FastTree (MLSys 2025, github.com/PanZaifeng/FastTree-Artifact) is no package: its folder ``kernel_bench`` must be on
Python's path. Every row's suffix is a leaf of its tree; parameters are those of its own benchmark. Two of its limits
are worked around: its plan starts at node 0 only, so several roots get an empty one above them; and it may change the
query tiles that the kernels must run with, which its benchmark does not pass on.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, product
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_fastdecode.measurement.rows import NotAvailableError

from .cases import NodeSpec, OpCase
from .inputs import OpInputs

PAGE_SIZE = 16  # vLLM's default
LAYOUTS = {"HND": (1, 0, 2, 3), "NHD": (1, 2, 0, 3)}
"""Names of the orders of a page's heads, tokens and numbers, as axes of ``[kv_heads, pages, PAGE_SIZE, head_dim]``."""

Tokens = NDArray[np.int64]
"""Numbers of a sequence's tokens, in order."""

HEAD_DIMS = (64, 128, 256)

_WORKSPACE_BYTES = 512 << 20  # plans for CUDA graphs keep fp32 partial outputs: 285 MB for 1,024 rows of 32/32 heads

_Calls = list[Callable[[], Tensor]]

_Run = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
"""Attends queries ``[rows, heads, head_dim]`` to keys and values in pages."""


def flashinfer_refusal(case: OpCase) -> str | None:
    """Why FlashInfer has no kernels for a case, or None."""
    if case.dtype not in ("float16", "bfloat16"):
        return f"FlashInfer takes float16 and bfloat16, got {case.dtype}"
    if case.head_dim not in HEAD_DIMS:
        return f"FlashInfer takes head_dim {', '.join(map(str, HEAD_DIMS))}, got {case.head_dim}"
    return None


def decode_calls(sets: Sequence[OpInputs]) -> dict[str, _Calls]:
    pool = PagePool()
    rows = whole_rows(pool, sets[0].case)
    kernels = {"CUDA cores": False, "tensor cores": True}
    return _calls(sets, pool, {name: partial(_decode, rows, tensor_cores=chosen) for name, chosen in kernels.items()})


def cascade_calls(sets: Sequence[OpInputs]) -> dict[str, _Calls]:
    """The cascade wrapper as it is, and its steps with the FA2 kernels."""
    pool = PagePool()
    tables = levels(pool, sets[0].case)
    return _calls(sets, pool, {"cascade": partial(_cascade, tables), "FA2 cascade": partial(_fa2_cascade, tables)})


@dataclass(frozen=True)
class _Setup:
    """Arguments that all wrappers of a case share."""

    flashinfer: Any
    inputs: OpInputs
    workspace: Tensor
    layout: str

    def buffers(self, tables: Iterable[Tensor]) -> list[Tensor]:
        return [table.to(self.inputs.query.device, copy=True) for table in tables]

    def plan(self, wrapper: Any, *tables: Any) -> _Run:
        case, dtype = self.inputs.case, self.inputs.query.dtype
        options = {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": self.inputs.scale}
        wrapper.plan(*tables, case.heads, case.kv_heads, case.head_dim, PAGE_SIZE, **options)
        run: _Run = wrapper.run
        return run


def _decode(rows: Sequences, setup: _Setup, *, tensor_cores: bool) -> _Run:
    wrapper = setup.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        setup.workspace, setup.layout, True, tensor_cores, *setup.buffers(rows[1:])
    )
    return setup.plan(wrapper, *rows[1:])


def _cascade(tables: Sequence[Sequences], setup: _Setup) -> _Run:
    buffers = map(list, zip(*map(setup.buffers, tables)))
    wrapper = setup.flashinfer.MultiLevelCascadeAttentionWrapper(
        len(tables), setup.workspace, setup.layout, True, *buffers
    )
    return setup.plan(wrapper, *map(list, zip(*tables)))


def _fa2_cascade(tables: Sequence[Sequences], setup: _Setup) -> _Run:
    """The steps of the cascade wrapper's `run` with FA2.

    The wrapper has no argument for a backend, and takes FA3 on Hopper, which neither splits keys nor packs the query
    heads of a KV head. Outputs go to buffers, since those that `run` allocates are filled with zeros first.
    """
    wrappers = []
    for level in tables:
        wrapper = setup.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            setup.workspace, setup.layout, True, *setup.buffers(level), backend="fa2"
        )
        setup.plan(wrapper, *level)
        wrappers.append(wrapper)
    *nodes, suffixes = wrappers
    other = torch.empty_like(setup.inputs.query.squeeze(2))

    def run(query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        out, lse = suffixes.run(query, cache, out=torch.empty_like(query), return_lse=True)
        for level in nodes:
            _, other_lse = level.run(query, cache, out=other, return_lse=True)
            setup.flashinfer.merge_state_in_place(out, lse, other, other_lse)
        return out

    return run


def _calls(
    sets: Sequence[OpInputs], pool: PagePool, wrappers: Mapping[str, Callable[[_Setup], _Run]]
) -> dict[str, _Calls]:
    """The calls of every wrapper in both layouts, compiled; those that FlashInfer refuses are left out with a warning.

    Raises NotAvailableError, with each one's error, where it refuses all of them.
    """
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        raise NotAvailableError(f"flashinfer cannot be imported: {error}") from error
    inputs = sets[0]
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.query.device)
    caches = {layout: [pool.fill(each, layout) for each in sets] for layout in LAYOUTS}
    found: dict[str, _Calls] = {}
    refused = []
    for (name, make), layout in product(wrappers.items(), LAYOUTS):
        variant = f"FlashInfer {flashinfer.__version__}, {name}, {layout}"
        try:
            run = make(_Setup(flashinfer, inputs, workspace, layout))
            calls = [_call(run, each.query, cache) for each, cache in zip(sets, caches[layout], strict=True)]
            if calls[0]().is_cuda:
                torch.cuda.synchronize()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # of Python, of its C++ and of the compiler
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
            refused.append(f"{variant}: {reason}")
        else:
            found[variant] = calls
    if not found:
        raise NotAvailableError("; ".join(refused))
    for each in refused:
        warnings.warn(f"left out: {each}", stacklevel=2)
    return found


def _call(run: _Run, query: Tensor, cache: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    queries = query.squeeze(2)
    return lambda: run(queries, cache).unsqueeze(2)


class Sequences(NamedTuple):
    """Page tables of sequences, on the CPU, as int32, in the order of FlashInfer's arguments."""

    query_start: Tensor  # [sequences + 1]: where each sequence's queries start; rows are queries, in order
    page_start: Tensor  # [sequences + 1]: where each sequence's pages start in `pages`
    pages: Tensor  # numbers of the pages, sequence after sequence
    last_length: Tensor  # [sequences]: tokens in each sequence's last page; the others are full


class PagePool:
    """The pages of all sequences; sequences with the same tokens in a page have one page."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def add(self, sequences: Sequence[Tokens], queries: Iterable[int]) -> Sequences:
        """The page tables of sequences, none empty, with so many queries each."""
        pages = [self._pages(tokens) for tokens in sequences]
        return Sequences(
            _starts(queries),
            _starts(map(len, pages)),
            torch.from_numpy(np.concatenate(pages)),
            torch.tensor([(len(tokens) - 1) % PAGE_SIZE + 1 for tokens in sequences], dtype=torch.int32),
        )

    def _pages(self, tokens: Tokens) -> NDArray[np.int32]:
        filled = np.pad(tokens, (0, -len(tokens) % PAGE_SIZE), constant_values=-1).reshape(-1, PAGE_SIZE)
        numbers = self._numbers
        return np.array([numbers.setdefault(page.tobytes(), len(numbers)) for page in filled], dtype=np.int32)

    def fill(self, inputs: OpInputs, layout: str) -> tuple[Tensor, Tensor]:
        """Keys and values in pages, copied; for the layout ``HND`` ``[pages, kv_heads, PAGE_SIZE, head_dim]``."""
        # Nobody reads what follows the tokens of a partial page; -1 puts the last token there, which is finite.
        slots = torch.frombuffer(bytearray().join(self._numbers), dtype=torch.int64).to(inputs.query.device)

        def part(nodes: Tensor, own: Tensor) -> Tensor:
            return tokens_of(nodes, own)[:, slots].unflatten(1, (-1, PAGE_SIZE)).permute(LAYOUTS[layout]).contiguous()

        return part(inputs.segment.keys, inputs.suffix.keys), part(inputs.segment.values, inputs.suffix.values)


def whole_rows(pool: PagePool, case: OpCase) -> Sequences:
    """Each row's whole context and suffix as one sequence; rows share the full pages of what they share."""
    paths: list[list[Tokens]] = [[] for _ in range(case.rows)]
    for node, tokens in _nodes(case):
        for path in paths[node.row_start : node.row_start + node.row_count]:
            path.append(tokens)
    rows = [np.concatenate([*path, own]) for path, own in zip(paths, _suffixes(case), strict=True)]
    return pool.add(rows, [1] * case.rows)


def levels(pool: PagePool, case: OpCase) -> list[Sequences]:
    """The nodes of each depth as sequences, and last the suffixes."""
    found = []
    for _, level in groupby(_nodes(case), lambda placed: placed[0].depth):
        nodes, sequences = zip(*level)
        found.append(pool.add(sequences, [node.row_count for node in nodes]))
    return [*found, pool.add(_suffixes(case), [1] * case.rows)]


def _nodes(case: OpCase) -> list[tuple[NodeSpec, Tokens]]:
    starts = accumulate((node.length for node in case.nodes), initial=0)
    return [(node, np.arange(start, start + node.length)) for node, start in zip(case.nodes, starts)]


def _suffixes(case: OpCase) -> list[Tokens]:
    return list(np.arange(case.stored_tokens, case.stored_tokens + case.rows * case.suffix).reshape(case.rows, -1))


def _starts(lengths: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


QUERY_TILES: Final = {1: (64, 16), 4: (16, 4), 16: (4, 1)}
"""Rows per query tile in the first and the second launch, by query heads per KV head."""

_KEY_TILES = (32, 32)
_COST_WEIGHTS = (0.66, 0.33, 0.1)  # alpha, beta and gamma: of padded queries, of padded keys, and of merging
_SPLITS = (1024, 128)  # keys of a piece, and those where there are fewer pieces than the first thresholds
_THRESHOLDS = ((132, 528), (132, 132))

_MOST_NUMBERS = 2**31  # its kernels compute offsets in 32 bits


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
    return {layout: [_fasttree_call(fasttree, plan, inputs, layout) for inputs in sets] for layout in LAYOUTS}


def _planned(fasttree: Any, case: OpCase) -> tuple[Any, ...]:
    """Output of `fasttree_preparation`, tables and workspace; then query and key tiles of both launches."""
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
    return *tables, params.TSQs, params.TSKs


def tree_of(case: OpCase) -> list[TreeNode]:
    """Nodes by depth and suffixes as leaves, parents first, in the order of `tokens_of`; roots get one above."""
    placed = [
        [(node.length, range(node.row_start, node.row_start + node.row_count)) for node in level]
        for _, level in groupby(case.nodes, lambda node: node.depth)
    ]
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


def _fasttree_call(fasttree: Any, plan: tuple[Any, ...], inputs: OpInputs, layout: str) -> Callable[[], Tensor]:
    query = inputs.query.squeeze(2)
    keys, values = (
        tokens_of(nodes, own).transpose(0, 1) for nodes, own in zip(inputs.segment, inputs.suffix, strict=True)
    )
    if layout == "NHD":
        keys, values = keys.contiguous(), values.contiguous()
    out = torch.empty_like(query)

    def call() -> Tensor:
        fasttree.fasttree_decode(query, keys, values, out, *plan, inputs.scale)
        return out.unsqueeze(2)

    return call
