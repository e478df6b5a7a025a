"""The kernel for Hopper GPUs: where its descriptor of all memory serves, and where a node needs its own."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_fastdecode.attention.kv import ForestKV, Segment

from ..attention.forests import make_inputs, random_forest

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode import api as nodes
from hf_fastdecode.kernels.forest_decode.api import choose_config

from .operator_runs import check


@pytest.mark.gpu
@pytest.mark.parametrize("off", [0, 8])
def test_storage_that_rows_of_all_memory_do_not_begin_with(off):
    """Of no KV head, or of the first one only: heads are 16 bytes further apart than their tokens are long."""
    query, kv = hopper_inputs(head_dim=128)

    def moved(part: Tensor) -> Tensor:
        heads, tokens, head_dim = part.shape
        apart = tokens * head_dim + 8
        flat = torch.full((off + heads * apart,), torch.nan, dtype=part.dtype, device=part.device)
        return flat[off:].as_strided(part.shape, (apart, head_dim, 1), off).copy_(part)

    check(query, replace(kv, segments=[Segment(*map(moved, segment)) for segment in kv.segments]))


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "plane"), [(64, 1 << 12), (128, 1 << 11)])
def test_nodes_that_lie_across_planes(head_dim, plane, monkeypatch):
    monkeypatch.setattr("hf_fastdecode.kernels.forest_decode.api.PLANE", plane)
    check(*hopper_inputs(head_dim))


def hopper_inputs(head_dim: int) -> tuple[Tensor, ForestKV]:
    """Nodes of one tile and of several, wide enough for the Hopper kernel where there is one."""
    forest = random_forest(random.Random(6), 90, 3, longest=900)
    widest = 4 * max(node.row_count for node in forest.nodes)
    assert choose_config(widest, head_dim, overlap=True).hopper == (torch.cuda.get_device_capability()[0] == 9)
    return make_inputs(forest, 20, heads=8, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_descriptor_finds_every_row(head_dim):
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    descriptor = nodes.all_memory(torch.bfloat16, 128, head_dim, nodes.PLANE)
    row = 2 * head_dim
    for address in (row, 0x302000000, 0x7F0123456700 // row * row, (1 << nodes.ADDRESS_BITS) - row):
        plane, at = divmod(address // row - 1, nodes.PLANE)
        assert plane < descriptor.shape[0]
        assert descriptor.base.data_ptr() + 2 * (plane * descriptor.strides[0] + at * descriptor.strides[1]) == address
    # What the bulk copy engine takes (CUDA driver API, cuTensorMapEncodeTiled), and 32-bit coordinates.
    assert all(2 * stride < 1 << 40 for stride in descriptor.strides)
    assert all(size < 1 << 31 for size in descriptor.shape)
