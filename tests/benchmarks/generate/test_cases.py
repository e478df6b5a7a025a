"""Cases whose rows are not all alike: rows that finish one after another, and prompts that share on two levels."""

from dataclasses import replace

import pytest

from benchmarks.generate.calls import caller
from benchmarks.generate.cases import PromptTree
from benchmarks.generate.shapes import given_of
from benchmarks.generate.ways import find_way, using

from .tiny_case import CASE, PER_TOKEN

TREE = PromptTree.parse("80+3x40x2")


def test_lengths_are_spread_evenly():
    for samples in (1, 2, 5, 16, 128):
        case = replace(CASE, samples=samples, new_tokens=64, finish="16-64")
        assert len(case.lengths()) == samples
        assert max(case.lengths()) == 64
        assert min(case.lengths()) == (16 if samples > 1 else 64)
    lengths = replace(CASE, samples=49, new_tokens=64, finish="16-64").lengths()
    assert sorted(lengths) == list(range(16, 65))
    assert lengths != sorted(lengths, reverse=True)
    assert CASE.lengths() == [8] * 4


@pytest.mark.parametrize("bounds", ["0-8", "3-9", "9-8"])
def test_impossible_lengths(bounds):
    with pytest.raises(ValueError, match=f"rows must finish between 1 and new_tokens = 8, got '{bounds}'"):
        replace(CASE, finish=bounds)


def test_lengths_of_a_mean_are_skewed():
    lengths = replace(CASE, samples=1000, new_tokens=800, finish="~100").lengths()
    assert (len(lengths), lengths[0], min(lengths)) == (1000, 800, 1)
    assert 98 < sum(lengths) / 1000 < 102
    assert sorted(lengths)[500] in (69, 70)  # log(2) times the mean
    assert replace(CASE, samples=1, new_tokens=64, finish="~5").lengths() == [64]
    with pytest.raises(ValueError, match="rows must finish between 1 and new_tokens = 8, got '~9'"):
        replace(CASE, finish="~9")


@pytest.mark.parametrize(
    ("way", "finish"), [("stock", "3-12"), ("shared", "3-12"), ("stock", "~4"), ("shared+max_rows=2", "~4")]
)
def test_rows_end_where_they_should(model, way, finish):
    case = replace(CASE, new_tokens=12, finish=finish)
    with using(model, find_way(way)):
        drawn = caller(model, case, find_way(way))(12)[:, 120:]
    assert drawn.shape == (4, 12)
    for row, length in zip(drawn, case.lengths(), strict=True):
        assert (row[length:] == 0).all()
        assert (row[:length] != 0).sum() >= length - 1


def test_rows_that_finish_are_counted(bench):
    case = replace(CASE, new_tokens=12, finish="3-12")
    row = bench.measure(case, "shared")
    assert row["status"] == "ok"
    drawn = sum(case.lengths()) - 4
    assert row["tokens_per_s"] == pytest.approx(drawn / (row["ms_per_step"] * 11e-3))


def test_a_tree_is_a_case():
    case = TREE.case("tiny", 8, "float32")
    assert (case.context, case.samples, case.prompt_tokens) == (120, 6, 80 + 3 * 40)
    assert case.columns() == {**CASE.columns(), "samples": 6, "shape": "tiny tree 80+3x40x2"}
    assert PromptTree.of_row(case.columns()["shape"]) == TREE
    assert PromptTree.of_row("tiny") is None
    assert CASE.prompt_tokens == 120
    with pytest.raises(ValueError, match="rows of a tree run to the end, got finish='2-8' with 80"):
        replace(case, finish="2-8")


@pytest.mark.parametrize("text", ["2400", "2400+8x512", "2400x8x512x128", "0+8x512x128", "1+2x3x-4", "+8x512x128"])
def test_what_is_no_tree(text):
    with pytest.raises(ValueError, match=r"a tree is SHARED\+PROBLEMSxOWNxSAMPLES, such as 2400"):
        PromptTree.parse(text)


def test_prompts_of_a_tree_share_what_it_says(model):
    ids = given_of("tiny").arguments(model, TREE.case("tiny", 8))["input_ids"]
    assert ids.shape == (3, 120)
    assert (ids[:, :80] == ids[0, :80]).all()
    assert len(ids[:, 80].unique()) == 3


def test_one_level_stores_each_problem_whole(bench):
    case = TREE.case("tiny", 8, "float32")
    rows = {way: bench.measure(case, way) for way in ("stock", "eager", "eager+min_shared_tokens=81")}
    assert {row["status"] for row in rows.values()} == {"ok"}
    stored = [6 * 127, 80 + 3 * 40 + 6 * 8, 3 * 120 + 6 * 8]
    assert [row["kv_bytes"] for row in rows.values()] == [tokens * PER_TOKEN for tokens in stored]
    assert {row["floor_kv_bytes"] for row in rows.values()} == {stored[1] * PER_TOKEN}
    embedded = [6 * 127, 80 + 3 * 40 + 6 * 7, 3 * 120 + 6 * 7]
    assert [row["embedded_tokens"] for row in rows.values()] == embedded
