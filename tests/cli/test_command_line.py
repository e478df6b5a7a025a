"""Help, bad input, streams, interruptions: what all commands do alike."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from torch.distributed.run import parse_args as torchrun_arguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import hf_fastdecode
from hf_fastdecode.attention.overrides import ATTENTION_NAME
from hf_fastdecode.cli.app import app

from .command_line import ROOT, python, ran, refusal, run, without_torch
from .help_texts import check_examples, check_width, commands

MAIN = "from hf_fastdecode.__main__ import main; main()"


# --- help and version ------------------------------------------------------------------------------------------------


def test_help_lists_the_commands():
    for arguments in ((), ("--help",), ("-h",)):
        result = ran(*arguments)
        for command in ("demo", "generate", "inspect"):
            assert command in result.stdout


@pytest.mark.parametrize("words", commands(app), ids=" ".join)
def test_help_fits_in_80_columns(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    check_width(run(*words, "--help").stdout)


@pytest.mark.parametrize("words", [words for words in commands(app) if words not in ((), ("eval",))], ids=" ".join)
def test_help_teaches(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    check_examples(run(*words, "--help").stdout, "hf_fastdecode", words)


def test_bench_names_the_other_benchmarks():
    assert "python -m benchmarks" in run("bench", "--help").stdout


def test_two_dashes_before_the_command():
    assert run("--", "generate", "--n", "0").stderr == run("generate", "--n", "0").stderr
    with pytest.raises(SystemExit):
        torchrun_arguments(["-m", "hf_fastdecode", "eval", "generate", "--n", "8"])


def test_version():
    result = ran("--version")
    assert result.stdout.startswith(f"hf-fastdecode {hf_fastdecode.__version__} (transformers ")


def test_help_does_not_import_torch():
    assert "--max-new-tokens" in without_torch("hf_fastdecode.cli.app", "generate --help", 0)[0]


def test_refusals_do_not_import_torch():
    lines = """
generate --prompt x --mode graphs
generate --prompt x --dtype half
generate --prompt x --device nonsense
generate --prompt x --model ./nosuch
generate --task-id 5
demo --shots -1
demo --device nonsense
inspect ./nosuch
inspect embedded --dtype half
bench --point many
bench --mode graphs
bench --device nonsense
bench --out .
bench ops
"""
    output, errors = without_torch("hf_fastdecode.cli.app", lines, 2)
    assert (output, errors.count("\n")) == ("", 14)


def test_public_names_load_when_used():
    process = python(
        "import hf_fastdecode as fd\n"
        "assert 'torch' not in sys.modules\n"
        "names = {*fd.__all__, '__version__'}\n"
        "assert set(dir(fd)) == names\n"
        "import hf_fastdecode.api\n"
        "assert set(dir(fd)) == names\n"
        "assert not hasattr(fd, 'nosuch')"
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert callable(hf_fastdecode.enable)
    assert ATTENTION_NAME in ALL_ATTENTION_FUNCTIONS


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --prompt x --n 0", "--n must be at least 1, got 0"),
        ("generate --prompt x --n many", "got 'many'; see "),
        ("generate --prompt x --n=many", "got 'many'; see "),
        ("generate --prompt x --temperature -1", "--temperature must be at least 1e-06"),
        ("generate --prompt x --top-p 2", "--top-p must be above 0 and at most 1, got 2"),
        ("generate --prompt x --greedy --n 2", "use --n 1"),
        ("generate --prompt x --greedy --temperature 0.8", "--temperature 0.8 has no effect with --greedy"),
        ("generate --prompt x --prompt-file y", "were both given"),
        ("generate --prompt x --stock --explain", "leave one out"),
        ("generate --prompt x --stock --mode graph", "--mode graph is for hf_fastdecode"),
        ("generate --prompt x --mode graphs", "--mode must be one of auto, eager, graph, got 'graphs'"),
        ("generate --prompt x --backend cuda", "--backend must be one of auto, triton,"),
        ("generate --prompt x --sampler slow", "--sampler must be one of auto, hf, fast, got 'slow'"),
        ("generate --prompt x --stock --sampler hf", "--sampler hf is for hf_fastdecode"),
        ("generate --prompt x --min-saved-tokens few", "--min-saved-tokens must be an integer of at least 0, or "),
        ("generate --prompt x --fuse-projections no", "--fuse-projections must be one of auto, True, False, got 'no'"),
        ("generate --prompt x --fuse-projections true --mode eager", "--fuse-projections=True cannot run with mode="),
        ("generate --prompt x --fuse-projections true --device cpu", "fuse_projections=True cannot run: "),
        ("generate --prompt x --stock --fuse-projections true", "--fuse-projections true is for hf_fastdecode"),
        (
            "generate --prompt x --dtype half",
            "--dtype must be one of auto, float32 (fp32), bfloat16 (bf16), float16 (fp16), got 'half'",
        ),
        ("generate --prompt x --task-id 127", "--task-id is a prompt, and another was given"),
        ("generate --prompt x --shots 3", "--shots 3 is for the prompt of a --task-id"),
        ("generate --task-id 5", "there is no task 5; the embedded tasks have ids from"),
        ("generate --task-id 127 --shots 99", "--shots must be between 0 and"),
        ("bench --point 512", "a point is CONTEXTxN, such as 2048x16, got '512'; write one so"),
        ("bench --mode graphs", "--mode must be one of auto, eager, graph, got 'graphs'"),
        ("bench --model shape:9b", "there is no shape '9b'; choose one of 7b-mha, "),
        ("bench --point 5000x8 --device cpu", "longer than the 4096 positions of embedded; ask for a shorter context"),
        ("bench --out .", "--out must be a CSV file, "),
        ("bench nosuch", "Got unexpected extra argument(s) (nosuch)"),
        ("generate --prompt-file /no/such/file", "cannot read /no/such/file: No such file"),
        ("generate --prompt x --model ./nosuch", "there is no file or folder ./nosuch"),
        ("generate --prompt x --device nonsense", "there is no device 'nonsense'; try auto or cpu"),
        ("generate", "prompt 0 (from stdin) is empty"),
        ("demo --task-id 1000000", "there is no task 1000000; the embedded tasks have ids from"),
        ("demo --shots -1", "--shots must be between 0 and"),
        ("demo --temperature 0", "got 0; `hf-fastdecode generate --greedy` takes the most likely tokens"),
        ("demo --n -4", "--n must be at least 1, got -4"),
        ("inspect", "Missing argument"),
        ("inspect ./nosuch", "there is no file or folder ./nosuch"),
        ("inspect embedded --context 0", "--context must be at least 1, got 0"),
        ("inspect embedded --n 16 -2", "--n must be at least 1, got -2"),
        ("inspect embedded --new-tokens 0", "--new-tokens must be at least 1, got 0"),
        ("nosuch", "No such command 'nosuch'"),
        ("demo --nosuch", "No such option: --nosuch"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    line = refusal(*arguments.split())
    assert line.startswith("hf-fastdecode: ")
    assert message in line


@pytest.mark.parametrize("command", ["generate --prompt x", "demo", "inspect embedded", "bench"])
def test_a_backend_of_the_environment_that_there_is_not(command, monkeypatch):
    monkeypatch.setenv("HF_FASTDECODE_BACKEND", "bogus")
    line = refusal(*command.split())
    assert line.startswith("hf-fastdecode: $HF_FASTDECODE_BACKEND must be one of auto, triton,")


@pytest.mark.parametrize("forced", ["option", "environment"])
def test_a_backend_that_cannot_run(forced, checkpoint, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("HF_FASTDECODE_BACKEND", "triton" if forced == "environment" else "plain")
    option = ["--backend", "triton"] if forced == "option" else []
    line = refusal("generate", "--model", checkpoint, "--device", "cpu", "--prompt", "a b c " * 60, "--n", 4, *option)
    remedy = "'plain', or 'auto' with $HF_FASTDECODE_BACKEND unset" if forced == "environment" else "'auto' or 'plain'"
    assert f"'triton' cannot run: it runs on CUDA devices, got 'cpu'; use backend={remedy}" in line


def test_stock_needs_no_backend(checkpoint, monkeypatch):
    monkeypatch.setenv("HF_FASTDECODE_BACKEND", "bogus")
    ran("generate", "--model", checkpoint, "--prompt", "a b", "--stock", "--max-new-tokens", 2)


def test_a_prompt_longer_than_the_model(checkpoint):
    words = ("generate", "--model", checkpoint, "--prompt", "x", "--max-new-tokens", 1024)
    assert "more than the 1024 positions" in refusal(*words)


def test_ctrl_c(monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_fastdecode.cli.generate.read_prompts", interrupt)
    result = run("generate", "--prompt", "x")
    assert (result.exit_code, result.output) == (130, "")


def test_a_reader_that_goes_away():
    process = python(MAIN, "--version")
    process.stdout.close()
    assert process.wait(timeout=60) == 141, "as a program that SIGPIPE ends"
    assert process.stderr.read() == ""


@pytest.mark.parametrize("moment", ["package", "torch"])
def test_ctrl_c_while_python_imports(moment):
    # The import that is interrupted is the first of this name, which sends the signal itself.
    name = {"package": "typer", "torch": "torch"}[moment]
    code = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which runs in the background ignore
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""
    for program in (MAIN, "import runpy; sys.argv[0] = 'x'; runpy.run_module('hf_fastdecode', run_name='__main__')"):
        process = python(code + program, "generate", "--prompt", "x")
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output, errors) == (130, "", "")


def test_streams_that_are_closed_or_full():
    def told(redirection: str, *words: str) -> tuple[int, str, str]:
        command = ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-m", "hf_fastdecode", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    assert told(">&-", "--version") == (2, "", "hf-fastdecode: stdout is closed; send it to a file, or to /dev/null\n")
    full = "hf-fastdecode: cannot write the output: No space left on device; free space, or send it elsewhere\n"
    assert told(">/dev/full", "--version") == (2, "", full)
    assert told(">/dev/full", "generate", "--help") == (2, "", full)
    code, _, errors = told("<&-", "generate")
    assert (code, errors.count("\n")) == (2, 1)
    assert "prompt 0 (from stdin) is empty" in errors
    for redirection in ("2>&-", "2>/dev/full", "<&- >&- 2>&-"):
        assert told(redirection, "generate", "--n", "0") == (2, "", "")


def test_an_error_that_nobody_foresaw(monkeypatch):
    def fail(*args: object) -> None:
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("hf_fastdecode.cli.generate.read_prompts", fail)
    result = run("generate", "--prompt", "x")
    assert result.exit_code == 1
    assert result.stderr == (
        "hf-fastdecode: ZeroDivisionError: by nothing; with HF_FASTDECODE_TRACEBACK=1 in the environment, the "
        "traceback is shown\n"
    )
    monkeypatch.setenv("HF_FASTDECODE_TRACEBACK", "1")
    result = run("generate", "--prompt", "x")
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert "in fail" in result.stderr


def test_any_encoding(checkpoint):
    runner = CliRunner(charset="ascii")
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "é", "--max-new-tokens", "60", "--n", "8"]
    result = runner.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert "\\ufffd" in result.stdout, "what ASCII has no letter for"
    result = runner.invoke(app, ["inspect", str(checkpoint)], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"\d\.\dx", result.stdout), "a ratio"
    assert "\\x" not in result.stdout


def test_more_completions_than_memory_holds(checkpoint, monkeypatch):
    words = ("generate", "--model", checkpoint, "--device", "cpu", "--prompt", "x", "--n")
    for n in (10**9, 10**23):
        line = refusal(*words, n)
        assert f"{n:,} completions of up to 128 tokens need up to" in line
        assert "lower --n or --max-new-tokens" in line

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fail)
    assert refusal(*words, 2) == (
        "hf-fastdecode: 2 completions of up to 128 tokens do not fit in the memory of cpu; lower --n or "
        "--max-new-tokens\n"
    )


def test_as_a_module_and_without_a_command():
    process = subprocess.run(
        [sys.executable, "-m", "hf_fastdecode", "generate", "--n", "0"], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 2
    assert process.stderr.startswith("hf-fastdecode: --n must be at least 1, got 0")
    found = run("eval")
    assert found.exit_code == 2
    assert found.stderr == ""
