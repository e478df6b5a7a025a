"""The cost model and the paper's equations against numbers computed by hand; fits to rows that the model makes."""

from dataclasses import asdict
from itertools import product

import pytest

from benchmarks.parallel.cases import AttentionCase, paper_bytes
from benchmarks.parallel.cost_model import DEVICE, Cluster, Heads, Link, fitted, measured_cluster, predict, predictions
from benchmarks.parallel.table import predicted_table, scaling_table

# Numbers that are easy to follow: 100 bytes a second and 1 s within nodes of two GPUs, 10 and 2 between them.
OWN = {"gather_s": 3, "reduce_s": 5, "pass_s": 7}
SMALL = Cluster(Link(50, 4), Link(100, 1), **OWN, between=Link(10, 2), gpus_of_node=2)
# Four bytes of keys and values a token, a numerator of 4 bytes, a denominator of 4.
HEAD = Heads(1, 1, 1)


def test_collectives_of_two_levels():
    # Within a node: half the bytes, twice. Between two nodes: up and down a tree, again half of them each.
    assert SMALL.all_reduce_s(2, 40) == pytest.approx(5 + 1 + 2 * 20 / 100)
    assert SMALL.all_reduce_s(4, 40) == pytest.approx(6.4 + 2 * (2 + 20 / 10))
    assert SMALL.all_reduce_s(16, 40) == pytest.approx(6.4 + 2 * 3 * (2 + 20 / 10))
    # One GPU's bytes to the other one; then also those of another node's two GPUs, over two links at once.
    assert SMALL.all_gather_s(2, 40) == pytest.approx(3 + 1 + 40 / 100)
    assert SMALL.all_gather_s(4, 40) == pytest.approx(3 + 1 + 2 * 40 / 100 + 2 + 40 / 10)


def test_a_prediction():
    found = predict(SMALL, HEAD, context=100, gpus=4)
    assert found.attend_s == pytest.approx(4 + 100 / 50)  # 25 tokens of 4 bytes
    assert found.ring_s == pytest.approx(6 + 3 * (2 + 100 / 10))  # the link between nodes paces every hop
    assert found.tree_s == pytest.approx(6 + 3 * SMALL.all_reduce_s(4, 4))
    assert found.one_gather_s == pytest.approx(6 + SMALL.all_gather_s(4, 8))
    # Within one node: 50 tokens, 200 bytes, 8 s of attention and 10 of a pass; of 200 tokens attention hides the pass.
    assert predict(SMALL, HEAD, context=100, gpus=2).ring_s == pytest.approx(8 + 7 + 1 + 200 / 100)
    assert predict(SMALL, HEAD, context=400, gpus=2).ring_s == pytest.approx(20 + 20)


def test_tree_gains_on_ring_with_every_node():
    found = predictions(measured_cluster(), Heads(16, 16, 128), [5_120_000])
    ratios = [one.ring_s / one.tree_s for one in found if one.gpus <= 128]
    assert ratios == sorted(ratios)


def rows_of(cluster):
    """Rows as they would be measured on the cluster, and others that a fit leaves out."""
    heads = {"shape": "8b-gqa", "heads": "32", "kv_heads": "8", "head_dim": "128", "rows": "1"}
    others = {"status": "wrong"}, {"rows": "16"}, {"device": "another"}, {"way": "no-communication"}
    for context, gpus in product((131_072, 262_144), (2, 4, 8)):
        of_part, of_all = (predict(cluster, Heads(32, 8, 128), context, count) for count in (gpus, 1))
        ways = {"one-gpu": of_all.attend_s, "tree": of_part.one_gather_s}
        ways |= {"three-all-reduces": of_part.tree_s, "ring": of_part.ring_s}
        for way, seconds in ways.items():
            row = {"device": DEVICE, "status": "ok", "context": f"{context}", "ranks": f"{gpus}", "way": way, **heads}
            yield row | {"us_p50": f"{1e6 * seconds}"}
            yield from (row | {"us_p50": "1"} | other for other in others)


MADE_UP = Cluster(Link(4e12, 5e-6), Link(300e9, 2e-6), gather_s=9e-6, reduce_s=14e-6, pass_s=4e-4)


def test_a_fit_finds_the_cluster_that_rows_were_made_of():
    found = fitted(rows_of(MADE_UP))
    for name, expected in asdict(MADE_UP).items():
        assert asdict(found)[name] == pytest.approx(expected), name


def test_predicted_beside_measured():
    names, _, first, *_ = predicted_table([row for row in rows_of(MADE_UP) if row["status"] == "ok"]).splitlines()
    assert names.startswith("| context | GPUs | tree | predicted | three-all-reduces | predicted | ring |")
    assert first.startswith("| 131,072 | 2 | 83.2 | 83.2 (+0.0%) |")


def test_links_are_read_from_options():
    assert Link.parse("nvlink", "450,3") == Link(450e9, pytest.approx(3e-6))
    for text in ("450", "a,b", "0,1", "1,-1", "inf,1"):
        with pytest.raises(ValueError, match=r"--nvlink must be GB/s above 0 .* got .*; give such as 450,1"):
            Link.parse("nvlink", text)


def test_the_table():
    found = predictions(SMALL, HEAD, [100, 200], gpus=(2, 4))
    text = scaling_table(found, SMALL, HEAD)
    assert "| 100 | 2 | 8,000,000 | 18,000,000 |" in text
    assert "Predicted, not measured" in text


def test_the_papers_equations():
    """The paper's example (section 6.3): 640,000 tokens between 8 GPUs, a hidden size of 2048 in bfloat16."""
    case = AttentionCase("paper", 640_000, rows=1, layers=1, heads=16, kv_heads=16, head_dim=128, ranks=8)
    assert case.stored_bytes(2) == 2 * 80_000 * 2048 * 2
    assert paper_bytes(case, 2) == {
        "ring": (8 * 2 * 80_000 * 2048 * 2, (4 * 80_000 * 2048 + 2 * 2048) * 2),
        "tree": (2 * 7 * (2048 + 2 * 16) * 4 // 8, (2 * 80_000 * 2048 + 2048) * 2 + (2048 + 2 * 16) * 4),
    }


def test_parts_must_be_equal():
    with pytest.raises(ValueError, match=r"a multiple of the number of processes, 8, .* got 1001; give 1000"):
        AttentionCase("x", 1001, 1, 8, 1, 4, 2, 32)
