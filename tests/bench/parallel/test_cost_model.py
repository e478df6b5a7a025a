"""The cost model and the paper's equations against numbers computed by hand."""

import pytest

from hf_fastdecode.bench.parallel import volumes
from hf_fastdecode.bench.parallel.cases import AttentionCase
from hf_fastdecode.bench.parallel.cost_model import Cluster, Heads, Link, predict, predictions
from hf_fastdecode.bench.parallel.scaling_figure import draw_scaling, scaling_table

# Numbers that are easy to follow: 100 bytes a second and 1 s within nodes of two GPUs, 10 and 2 between them.
SMALL = Cluster(Link(100, 1), Link(10, 2), gpus_of_node=2, memory_bytes_per_s=50)
# Four bytes of keys and values a token, a numerator of 4 bytes, a denominator of 4.
HEAD = Heads(1, 1, 1)


def test_collectives_of_two_levels():
    # Within a node: 2 messages of half the bytes. Between two nodes: up and down a tree, again half of them each.
    assert SMALL.all_reduce_s(2, 40) == pytest.approx(2 * (1 + 20 / 100))
    assert SMALL.all_reduce_s(4, 40) == pytest.approx(2.4 + 2 * (2 + 20 / 10))
    assert SMALL.all_reduce_s(16, 40) == pytest.approx(2.4 + 2 * 3 * (2 + 20 / 10))
    # One GPU's bytes to the other one; then also those of another node's two GPUs, over two links at once.
    assert SMALL.all_gather_s(2, 40) == pytest.approx(1 + 40 / 100)
    assert SMALL.all_gather_s(4, 40) == pytest.approx(1 + 2 * 40 / 100 + 2 + 40 / 10)


def test_a_prediction():
    found = predict(SMALL, HEAD, context=100, gpus=4)
    assert found.attend_s == pytest.approx(100 / 50)  # 25 tokens of 4 bytes
    assert found.ring_s == pytest.approx(2 + 3 * (2 + 100 / 10))  # the link between nodes paces every hop
    assert found.tree_s == pytest.approx(2 + 3 * SMALL.all_reduce_s(4, 4))
    assert found.one_gather_s == pytest.approx(2 + SMALL.all_gather_s(4, 8))
    # Within one node, attention may hide the next part: 50 tokens, 200 bytes, 4 s of attention and 3 of the link.
    assert predict(SMALL, HEAD, context=100, gpus=2).ring_s == pytest.approx(4 + 4)


def test_tree_gains_on_ring_with_every_node():
    found = predictions(Cluster(), Heads(16, 16, 128), [5_120_000])
    ratios = [one.ring_s / one.tree_s for one in found if one.gpus <= 256]
    assert ratios == sorted(ratios)


def test_links_are_read_from_options():
    assert Link.parse("nvlink", "450,3") == Link(450e9, pytest.approx(3e-6))
    for text in ("450", "a,b", "0,1", "1,-1", "inf,1"):
        with pytest.raises(ValueError, match=r"--nvlink must be GB/s above 0 .* got .*; give such as 450,1"):
            Link.parse("nvlink", text)


def test_figure_and_table(tmp_path):
    found = predictions(SMALL, HEAD, [100, 200], gpus=(2, 4))
    assert draw_scaling(found, HEAD, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    text = scaling_table(found, SMALL, HEAD)
    assert "| 100 | 2 | 4,000,000 | 8,000,000 |" in text
    assert "Predicted, not measured" in text


def test_the_papers_equations():
    """The paper's example (section 6.3): 640,000 tokens between 8 GPUs, a hidden size of 2048 in bfloat16."""
    case = AttentionCase("paper", 640_000, rows=1, layers=1, heads=16, kv_heads=16, head_dim=128, ranks=8)
    assert volumes.stored_bytes(case, 2) == 2 * 80_000 * 2048 * 2
    assert volumes.ring_volume(case, 2) == 8 * 2 * 80_000 * 2048 * 2
    assert volumes.tree_volume(case) == 2 * 7 * (2048 + 2 * 16) * 4 // 8
    assert volumes.ring_memory(case, 2) == (4 * 80_000 * 2048 + 2 * 2048) * 2
    assert volumes.tree_memory(case, 2) == (2 * 80_000 * 2048 + 2048) * 2 + (2048 + 2 * 16) * 4


def test_parts_must_be_equal():
    with pytest.raises(ValueError, match=r"a multiple of the number of processes, 8, .* got 1001; give 1000"):
        AttentionCase("x", 1001, 1, 1, 4, 2, 32, ranks=8)
