"""FastTree's way on the CPU: trees and calls against the oracle, with a stand-in that reads by them."""

import importlib
import sys
import types
from dataclasses import replace

import pytest
import torch

from benchmarks.operator_time import Ceilings
from benchmarks.ops.cases import OP_SETS, NodeSpec, OpCase, shared, tree_case
from benchmarks.ops.inputs import BOUND, make_inputs, make_oracle
from benchmarks.ops.library_ways import LAYOUTS, fasttree_calls, fasttree_refusal, tree_of
from benchmarks.ops.measure import OpBench
from benchmarks.ops.ways import OP_WAYS, OpWay

CPU = torch.device("cpu")
TREE = tree_case(((1, 2, 4), (5, 7, 3)), 8, 2, head_dim=16, dtype="float16")
ROOTS = OpCase("roots", 4, (NodeSpec(6, 0, 3), NodeSpec(2, 3, 1)), 5, 4, 4, 16, "float16")
NO_NODES = replace(shared(3, 8, 9, 16, 1, head_dim=16, dtype="float16"), nodes=())


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
def stand_in(monkeypatch):
    module = types.ModuleType("fasttree")
    for each in (FastTreeParams, fasttree_preparation, fasttree_decode):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "fasttree", module)


@pytest.mark.parametrize("case", [TREE, ROOTS, NO_NODES, replace(TREE, dtype="bfloat16")], ids=lambda case: case.name)
def test_calls_obey_the_error_rule_on_every_set(stand_in, case, capsys):
    inputs = make_inputs(case, CPU, sets=2)
    variants = fasttree_calls(inputs)
    assert tuple(variants) == tuple(LAYOUTS)
    for calls in variants.values():
        for call, each in zip(calls, inputs, strict=True):
            assert make_oracle(each).error(call()) <= BOUND
        assert make_oracle(inputs[1]).error(calls[0]()) > 100, "the sets are the same"
    assert capsys.readouterr().out == ""


def test_a_tree_by_hand():
    found = [(node.parent, node.seqlen, node.requests, node.num_children) for node in tree_of(TREE)]
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
    assert OP_WAYS["fasttree"].not_run(TREE, torch.device("cuda")).startswith("it is a FastTree kernel; put kernel_")
    monkeypatch.setitem(sys.modules, "fasttree", None)
    monkeypatch.setitem(OP_WAYS, "fasttree", OpWay(fasttree_calls))
    bench = OpBench(CPU)
    bench.ceilings = Ceilings(1e9, 1e10)
    assert bench.measure(TREE, "fasttree")["status"].startswith("not run: fasttree cannot be imported: ")


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
