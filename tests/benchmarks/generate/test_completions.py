"""Growing completions on the CPU, tiny: what the rows hold, where a call is cut short, and what is refused."""

import pytest
import torch

from benchmarks.generate import measure as completions
from benchmarks.generate.cases import GenerateCase, PromptTree, spans
from benchmarks.generate.measure import CompletionBench, StepClock
from benchmarks.generate.table import completions_table
from benchmarks.operator_time import Ceilings
from hf_fastdecode.files import read_rows

from ..cli import command_line

CPU = torch.device("cpu")
CASES = spans(GenerateCase("tiny", 40, 3, 12, "float32"), (2, 6, 12))
PER_TOKEN = 2 * 2 * 2 * 32 * 4  # K and V, layers, KV heads, head_dim, bytes


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(completions, "measure_ceilings", lambda device: Ceilings(1e9, 1e10))
    return CompletionBench(CPU)


def test_spans_are_of_one_call(bench, monkeypatch):
    measured = []
    time_call = CompletionBench._timed_call
    monkeypatch.setattr(
        CompletionBench, "_timed_call", lambda self, *given: measured.append(given) or time_call(self, *given)
    )
    rows = [bench.measure(case, way) for case in CASES for way in ("stock", "shared")]
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert len(measured) == 2
    assert all(row["ms_per_step"] > 0 for row in rows)
    assert [row["ran"] for row in rows[:2]] == [None, "eager, sampler hf"]
    tokens = 40 + 3 * 9  # of the second span, on average
    assert rows[2]["kv_floor_ms"] == rows[3]["kv_floor_ms"] == pytest.approx(tokens * PER_TOKEN / 1e6)


def test_slim_spans_have_the_floor_of_keys_and_values(bench):
    case = spans(GenerateCase("tiny-mha", 40, 3, 12, "float32"), (2, 6, 12))[0]
    rows = {way: bench.measure(case, way) for way in ("stock", "slim-k+r")}
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert all(row["ms_per_step"] > 0 for row in rows.values())
    assert {row["kv_floor_ms"] for row in rows.values()} == {rows["stock"]["kv_floor_ms"]}
    assert rows["slim-k+r"]["ran"] == "eager, sampler hf"


def test_rows_of_several_prompts(bench):
    case = spans(PromptTree.parse("80+2x30x1").case("tiny-mha", 12, "float32"), (2, 12))[0]
    rows = [bench.measure(case, way) for way in ("stock", "slim-k")]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert rows[1]["kv_floor_ms"] == pytest.approx((80 + 2 * 30 + 2 * 7) * 2 * 2 * 4 * 32 * 4 / 1e6)
    assert case.columns()["shape"] == "tiny-mha tree 80+2x30x1"


@pytest.mark.parametrize("way", ["stock", "shared"])
def test_a_slow_call_is_cut_short(way, monkeypatch):
    monkeypatch.setattr(completions, "_STEPS_BETWEEN_LOOKS", 1)
    bench = CompletionBench(CPU, check=False, budget_s=0)
    row = bench.measure(CASES[1], way)
    assert row["status"] == "not run: cut short after 0 s"
    assert row["ms_per_step"] is None


def test_the_clock_takes_differences(monkeypatch):
    now = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr(StepClock, "_now", lambda self: next(now))
    clock = StepClock(100, (1, 2, 6), CPU, 60.0)
    assert not any(clock.is_over(100 + tokens) for tokens in range(1, 7))
    assert clock.ms_per_step() == {(1, 2): 500.0, (2, 6): 500.0}


@pytest.mark.parametrize("marks", [(4,), (4, 4, 12), (0, 12), (2, 6)])
def test_marks_rise_to_the_end(marks):
    with pytest.raises(ValueError, match="rising"):
        spans(CASES[0].call, marks)


def run(*words):
    return command_line.run("completions", *words)


def test_the_command(tmp_path):
    out = tmp_path / "rows.csv"
    words = ["--shape", "tiny", "--point", "40x3", "--marks", "2,6,12", "--dtype", "float32", "--out", out]
    found = run(*words, "--way", "shared", "--way", "eager-no-attention", "--device", "cpu")
    assert found.exit_code == 0, found.output
    rows = read_rows(out)
    assert [(row["from_token"], row["to_token"]) for row in rows[::2]] == [("2", "6"), ("6", "12")]
    line = f"| tiny | 40 | 3 | 6 to 12 | {float(rows[2]['kv_floor_ms']):.2f} | {float(rows[2]['ms_per_step']):.2f} |"
    assert line in completions_table(rows)
