"""lm-evaluation-harness through `hf-fastdecode lm-eval`: its own command line, the samples of its own model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import lm_eval.tasks
import pytest
import typer
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from typer.testing import CliRunner

import hf_fastdecode as fd
from hf_fastdecode.assets import MODEL_PATH, embedded_tasks
from hf_fastdecode.cli.console import OneLineErrors
from hf_fastdecode.cli.programs import PASS_ON
from hf_fastdecode.cli.programs import lm_eval as command
from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.harness import MODEL_NAME, FastDecodeLM

from .evaluation import write_task

root = typer.Typer(cls=OneLineErrors)
root.command("lm-eval", context_settings=PASS_ON)(command)
root.command("other")(lambda: None)


@dataclass
class Prefilled:
    """Tokens prefilled by the calls of lm-eval's models, and the paths they took."""

    tokens: int = 0
    paths: set[str] = field(default_factory=set)


@pytest.fixture
def prefilled(monkeypatch) -> Iterator[Prefilled]:
    inner, seen = HFLM._model_generate, Prefilled()

    def generate(self, context, *args, **kwargs):
        found = inner(self, context, *args, **kwargs)
        call = fd.explain(self.model).last_call
        seen.paths.add("not enabled" if call is None else call.path)
        seen.tokens += context.numel() if call is None or call.path != "shared" else call.prefilled_tokens
        return found

    monkeypatch.setattr(HFLM, "_model_generate", generate)
    # Reading lm-eval's own thousands of tasks takes longer than all else here.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    return seen


def run(folder: Path, name: str, *words: str) -> list[list[str]]:
    """The samples of each problem, from the file that lm-eval logs them to."""
    out = folder / name
    given = [*words, "--tasks", "embedded", "--include_path", str(folder / "tasks"), "--log_samples"]
    before = list(sys.argv)
    done = CliRunner().invoke(root, ["lm-eval", *given, "--output_path", str(out), "--device", "cpu"])
    assert done.exit_code == 0, done.stderr
    assert sys.argv == before
    (path,) = out.rglob("samples_embedded_*.jsonl")
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [sample["resps"][0] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


@pytest.mark.parametrize(
    ("repeats", "batch_size", "less"),
    [
        pytest.param(4, 4, 3, id="repeats"),
        pytest.param(1, 3, 1.5, id="one-batch-of-problems"),
        pytest.param(1, 1, 1.5, id="one-at-a-time"),
    ],
)
def test_samples_are_stocks_and_fewer_tokens_are_prefilled(repeats, batch_size, less, tmp_path, prefilled):
    write_task(tmp_path / "tasks", embedded_tasks()[:3], shots=2, new_tokens=16, repeats=repeats)
    size = ("--batch_size", str(batch_size))
    expected = run(tmp_path, "stock", "--model", "hf", "--model_args", f"pretrained={MODEL_PATH}", *size)
    assert prefilled.paths == {"not enabled"}
    stock = prefilled.tokens
    found = run(tmp_path, "ours", "--model_args", "pretrained=embedded", *size)
    assert found == expected
    assert len(expected) == 3 and {len(samples) for samples in expected} == {repeats}
    assert len({sample for samples in expected for sample in samples}) > 1
    assert "shared" in prefilled.paths
    assert (prefilled.tokens - stock) * less < stock


def test_the_model_is_in_lm_evals_registry():
    assert get_model(MODEL_NAME) is FastDecodeLM


@pytest.mark.parametrize(
    ("arguments", "reuse", "mode"),
    [
        ("batch_size=1", True, "auto"),
        ("batch_size=4", True, "auto"),
        ("batch_size=1,reuse_prefix=False,mode=eager", False, "eager"),
        ("batch_size=4,reuse_prefix=1000000", 1000000, "auto"),
    ],
)
def test_options_of_enable_are_model_args(arguments, reuse, mode):
    from hf_fastdecode.generation.model_state import state_of

    harness = FastDecodeLM.create_from_arg_string(arguments, {"device": "cpu"})
    options = state_of(harness.model).options
    assert (options.reuse_prefix, options.mode) == (reuse, mode)
    assert options.reuse_prefix is reuse or reuse == 1000000


def test_other_options_are_refused_before_anything_is_loaded():
    with pytest.raises(InputError, match=r"--model_args: mode must be one of auto, .*, got 'fast'"):
        FastDecodeLM(pretrained="nosuch", mode="fast")
    with pytest.raises(InputError, match="--batch_size must be a whole number of at least 1, auto or auto:N, got '0'"):
        FastDecodeLM(pretrained="nosuch", batch_size=0)


def test_a_model_of_ones_own_is_enabled():
    model, tokenizer = fd.load_embedded()
    FastDecodeLM(model, tokenizer=tokenizer, batch_size=4)
    assert fd.explain(model).enabled


@pytest.mark.usefixtures("prefilled")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tasks nosuchtask", "lm-eval: Tasks not found: nosuchtask; `hf-fastdecode lm-eval ls tasks` lists them"),
        ("--tasks embedded --batch_size x", "--batch_size must be a whole number of at least 1, auto or "),
        ("--tasks embedded --model_args pretrained=./nosuch", "there is no file or folder ./nosuch; name one"),
        ("--tasks embedded --model_args dtype=float3", "--dtype must be one of auto, float32 (fp32), "),
    ],
)
def test_wrong_input_is_one_line(words, message, tmp_path):
    write_task(tmp_path / "tasks", embedded_tasks()[:1], shots=1, new_tokens=2, repeats=1)
    done = CliRunner().invoke(root, ["lm-eval", *words.split(), "--include_path", str(tmp_path / "tasks")])
    assert done.exit_code == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hf-fastdecode: ")]
    assert len(lines) == 1 and lines[0].startswith(f"hf-fastdecode: {message}")
