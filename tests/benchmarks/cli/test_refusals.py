"""What the bench's commands refuse before they measure, in one line each."""

import os
from dataclasses import replace

import pytest
import torch

from benchmarks.cli.generate import check_models
from benchmarks.generate.cases import GenerateCase
from hf_fastdecode.errors import InputError

from ...cli.command_line import without_torch
from .command_line import run


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "--out must be a CSV file, "),
        ("notes.md", "exists and holds no measured rows"),
        ("notes.md/ops.csv", "cannot be written: "),
        ("a" * 300 + ".csv", "cannot be written: File name too long"),
        ("busy.csv", "cannot be written: "),
        ("pipe", "is a device or a pipe; name a file"),
        ("latin.csv", "exists and is no CSV file ("),
    ],
)
def test_where_rows_cannot_go_is_told_before_measuring(tmp_path, name, message):
    (tmp_path / "notes.md").write_text("# Notes\n")
    (tmp_path / "busy.csv.partial").mkdir()
    (tmp_path / "latin.csv").write_bytes(b"case,way\n\xff,stock\n")
    os.mkfifo(tmp_path / "pipe")
    for command in (["ops", "--set", "tiny"], ["workloads", "hier"], ["generate", "--shape", "tiny"]):
        result = run(*command, "--device", "cpu", "--out", tmp_path / name)
        assert result.exit_code == 2
        assert message in result.output
    assert (tmp_path / "notes.md").read_text() == "# Notes\n"


def test_operators_take_no_backend_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FASTDECODE_BACKEND", "plain")
    result = run("ops", "--set", "tiny", "--device", "cpu", "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert result.stderr == (
        "benchmarks: $HF_FASTDECODE_BACKEND='plain' is for generate; --way says which operators run: unset it\n"
    )
    assert not list(tmp_path.iterdir())
    assert run("ops", "--set", "tiny", "--list").exit_code == 0


def test_a_shape_for_gpus_runs_on_a_cpu_only_if_that_is_named(capsys):
    case, cpu = GenerateCase("8b-gqa", 64, 2, 4), torch.device("cpu")
    cases = [GenerateCase("tiny", 64, 2, 4), case, replace(case, samples=4)]
    check_models(cases, "cpu", cpu)
    assert capsys.readouterr().err.startswith("8b-gqa: 8 billion random weights on a CPU")
    with pytest.raises(InputError, match=r"8b-gqa: 8 billion .* name a smaller shape, .* or pass --device cpu"):
        check_models(cases, "auto", cpu)
    check_models(cases[:1], "auto", cpu)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is the GPU")
@pytest.mark.parametrize("words", ["generate --shape 7b-mha", "completions --shape 7b-mha"])
def test_large_shapes_are_refused_where_auto_finds_a_cpu(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words.split())
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "billion random weights on a CPU" in result.stderr
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ops --set nosuch", "--set must be one of grid, one-row,"),
        ("ops --way nosuch", "--way must be one of ours, plain,"),
        ("ops --only nosuch", "no case contains 'nosuch'"),
        ("ops --device nonsense", "there is no device 'nonsense'; try auto or cpu"),
        ("generate --point 100by3", "a point is CONTEXTxN, such as 2048x16, got '100by3'"),
        ("generate --way nosuch+a=b", "--way must be one of stock,"),
        ("generate --way eager+foo=3 --list", "an option of a way is one of backend, sampler,"),
        ("generate --way graph+mode=eager", "got 'mode' in 'graph+mode=eager'"),
        ("generate --way eager+sampler=zzz", "sampler must be one of auto, hf, fast, got 'zzz'"),
        ("generate --way stock+a=b --shape tiny", "options are written NAME=VALUE behind one of ours"),
        ("generate --finish 99", "--finish must be between 1 and --new-tokens 64, got 99"),
        (
            "generate --finish-mean 99",
            "--finish-mean must be between 1 and --new-tokens 64, without --finish and --tree, got 99",
        ),
        ("generate --tree 24x8", "a tree is SHARED+PROBLEMSxOWNxSAMPLES, such as 2400+8x512x128, got '24x8'"),
        ("generate --tree 9+8x5x2 --finish 9", "--finish is for --point: rows of a --tree all run to the end"),
        (
            "generate --point 512x8 --point 5000x8 --device cpu",
            "--point 5000x8 with 64 new tokens is longer than the 4096 positions of",
        ),
        (
            "generate --tree 4000+2x60x2 --device cpu",
            "--tree 4000+2x60x2 with 64 new tokens is longer than the 4096 positions of embedded;",
        ),
        ("generate --shape tiny --point 131009x2 --device cpu", "is longer than the 131072 positions of tiny; ask"),
        ("forward --set nosuch", "--set must be one of qwen3-4b, 8b-gqa,"),
        ("forward --way nosuch", "--way must be one of stock, enabled, got 'nosuch'"),
        ("generate --dtype float8", "--dtype must be one of float32 (fp32), bfloat16 (bf16), float16 (fp16), got"),
        ("parallel --device cpu", "2 or more processes, got 1; start it by `torchrun --nproc-per-node 2 -m benchm"),
        ("parallel --kind steps --way ring", "--way ring is not of --kind steps; steps has one-gpu, sequence,"),
        ("parallel --kind attention --point 7x1 --list", "a multiple of the number of processes, 2, so that"),
        ("parallel --simulate --nvlink 3", "--nvlink must be GB/s above 0 and microseconds of at least 0 with"),
        ("parallel --fill full", "--fill must be one of random, prefill, got 'full'"),
        ("parallel --device cuda:1", "--device must be auto, cpu or cuda, since each process has a GPU of its"),
        ("generate --way shared+min_saved_tokens=-1", "min_saved_tokens must be an integer of at least 0"),
        ("generate --shape 9b --list", "--shape must be one of 7b-mha"),
        ("sampling --set nosuch", "--set must be one of grid, tiny, got 'nosuch'"),
        ("completions --marks a,b", "whole numbers"),
        ("completions --marks 1", "must end at 2 or more"),
        ("completions --way beams", "--way must be one of"),
        ("completions --shape tiny --marks 2,200000", "longer than"),
        (
            "generate --shape tiny-whisper --point 100x4 --device cpu",
            "--point 100x4: tiny-whisper encodes every recording as 200 tokens; ask for 200x4",
        ),
        (
            "generate --shape tiny-whisper --point 200x4 --device cpu",
            "--new-tokens 64 is more than the 60 that tiny-whisper has positions for",
        ),
        (
            "generate --shape tiny-qwen3-vl --point 34x4 --device cpu",
            "the image of tiny-qwen3-vl takes 16 tokens; ask for a context of 35 or more",
        ),
        (
            "workloads hier --points 2by2",
            "--points are PROBLEMSxSAMPLES with commas between, such as 4x8,8x16, got '2by2'",
        ),
        (
            "workloads hier --points 1x9",
            "--points 1x9: levels of sharing differ from 2 problems and 2 samples on; ask for more",
        ),
        (
            "workloads hier --points 999x9",
            "--points 999x9 asks for 999 problems, there are 160; ask for fewer, or name a larger",
        ),
        (
            "workloads hier --new-tokens 4000 --device cpu",
            "tokens with 4000 new ones is longer than the 4096 positions of this",
        ),
        (
            "workloads longqa --questions 0",
            "--questions must be whole numbers of at least 1 with commas between, got '0'",
        ),
        (
            "workloads longqa --tokens 90 --device cpu",
            "--tokens 90 leave no room for 5 solved questions and a fact to ask about",
        ),
        (
            "workloads longqa --tokens 4090 --device cpu",
            "is longer than the 4096 positions of this model; lower --tokens or",
        ),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.startswith("benchmarks: ")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.csv"))


def test_a_backend_of_the_environment_that_there_is_not(monkeypatch):
    monkeypatch.setenv("HF_FASTDECODE_BACKEND", "bogus")
    result = run("generate", "--way", "eager")
    assert result.exit_code == 2
    assert result.stderr.startswith("benchmarks: $HF_FASTDECODE_BACKEND must be one of auto, triton,")


def test_refusals_need_no_torch():
    lines = """
ops --set nosuch
ops --set tiny --out .
sampling --way nosuch
generate --way shared+foo=1
generate --device nonsense
forward --set nosuch
"""
    output, errors = without_torch("benchmarks.cli", lines, 2)
    assert (output, errors.count("\n")) == ("", 6)
