"""Ways of FlashInfer and FastTree on the CPU: tables and calls against the oracle, with fakes that read by them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks.operator_time import Ceilings
from benchmarks.ops.cases import OP_SETS, NodeSpec, OpCase, shared, tree_case
from benchmarks.ops.inputs import BOUND, make_inputs, make_oracle
from benchmarks.ops.library_ways import (
    LAYOUTS,
    PAGE_SIZE,
    PagePool,
    cascade_calls,
    decode_calls,
    fasttree_calls,
    fasttree_refusal,
    flashinfer_refusal,
    levels,
    tree_of,
    whole_rows,
)
from benchmarks.ops.measure import OpBench
from benchmarks.ops.ways import OP_WAYS, OpWay
from hf_fastdecode.measurement.rows import NotAvailableError

CPU = torch.device("cpu")
CASES = [
    shared(1, 128, 300, 4, 4, head_dim=16),
    shared(3, 48, 16, 4, 1, head_dim=16),
    shared(5, 63, 1, 6, 3, head_dim=16),
    replace(shared(4, 40, 33, 4, 2, head_dim=16), nodes=()),
    OpCase("two-level", 6, (NodeSpec(48, 0, 6), NodeSpec(17, 0, 3, 1), NodeSpec(40, 3, 3, 1)), 5, 4, 2, 16),
    OpCase("ragged", 3, (NodeSpec(1, 0, 1), NodeSpec(63, 1, 1), NodeSpec(100, 2, 1)), 3, 4, 1, 16),
    OpCase("short", 4, (NodeSpec(1, 0, 4), NodeSpec(3, 0, 2, 1), NodeSpec(9, 2, 2, 1)), 2, 2, 2, 16),
]
SMALL_TREE = tree_case(((1, 2, 4), (5, 7, 3)), 8, 2, head_dim=16, dtype="float16")
ROOTS = OpCase("roots", 4, (NodeSpec(6, 0, 3), NodeSpec(2, 3, 1)), 5, 4, 4, 16, "float16")
NO_NODES = replace(shared(3, 8, 9, 16, 1, head_dim=16, dtype="float16"), nodes=())


class Paged:
    """Attention by page tables, as the signatures of FlashInfer 0.7 have it; a sequence's rows are its queries."""

    def _read(self, layout, query_start, buffers):
        assert layout in ("HND", "NHD")
        assert all(buffer.dtype == torch.int32 for buffer in buffers)
        self.layout, self.query_start, self.buffers = layout, query_start, buffers

    def _planned(self, tables, heads, kv_heads, head_dim, page_size, q_data_type, kv_data_type, sm_scale):
        for buffer, table in zip(self.buffers, tables, strict=True):
            buffer.copy_(table)
        self.heads, self.kv_heads, self.page = heads, kv_heads, (page_size, head_dim)
        assert q_data_type == kv_data_type
        self.dtype, self.scale = q_data_type, sm_scale

    def _attend(self, query, cache):
        if self.layout == "NHD":
            cache = [part.transpose(1, 2) for part in cache]
        keys, values = cache  # [pages, kv_heads, page, head_dim]
        assert query.dtype == keys.dtype == self.dtype
        assert query.shape[1] == self.heads
        assert keys.shape[1:] == values.shape[1:] == (self.kv_heads, *self.page)
        start, pages, last = (buffer.tolist() for buffer in self.buffers[-3:])
        out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
        for index, length in enumerate(last):
            assert 1 <= length <= PAGE_SIZE
            mine = pages[start[index] : start[index + 1]]
            tokens = (len(mine) - 1) * PAGE_SIZE + length
            k, v = (part[mine].transpose(0, 1).flatten(1, 2)[:, :tokens].double() for part in (keys, values))
            rows = slice(self.query_start[index], self.query_start[index + 1])
            grouped = query[rows].double().unflatten(1, (self.kv_heads, -1))  # [rows, kv_heads, group, head_dim]
            scores = torch.einsum("rgpd,gnd->rgpn", grouped, k) * self.scale
            out[rows] = torch.einsum("rgpn,gnd->rgpd", scores.softmax(-1), v).flatten(1, 2).to(query.dtype)
            lse[rows] = (scores.logsumexp(-1) / torch.log(torch.tensor(2.0))).flatten(1, 2).float()
        return out, lse


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
    ):
        assert use_cuda_graph
        buffers = [paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer]
        self._read(kv_layout, range(len(paged_kv_indptr_buffer)), buffers)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *positional, **options
    ):
        self._planned((indptr, indices, last_page_len), num_qo_heads, num_kv_heads, head_dim, page_size, **options)

    def run(self, q, paged_kv_cache, *args):
        return self._attend(q, paged_kv_cache)[0]


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        **options,
    ):
        assert options in ({}, {"backend": "fa2"})
        assert use_cuda_graph
        buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
        self._read(kv_layout, qo_indptr_buf, buffers)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        **options,
    ):
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._planned(tables, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **options)

    def run(self, q, paged_kv_cache, *args, out=None, return_lse=False):
        found, lse = self._attend(q, paged_kv_cache)
        out = found if out is None else out.copy_(found)
        return (out, lse) if return_lse else out


class MultiLevelCascadeAttentionWrapper:
    def __init__(
        self,
        num_levels,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf_arr=None,
        paged_kv_indptr_buf_arr=None,
        paged_kv_indices_buf_arr=None,
        paged_kv_last_page_len_buf_arr=None,
    ):
        kv = (paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        buffers = (qo_indptr_buf_arr, *kv)
        self.levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *level)
            for level in zip(*buffers, strict=True)
        ]
        assert len(self.levels) == num_levels

    def plan(
        self,
        qo_indptr_arr,
        paged_kv_indptr_arr,
        paged_kv_indices_arr,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        **options,
    ):
        tables = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for level, *each in zip(self.levels, *tables, strict=True):
            level.plan(*each, num_qo_heads, num_kv_heads, head_dim, page_size, **options)

    def run(self, q, paged_kv_cache):
        out, lse = self.levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self.levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    weight = torch.sigmoid((s_other - s) * torch.log(torch.tensor(2.0))).unsqueeze(-1)
    v.copy_(torch.lerp(v.float(), v_other.float(), weight))
    s.copy_(torch.logaddexp2(s, s_other))


STAND_INS = {
    each.__name__: each
    for each in (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        MultiLevelCascadeAttentionWrapper,
        merge_state_in_place,
    )
}


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("flashinfer")
    vars(module).update(STAND_INS, __version__="0.0")
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("benchmarks.ops.library_ways._WORKSPACE_BYTES", 16)
    return module


class FastTreeParams:
    def set_values(self, alpha, beta, gamma):
        self.weights = alpha, beta, gamma

    def set_q_tile_sizes(self, TSQs):
        self.TSQs = TSQs

    def set_kv_tile_sizes(self, TSKs):
        self.TSKs = TSKs

    def set_kv_group_num(self, kv_group_num):
        self.group = kv_group_num


def fasttree_preparation(
    tree_info,
    KV_ptrs,
    batch_size,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    KV_SPLIT_SIZES,
    para_threshs1,
    para_threshs2,
    params,
):
    """The tables are each request's tokens, and the tiles that the kernels must be told are others than before."""
    print("what it prints")
    assert params.group == num_qo_heads // num_kv_heads
    assert (KV_SPLIT_SIZES, para_threshs1, para_threshs2) == ([1024, 128], [132, 528], [132, 132])
    assert [node.id for node in tree_info] == list(range(len(tree_info)))
    assert [node.parent for node in tree_info].count(-1) == 1
    tokens = [[] for _ in range(batch_size)]
    for node in tree_info:
        assert node.num_children == sum(other.parent == node.id for other in tree_info)
        assert node.parent < node.id
        for request in node.requests:
            tokens[request] += range(KV_ptrs[node.id], KV_ptrs[node.id + 1])
    params.set_q_tile_sizes([params.TSQs[1]] * 2)
    return (tokens, head_dim), None


def fasttree_decode(q, k_buffer, v_buffer, o, tokens, head_dim, q_tiles, kv_tiles, sm_scale):
    assert q_tiles[0] == q_tiles[1]
    assert kv_tiles == [32, 32]
    assert q.shape[2] == k_buffer.shape[2] == v_buffer.shape[2] == head_dim
    group = q.shape[1] // k_buffer.shape[1]
    for request, own in enumerate(tokens):
        keys, values = (
            part[own].transpose(0, 1).repeat_interleave(group, 0).double() for part in (k_buffer, v_buffer)
        )
        weights = torch.softmax(torch.einsum("hd,hnd->hn", q[request].double(), keys) * sm_scale, -1)
        o[request] = torch.einsum("hn,hnd->hd", weights, values).to(o.dtype)


@pytest.fixture
def fasttree(monkeypatch):
    module = types.ModuleType("fasttree")
    for each in (FastTreeParams, fasttree_preparation, fasttree_decode):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "fasttree", module)


OF_FASTTREE = [SMALL_TREE, ROOTS, NO_NODES, replace(SMALL_TREE, dtype="bfloat16")]


@pytest.mark.parametrize(
    ("case", "make"),
    [*product(CASES, (decode_calls, cascade_calls)), *product(OF_FASTTREE, (fasttree_calls,))],
    ids=lambda one: getattr(one, "name", one.__name__ if callable(one) else None),
)
def test_calls_obey_the_error_rule_on_every_set(stand_in, fasttree, case, make, capsys):
    inputs = make_inputs(case, CPU, sets=2)
    variants = make(inputs)
    assert list(variants) == [*LAYOUTS] if make is fasttree_calls else len(variants) == 4
    for calls in variants.values():
        for call, each in zip(calls, inputs, strict=True):
            assert make_oracle(each).error(call()) <= BOUND
        assert make_oracle(inputs[1]).error(calls[0]()) > 100, "the sets are the same"
    assert capsys.readouterr().out == ""  # FastTree prints its plan


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize("name", STAND_INS)
def test_the_stand_in_has_the_signatures_of_flashinfer(name):
    """What is given by position or name in both, in the same order."""
    import flashinfer

    def pairs():
        if not inspect.isclass(STAND_INS[name]):
            yield STAND_INS[name], getattr(flashinfer, name)
            return
        for method in ("__init__", "plan", "run"):
            yield getattr(STAND_INS[name], method), getattr(getattr(flashinfer, name), method)

    for mine, theirs in pairs():
        known = {
            key: value
            for key, value in inspect.signature(mine).parameters.items()
            if value.kind in (value.POSITIONAL_OR_KEYWORD, value.KEYWORD_ONLY)
        }
        real = inspect.signature(theirs).parameters
        assert set(known) <= set(real)
        positional = [key for key, value in known.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
        assert positional == list(real)[: len(positional)]


def test_rows_share_the_full_pages_of_what_they_share():
    case = OpCase("tree", 4, (NodeSpec(40, 0, 4), NodeSpec(20, 0, 2, 1), NodeSpec(24, 2, 2, 1)), 5, 2, 1, 16)
    pool = PagePool()
    rows = whole_rows(pool, case)
    tables = [rows.pages[start:stop].tolist() for start, stop in zip(rows.page_start, rows.page_start[1:])]
    assert [len(table) for table in tables] == [5, 5, 5, 5]
    assert rows.last_length.tolist() == [1, 1, 5, 5]
    assert tables[0][:3] == tables[1][:3]  # 48 of 60 tokens
    assert tables[2][:4] == tables[3][:4]  # all 64
    assert tables[0][:2] == tables[2][:2]  # 32 of 40
    assert len({page for table in tables for page in table}) == 2 + 1 + 2 + 2 * 2 + 2


def test_levels_by_hand():
    case = OpCase("tree", 4, (NodeSpec(40, 0, 4), NodeSpec(20, 0, 2, 1), NodeSpec(32, 2, 2, 1)), 5, 2, 1, 16)
    tables = levels(PagePool(), case)
    assert [level.query_start.tolist() for level in tables] == [[0, 4], [0, 2, 4], [0, 1, 2, 3, 4]]
    assert [level.page_start.tolist() for level in tables] == [[0, 3], [0, 2, 4], [0, 1, 2, 3, 4]]
    assert [level.last_length.tolist() for level in tables] == [[8], [4, 16], [5, 5, 5, 5]]
    assert torch.cat([level.pages for level in tables]).tolist() == list(range(11))


def test_what_flashinfer_refuses_is_left_out_or_told(stand_in, monkeypatch):
    plan = BatchDecodeWithPagedKVCacheWrapper.plan

    def refuse(self, *args, **options):
        if self.layout == "NHD":
            raise RuntimeError("Unsupported group_size: 7")
        plan(self, *args, **options)

    monkeypatch.setattr(BatchDecodeWithPagedKVCacheWrapper, "plan", refuse)
    inputs = make_inputs(CASES[0], CPU, sets=1)
    with pytest.warns(
        UserWarning, match=r"left out: FlashInfer 0\.0, .+, NHD: RuntimeError: Unsupported group_size: 7"
    ):
        assert set(decode_calls(inputs)) == {"FlashInfer 0.0, CUDA cores, HND", "FlashInfer 0.0, tensor cores, HND"}
    monkeypatch.delattr(stand_in, "BatchDecodeWithPagedKVCacheWrapper")
    with pytest.raises(NotAvailableError, match=r"CUDA cores, HND: AttributeError: .*tensor cores, NHD: Attr"):
        decode_calls(inputs)


def test_a_refusal_is_a_result(monkeypatch):
    bench = OpBench(CPU)
    bench.ceilings = Ceilings(1e9, 1e10)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(OP_WAYS, "flashinfer-decode", OpWay(decode_calls))
    row = bench.measure(CASES[1], "flashinfer-decode")
    assert row["status"].startswith("not run: flashinfer cannot be imported: ")
    assert row["us_p50"] is None


def test_cases_that_flashinfer_has_no_kernels_for():
    assert [flashinfer_refusal(case) for case in OP_SETS["completions"]] == [None] * len(OP_SETS["completions"])
    assert flashinfer_refusal(shared(2, 8, 8, 2, 2, head_dim=80)) == "FlashInfer takes head_dim 64, 128, 256, got 80"
    assert flashinfer_refusal(OP_SETS["tiny"][0]) == "FlashInfer takes float16 and bfloat16, got float32"
    cuda = torch.device("cuda")
    way = OP_WAYS["flashinfer-cascade"]
    if importlib.util.find_spec("flashinfer") is None:
        reason = "it is a FlashInfer kernel; pip install 'flashinfer-python>=0.7.2,<0.8'"
        assert way.not_run(OP_SETS["completions"][0], cuda) == reason
    else:
        no_nodes = OP_SETS["completions"][0].suffix_only
        assert way.not_run(no_nodes, cuda) == "the case has no nodes"


def test_a_tree_by_hand():
    found = [(node.parent, node.seqlen, node.requests, node.num_children) for node in tree_of(SMALL_TREE)]
    leaves = [(1 + row // 2, 3, [row], 0) for row in range(4)]
    assert found == [(-1, 5, [0, 1, 2, 3], 2), (0, 7, [0, 1], 2), (0, 7, [2, 3], 2), *leaves]
    roots = tree_of(ROOTS)
    assert (roots[0].seqlen, roots[0].num_children, [node.parent for node in roots[1:3]]) == (0, 2, [0, 0])


def test_cases_that_fasttree_has_no_kernels_for():
    assert [fasttree_refusal(case) for case in OP_SETS["fasttree"]] == [None] * 45
    assert fasttree_refusal(OP_SETS["tiny"][0]) == "FastTree takes float16 and bfloat16, got float32"
    refused = fasttree_refusal(shared(2, 8, 8, 4, 2))
    assert refused == "FastTree has parameters for 1, 4, 16 query heads per KV head, got 2"
    assert fasttree_refusal(shared(2, 8, 8, 4, 1, head_dim=80)).endswith("a power of two, got 80")
    long = next(case for case in OP_SETS["pat"] if case.suffix == 4096 and case.kv_heads == 32)
    assert fasttree_refusal(long) == "FastTree addresses up to 2147483648 numbers of keys, got 4294967296"


def test_without_the_module_the_row_tells(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        OP_WAYS["fasttree"]
        .not_run(SMALL_TREE, torch.device("cuda"))
        .startswith("it is a FastTree kernel; put kernel_")
    )
    monkeypatch.setitem(sys.modules, "fasttree", None)
    monkeypatch.setitem(OP_WAYS, "fasttree", OpWay(fasttree_calls))
    bench = OpBench(CPU)
    bench.ceilings = Ceilings(1e9, 1e10)
    assert bench.measure(SMALL_TREE, "fasttree")["status"].startswith("not run: fasttree cannot be imported: ")


def test_published_trees():
    """Each level of a tree covers all rows evenly, and the last one is what rows hold alone."""
    assert (len(OP_SETS["fasttree"]), len(OP_SETS["pat"])) == (15 * 3, 20 * 4)
    for case in (*OP_SETS["fasttree"], *OP_SETS["pat"]):
        assert case.dtype == "float16"
        for below in case.nodes:
            above = [node for node in case.nodes if node.depth == below.depth - 1]
            rows = range(below.row_start, below.row_start + below.row_count)
            assert bool(above) == any(
                {*rows} <= {*range(node.row_start, node.row_start + node.row_count)} for node in above
            )
    tree = next(case for case in OP_SETS["fasttree"] if case.name == "tree1x4x8x256-L8x256x256x32-h32g8")
    assert tree.columns()["nodes"] == "1x8+4x256+8x256"
    assert (tree.rows, tree.suffix, tree.context) == (256, 32, 520)
