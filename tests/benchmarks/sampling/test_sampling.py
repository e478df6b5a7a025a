"""Sampling on the CPU, the kernel interpreted: what is drawn, what a row holds, and what a wrong sampler gets."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from benchmarks import summary
from benchmarks.operator_time import Ceilings
from benchmarks.sampling.cases import SAMPLING_SETS, SETTINGS, SamplingCase
from benchmarks.sampling.measure import SamplingBench, logprob_error, outside_support, processors_of
from hf_fastdecode.files import read_rows, write_rows
from hf_fastdecode.kernels.sampling import api

from ..cli import command_line

CPU = torch.device("cpu")
CASE = SamplingCase(2, 200, "top_k50-top_p0.95")


@pytest.fixture
def bench():
    made = SamplingBench(CPU)
    made.ceilings = Ceilings(1e9, 1e10)
    return made


def run(*words):
    return command_line.run("sampling", *words)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_kernel_and_transformers(bench, settings):
    case = replace(CASE, settings=settings)
    fast, hf = bench.measure(case, "fast"), bench.measure(case, "hf")
    assert fast["status"] == hf["status"] == "ok"
    assert 0 <= fast["error_ratio"] <= 2
    assert hf["error_ratio"] is None
    for row in (fast, hf):
        assert 0 < row["us_p20"] <= row["us_p50"] <= row["us_p80"]
        assert row["bytes"] == 2 * 200 * 2
        assert row["floor_us"] == pytest.approx(0.8)
        assert row["over_floor"] == pytest.approx(row["us_p50"] / 0.8)
        assert row["tb_per_s"] == pytest.approx(800 / row["us_p50"] / 1e6)
    assert list(fast) == list(hf)


def test_the_grid():
    cases = SAMPLING_SETS["grid"]
    assert len({case.columns()["case"] for case in cases}) == 3 * 3 * 5
    assert {case.temperature for case in cases} == {0.8}
    names = [[type(entry).__name__ for entry in processors_of(replace(CASE, settings=name))] for name in SETTINGS]
    assert names[2] == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
    assert names[4] == []


def spoiled(monkeypatch, spoil):
    right = api.sample
    monkeypatch.setattr(api, "sample", lambda logits, *rest, **more: spoil(logits, *right(logits, *rest, **more)))


SPOILS = {
    "least": (lambda logits, tokens, logprobs: (logits.argmin(-1), logprobs), "16 of 16 tokens "),
    "beyond": (lambda logits, tokens, logprobs: (tokens + 200, logprobs), "16 of 16 tokens "),
    "logprobs": (lambda logits, tokens, logprobs: (tokens, logprobs * (1 + 1e-5)), "log-probabilities err "),
    "nan": (lambda logits, tokens, logprobs: (tokens, logprobs * torch.nan), "log-probabilities err inf "),
}


@pytest.mark.parametrize("settings", ["min_p0.05", "greedy"])
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_wrong_sampler_gets_no_times(bench, monkeypatch, spoil, settings):
    spoiled(monkeypatch, SPOILS[spoil][0])
    row = bench.measure(replace(CASE, settings=settings), "fast")
    assert row["status"].startswith(f"wrong: {SPOILS[spoil][1]}")
    assert row["us_p50"] is row["over_floor"] is None
    bench.check = False
    assert bench.measure(replace(CASE, settings=settings), "fast")["status"] == "ok"


def test_a_sampler_that_changes_its_mind_gets_no_times(bench, monkeypatch):
    calls = []

    def later(logits, tokens, logprobs):
        calls.append(1)
        return tokens + (len(calls) > 8), logprobs

    spoiled(monkeypatch, later)
    assert bench.measure(CASE, "fast")["status"] == "wrong: it draws other tokens when it is repeated"


def test_one_token_beyond_the_edge_is_found():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 2)
    for settings, allowed in (("top_p0.95", [1, 2, 3]), ("min_p0.05", [1, 2, 3]), ("greedy", [1])):
        processors = processors_of(replace(CASE, settings=settings))
        for token in range(4):
            tokens = torch.tensor([[1, 1], [1, token]])
            found = outside_support(logits, tokens, processors, greedy=settings == "greedy")
            assert found == (token not in allowed), (settings, token)


@pytest.mark.parametrize(("removed", "outside"), [((0, 1), 0), ((1, 0), 0), ((1, 1), 1), ((1, 2), 1), ((2, 2), 2)])
def test_the_edge_is_that_of_either_precision(removed, outside):
    def processors(ids, scores):
        return scores.index_fill(1, torch.arange(removed[scores.dtype == torch.float64]), -torch.inf)

    logits, tokens = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0, 1, 2]])
    assert outside_support(logits, tokens, processors, greedy=False) == outside


def test_which_of_tied_tokens_are_left_is_left_open():
    logits = torch.zeros(1, 500).index_fill(1, torch.tensor([7]), -1.0)
    tokens = torch.arange(500)[None]
    processors = processors_of(replace(CASE, settings="top_p0.95"))
    assert 0 < int((processors(tokens, logits.clone()) == -torch.inf).sum()) < 50
    assert outside_support(logits, tokens, processors, greedy=False) == 1


def test_errors_are_counted_in_pytorchs():
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(10).expand(5, 10)
    right = logits.log_softmax(-1).gather(1, tokens)
    assert logprob_error(logits, tokens, right) <= 1
    assert logprob_error(logits, tokens, right + 1e-5) > 2


def test_without_a_gpu_or_an_interpreter_the_kernel_does_not_run(bench, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert bench.measure(CASE, "fast")["status"] == "not run: it runs on CUDA devices, got 'cpu'"
    assert bench.measure(CASE, "hf")["status"] == "ok"


def test_the_command(tmp_path, monkeypatch):
    out = tmp_path / "sampling.csv"
    words = ("--set", "tiny", "--only", "n3-v300-top_p", "--only", "n3-v300-greedy", "--device", "cpu", "--out", out)
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    rows = read_rows(out)
    assert [(row["case"], row["way"]) for row in rows] == [
        ("n3-v300-top_p0.95", "fast"),
        ("n3-v300-top_p0.95", "hf"),
        ("n3-v300-greedy", "fast"),
        ("n3-v300-greedy", "hf"),
    ]
    columns = (
        "device python torch transformers hf_fastdecode commit command case rows vocabulary settings temperature "
    )
    columns += "dtype way status us_p20 us_p50 us_p80 over_floor tb_per_s bytes floor_us copy_tb_per_s error_ratio"
    assert list(rows[0]) == columns.split()
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    text = summary.refreshed("<!-- rows: sampling.csv -->\nstale\n<!-- end rows -->")
    assert summary.table(rows).rstrip() in text and "stale" not in text
    assert text.splitlines()[3].startswith("| 3 | 300 | top_p0.95 | ")
    assert len(text.splitlines()) == 2 + 4 + 2


def test_a_table_names_what_did_not_run(tmp_path):
    row = CASE.columns() | {"device": "d", "torch": "1", "transformers": "2", "floor_us": 1.5, "copy_tb_per_s": 4}
    fast = row | {"way": "fast", "status": "not run: x"}
    hf = row | {"way": "hf", "status": "ok", "us_p50": 300.0}
    write_rows(tmp_path / "rows.csv", [fast, hf])
    text = summary.table(read_rows(tmp_path / "rows.csv"))
    assert "| 2 | 200 | top_k50, top_p0.95 | 1.5 | not run | 300.0 |  |  |" in text
