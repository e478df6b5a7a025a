"""The bench's commands from the outside: what they show, measure and write."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import RESULTS
from benchmarks.cli import app
from benchmarks.cli.ops import OP_WAY_NAMES
from benchmarks.generate import first_calls
from benchmarks.ops.table import ops_table
from benchmarks.ops.ways import OP_WAYS, OpWay
from hf_fastdecode.files import read_rows

from ...cli.command_line import without_torch
from ...cli.help_texts import check_examples, check_width, commands
from ...fresh_processes import run_fresh
from .command_line import run

ROOT = Path(__file__).parents[3]
AS_MODULE = "import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
"""As `python -m` does, in a process that has imported PyTorch: most of the time that an interpreter takes to start."""


@pytest.mark.parametrize("words", commands(app), ids=" ".join)
def test_help_teaches(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*words, "--help")
    assert result.exit_code == 0
    check_width(result.stdout)
    if words in ((), ("workloads",), ("summary",)):
        return
    check_examples(result.stdout, "benchmarks", words)
    assert f"python -m benchmarks {' '.join(words)}" in result.stdout
    assert "it goes on where it broke off" in " ".join(result.stdout.split())


def test_help_and_lists_need_no_torch():
    lines = "ops --help\nworkloads hier --help\nworkloads longqa --help\nforward --set 8b-gqa --list"
    assert (
        "shape=8b-gqa  work=scoring  prompts=1  context=2048  samples=4  completion=32"
        in without_torch("benchmarks.cli", lines, 0)[0]
    )


def test_as_a_module(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "forward", "--way", "none"]
    wrong = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr == ("benchmarks: --way must be one of stock, enabled, got 'none'; choose one\n")
    words = ["ops", "--set", "tiny", "--only", "ragged", "--way", "ours", "--device", "cpu"]
    code = f"import os; os.chdir({str(tmp_path)!r}); {AS_MODULE.format('benchmarks')}"
    done = run_fresh(code, *words, COMMIT="abc")
    assert done.returncode == 0, done.stderr
    (row,) = read_rows(tmp_path / "runs" / "ops.csv")
    assert row["command"] == "python -m benchmarks " + " ".join(words)
    assert (row["case"], row["status"], row["commit"]) == ("ragged-tiny", "ok", "abc")


def test_operators(tmp_path):
    out = tmp_path / "ops.csv"
    result = run("ops", "--set", "tiny", "--device", "cpu", "--out", out)
    assert result.exit_code == 0
    assert result.stdout.startswith("| rows | context | suffix | heads | floor | ours | recipe | hydragen |")
    rows = read_rows(out)
    assert len(rows) == 3 * (len(OP_WAY_NAMES) - 4)
    here = [row["status"] for row in rows if not OP_WAYS[row["way"]].library]
    assert set(here) == {"ok", "not run: defined for one shared context only"}
    assert all(row["status"].startswith("not run: ") for row in rows if OP_WAYS[row["way"]].library)
    columns = "device python torch transformers hf_fastdecode commit command case rows context suffix heads kv_heads "
    columns += "head_dim dtype nodes way status variant us_p20 us_p50 us_p80 over_floor tb_per_s tflop_per_s bytes "
    columns += "flops floor_us copy_tb_per_s matmul_tflop_per_s error_ratio"
    assert list(rows[0]) == columns.split()
    assert tuple(OP_WAYS) == tuple(OP_WAY_NAMES)


def test_a_wrong_way_ends_the_command(tmp_path, monkeypatch):
    def variants(sets):
        right = OP_WAYS["hydragen"].variants(sets)["flash"][0]
        return {"broken": [lambda: 1.1 * right()]}

    monkeypatch.setitem(OP_WAYS, "recipe", OpWay(variants))
    words = ("ops", "--set", "tiny", "--device", "cpu", "--out", tmp_path / "ops.csv")
    result = run(*words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "are not right: recipe: wrong: broken errs " in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ops.csv"]
    assert run(*words, "--no-check").exit_code == 0


def test_generate(tmp_path):
    out = tmp_path / "g.csv"
    words = ("generate", "--shape", "tiny", "--new-tokens", 4, "--dtype", "float32", "--repeats", 1, "--device", "cpu")
    ways = ("--way", "stock", "--way", "shared", "--way", "eager-no-attention")
    result = run(*words, *ways, "--point", "100x2", "--point", "100x4", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert [(row["samples"], row["way"]) for row in read_rows(out)][:2] == [("2", "stock"), ("2", "shared")]
    result = run(*words, "--way", "shared", "--point", "100x4", "--finish", 2, "--out", out)
    assert "| all to the end | rows finish | ratio |" in result.stdout
    assert len(read_rows(out)) == 8


def test_a_tree(tmp_path):
    out = tmp_path / "g.csv"
    words = ("generate", "--shape", "tiny", "--new-tokens", 4, "--dtype", "float32", "--repeats", 1, "--device", "cpu")
    words = (*words, "--way", "eager", "--way", "eager+min_shared_tokens=61")
    assert run(*words, "--point", "100x2", "--out", out).exit_code == 0
    result = run(*words, "--tree", "60+2x40x3", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "| tiny tree 60+2x40x3 | 100 | 6 | " in result.stdout
    plain, _, two, one = read_rows(out)
    assert (plain["shape"], two["shape"], two["samples"]) == ("tiny", "tiny tree 60+2x40x3", "6")
    assert list(plain) == list(two)
    assert int(one["kv_bytes"]) - int(two["kv_bytes"]) == 60 * (int(two["kv_bytes"]) // (60 + 2 * 40 + 6 * 4))
    listed = run(*words, "--tree", "60+2x40x3", "--point", "100x2", "--list").stdout.splitlines()
    assert [line.split("  ")[0] for line in listed] == ["shape=tiny", "shape=tiny tree 60+2x40x3"]


def test_nothing_measured_is_no_success(tmp_path):
    words = ("--device", "cpu", "--shape", "tiny", "--point", "64x2", "--new-tokens", 4, "--way", "graph")
    result = run("generate", *words, "--out", tmp_path / "rows.csv")
    assert result.exit_code == 1
    assert "nothing was measured: graph: mode='graph' needs a CUDA device, got cpu" in result.stderr


def test_parallel_lists_and_predicts(tmp_path):
    listed = run("parallel", "--list", "--kind", "attention", "--shape", "8b-gqa", "--point", "131072x16")
    assert listed.stdout == (
        "case=attention-8b-gqa-m131072-n16  shape=8b-gqa  context=131072  rows=16  ranks=2  layers=32  heads=32  "
        "kv_heads=8  head_dim=128  dtype=bfloat16\n"
    )
    done = run("parallel", "--simulate", "--point", "1000000x1", "--nvlink", "450,1", "--out", tmp_path)
    assert done.exit_code == 0
    assert "links of 450 GB/s and 1 us" in done.stdout
    assert "| 1,000,000 | 1,024 |" in done.stdout


def test_small_rates_keep_their_digits():
    row = next(row for row in read_rows(RESULTS / "ops.csv") if row["way"] == "ours")
    small = row | {"copy_tb_per_s": "0.00213", "matmul_tflop_per_s": "0.0871"}
    assert "; ceilings 0.0021 TB/s and 0.087 TFLOP/s; " in ops_table([small])
    large = row | {"copy_tb_per_s": "4.014", "matmul_tflop_per_s": "748.3"}
    assert "; ceilings 4.01 TB/s and 748 TFLOP/s; " in ops_table([large])
    slow = large | {"matmul_tflop_per_s": "9.64"}
    assert " and 9.6 to 748 TFLOP/s; " in ops_table([slow, large])


def test_first_calls_in_processes_of_their_own(tmp_path, monkeypatch):
    def forked(command, *, env, **options):
        executable, option, module, asked = command
        assert (executable, option) == (sys.executable, "-m")
        return run_fresh(AS_MODULE.format(module), asked, **env)

    monkeypatch.setattr(first_calls, "subprocess", SimpleNamespace(run=forked, TimeoutExpired=TimeoutError))
    out = tmp_path / "rows.csv"
    words = ("--shape", "tiny", "--point", "128x8", "--new-tokens", 2, "--dtype", "float32", "--way", "shared")
    result = run("first-calls", *words, "--device", "cpu", "--out", out)
    assert result.exit_code == 0, result.output
    rows = read_rows(out)
    assert [(row["caches"], row["status"]) for row in rows] == [("cold", "ok"), ("warm", "ok")]
    times = ("first_call_s", "tenth_call_s", "more_rows_s", "reused_first_token_s")
    assert all(float(row[name]) > 0 for row in rows for name in times)
    assert "| tiny | 128 | 8 | shared | warm |" in result.stdout


@pytest.mark.parametrize("command", ["generate", "completions", "first-calls"])
def test_without_a_shape_the_embedded_model_is_measured(command):
    shown = run(command, "--list").stdout.splitlines()
    assert shown
    assert all(line.startswith("shape=embedded") for line in shown)
