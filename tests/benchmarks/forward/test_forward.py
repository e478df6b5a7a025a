"""Forward passes on the CPU: stock beside enabled, what a row holds, and what a wrong way gets."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import summary
from benchmarks.forward import measure
from benchmarks.forward.cases import FORWARD_SETS, FORWARD_WAYS, ForwardCase, forward_table
from benchmarks.forward.measure import ForwardBench, Rows, check_way, error_ratio
from hf_fastdecode.files import read_rows
from hf_fastdecode.measurement.rows import NotAvailableError

from ..cli.command_line import run

CPU = torch.device("cpu")
TRAINING = ForwardCase("tiny", "training", 2, 40, 3, 7, checkpointing=True, dtype="float32")
SCORING = replace(TRAINING, work="scoring", checkpointing=False)


@pytest.fixture(scope="module")
def bench():
    return ForwardBench(CPU, repeats=2)


def test_the_command(tmp_path):
    out = tmp_path / "rows.csv"
    done = run("forward", "--device", "cpu", "--repeats", 1, "--no-check", "--out", out)
    assert done.exit_code == 0, done.stderr
    rows = read_rows(out)
    assert [(row["work"], row["way"], row["status"]) for row in rows] == [
        (work, way, "ok") for work in ("training", "scoring") for way in FORWARD_WAYS
    ]
    assert f"| tiny | training | 2 | 40 x 3 x 7 | {float(rows[0]['s_p50']):.3f} → " in done.stdout
    assert summary.table(rows) == forward_table(rows)
    assert [row["tokens"] for row in rows] == ["282"] * 4


@pytest.mark.parametrize("case", [TRAINING, SCORING], ids=lambda case: case.work)
def test_rows_say_what_was_measured(bench, case):
    stock, ours = bench.measure(case, "stock"), bench.measure(case, "enabled")
    assert stock["status"] == ours["status"] == "ok"
    assert list(stock) == list(ours)
    for row in (stock, ours):
        assert 0 < row["s_p20"] <= row["s_p50"] <= row["s_p80"]
        assert row["first_call_s"] > 0
        assert row["tokens"] == 6 * 47
        assert 0 <= row["error_ratio"] <= 2
        assert abs(row["loss"] - math.log(512)) < 1  # of random weights
    assert (stock["computed"], ours["computed"], ours["ran"]) == (None, 2 * (40 + 3 * 7), "shared")
    assert stock["error_ratio"] == pytest.approx(1)
    assert stock["loss"] == pytest.approx(ours["loss"], rel=1e-6)


def test_rows_that_share_nothing_say_why(bench):
    row = bench.measure(replace(SCORING, prompts=4, samples=1), "enabled")
    assert (row["status"], row["computed"]) == ("ok", 4 * 47)
    assert row["ran"].startswith("stock: ")


def test_rows_that_share_must_not_run_stock(bench, monkeypatch):
    enabled = measure.fd.enabled
    monkeypatch.setattr(measure.fd, "enabled", lambda model, **options: enabled(model, min_saved_tokens=10**6))
    row = ForwardBench(CPU, repeats=1, check=False).measure(SCORING, "enabled")
    assert row["status"].startswith("not run: it ran stock: ")
    assert row["s_p50"] is None


def test_the_model_is_left_as_it_was(bench):
    bench.measure(TRAINING, "enabled")
    model = bench._model.value
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert all(weight.grad is None for weight in model.parameters())
    assert not model.training
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def wrong_pass(model, rows):
    """One token of the prompt is another one."""
    ids = rows.ids.clone()
    ids[:, 5] = 1
    with measure.using(model, "stock", rows._replace(ids=ids)) as hidden:
        return hidden


def wrong_gradient(model, rows):
    """The gradient of the last row's states is twice what it is."""

    def hidden():
        with measure.using(model, "stock", rows) as right:
            states = right()
        last = states[-1:]
        return torch.cat([states[:-1], last + (last - last.detach())])

    return hidden


def unavailable(model, rows):
    raise NotAvailableError("it is on the Hub")


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        (wrong_pass, "wrong: log-probabilities err "),
        (wrong_gradient, "wrong: gradients err "),
        (unavailable, "not run: it is on the Hub"),
    ],
    ids=["pass", "gradient", "not-here"],
)
def test_wrong_ways_have_no_times(monkeypatch, peer, status):
    monkeypatch.setitem(measure.PEERS, "peer", peer)
    row = ForwardBench(CPU).measure(TRAINING, "peer")
    assert row["status"].startswith(status)
    assert row["s_p50"] is None


def test_a_case_is_compared_too(monkeypatch):
    monkeypatch.setitem(measure.PEERS, "peer", wrong_pass)
    monkeypatch.setattr(measure, "check_way", lambda *_: None)
    row = ForwardBench(CPU, repeats=1).measure(SCORING, "peer")
    assert row["status"].startswith("wrong: log-probabilities err ")
    assert row["error_ratio"] > 2 and row["s_p50"] is None


@pytest.mark.parametrize("shape", ["qwen3-4b", "7b-mha", "gpt-oss-20b"])
def test_small_models_of_each_kind_pass_the_check(shape):
    assert check_way("enabled", replace(TRAINING, shape=shape), CPU) is None


def test_errors_are_of_the_worst_token_too():
    exact = torch.zeros(1000)
    stock = torch.full_like(exact, 0.01)
    assert error_ratio(stock.clone(), stock, exact) == pytest.approx(1)
    ours = stock.clone()
    ours[3] = 0.1
    assert error_ratio(ours, stock, exact) == pytest.approx(10)
    ours[3] = torch.nan
    assert error_ratio(ours, stock, exact) == torch.inf


def test_cases_have_names_of_their_own():
    for name, cases in FORWARD_SETS.items():
        assert len({tuple(case.columns().values()) for case in cases}) == len(cases), name
    assert FORWARD_SETS["qwen3-4b"][-1].columns()["case"] == "qwen3-4b-training-4x1182x16x256"
    assert [case.layers for case in FORWARD_SETS["gpt-oss-20b"]] == [0, 0, 12, 12]


def test_rows_begin_alike():
    rows = Rows.of(TRAINING, 512, CPU)
    assert rows.ids.shape == (6, 47)
    assert torch.equal(rows.ids[0, :40], rows.ids[2, :40])
    assert not torch.equal(rows.ids[2, :40], rows.ids[3, :40])
    assert not torch.equal(rows.completions[0], rows.completions[1])


def test_the_table():
    case = {"device": "H", "dtype": "bfloat16", "torch": "1", "transformers": "2", "shape": "x", "work": "training"}
    case |= {"case": "x-training", "prompts": "1", "context": "1182", "samples": "16", "completion": "256"}
    case |= {"checkpointing": "True", "layers": "12", "tokens": "23008", "status": "ok"}
    stock = case | {
        "way": "stock",
        "s_p50": "1.8",
        "peak_bytes": str(20 * 2**30),
        "first_call_s": "1.7",
        "computed": "",
    }
    ours = stock | {"way": "enabled", "s_p50": "0.45", "first_call_s": "0.95", "computed": "5278"}
    peer = stock | {"way": "flex", "s_p50": "0.5"}
    names, _, line, _, note, *_ = forward_table([stock, ours, peer]).splitlines()
    assert names.endswith("| seconds | speed-up | tokens computed | peak GiB | first pass | flex |")
    assert line == (
        "| x, 12 layers | training | 1 | 1182 x 16 x 256 | 1.800 → 0.450 | 4.0x | 23,008 → 5,278 | 20.0 → 20.0 | "
        "1.700 → 0.950 | 0.500 |"
    )
    assert note.startswith("H, bfloat16, torch 1, transformers 2; stock → `enable(model)`; medians; ")
    out = stock | {"status": "out of memory", "checkpointing": "False"}
    line = forward_table([out, ours | {"checkpointing": "False"}], brief=True).splitlines()[2]
    assert line == ("| x, 12 layers | training, no checkpointing | 1 | 1182 x 16 x 256 | out of memory → 0.450 |  |")
