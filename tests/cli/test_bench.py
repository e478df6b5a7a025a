"""``hf-fastdecode bench``: stock beside enabled, as rows, a table and a picture."""

from __future__ import annotations

import pytest
import torch

from benchmarks.generate.shapes import INPUT_SHAPES
from hf_fastdecode.files import read_rows
from hf_fastdecode.measurement.bench import BenchCase, StockBesideEnabled
from hf_fastdecode.measurement.calls import seeded

from .command_line import ran, run

CPU = torch.device("cpu")
QUICK = ("--new-tokens", 3, "--repeats", 1, "--device", "cpu", "--dtype", "float32")


@pytest.fixture
def words(checkpoint, tmp_path):
    return ("bench", "--model", checkpoint, *QUICK, "--out", tmp_path / "rows.csv")


def test_rows_a_table_and_a_picture(words, tmp_path, checkpoint):
    done = ran(*words, "--point", "90x4", "--point", "80x2", "--plot")
    rows = read_rows(tmp_path / "rows.csv")
    assert [(row["context"], row["way"], row["status"]) for row in rows] == [
        *(("90", "stock", "ok"), ("90", "shared", "ok"), ("80", "stock", "ok"), ("80", "shared", "ok"))
    ]
    stock, shared = rows[:2]
    assert all(float(row[name]) > 0 for row in rows for name in ("first_call_s", "prefill_s", "total_s", "kv_bytes"))
    assert int(stock["kv_bytes"]) > 2 * int(shared["kv_bytes"])
    assert shared["ran"] == "eager, sampler hf" and not stock["ran"]
    assert stock["commit"]
    lines = done.stdout.splitlines()
    assert lines[0] == "| context | n |  | first call | first token | a step | whole call | KV cache |"
    assert [line.split(" | ")[2] for line in lines[2:8]] == ["stock", "enabled", "stock / enabled"] * 2
    assert "tokens are stock's; enabled ran: eager, sampler hf." in done.stdout
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    again = run(*words, "--point", "90x4", "--point", "80x2")
    assert "4 of 4 rows are those of an earlier run" in again.stderr


def test_other_tokens_than_stock_are_wrong(words, monkeypatch):
    inner = seeded

    def other(device):
        other.calls += 1
        return inner(device, other.calls)

    other.calls = 0
    monkeypatch.setattr("hf_fastdecode.measurement.calls.seeded", other)
    done = run(*words, "--point", "90x4")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "are not right: shared: wrong: other tokens than stock from the same seed" in done.stderr


def test_a_mode_that_cannot_run_is_no_success(words):
    done = run(*words, "--point", "90x4", "--mode", "graph")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "nothing was measured: mode='graph' " in done.stderr


def test_memory_that_stock_does_not_have(words, monkeypatch):
    inner = StockBesideEnabled._measured

    def measured(self, case, way):
        if way == "stock":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(self, case, way)

    monkeypatch.setattr(StockBesideEnabled, "_measured", measured)
    done = ran(*words, "--point", "90x4", "--plot")
    assert "| 90 | 4 | stock | out of memory |" in done.stdout
    assert "stock / enabled" not in done.stdout


def test_an_encoder_decoder():
    bench = StockBesideEnabled(INPUT_SHAPES["tiny-t5"].model(CPU, torch.float32), {}, repeats=1)
    case = BenchCase("tiny-t5", 64, 3, 3, "float32")
    stock, shared = (bench.measure(case, way) for way in ("stock", "shared"))
    assert (stock["status"], shared["status"]) == ("ok", "ok")
    assert stock["kv_bytes"] > shared["kv_bytes"]
