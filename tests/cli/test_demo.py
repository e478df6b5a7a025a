"""The demo on a tiny random model."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hf_fastdecode.assets import embedded_tasks
from hf_fastdecode.cli.console import FailedCheck
from hf_fastdecode.cli.demo import DEFAULT_TASK, _next_steps
from hf_fastdecode.cli.demo_run import check_same, demo_text, judged, run_demo
from hf_fastdecode.cli.models import Completion
from hf_fastdecode.cli.options import Sampling, pick_tasks
from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.sandbox import SandboxError

from .command_line import needs_weights, ran, run

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head_dim, float32


def test_both_sides_are_measured(loaded):
    model, tokenizer = loaded
    forward, hooks = model.forward, len(model.get_input_embeddings()._forward_hooks)
    found = run_demo(
        model, tokenizer, pick_tasks([DEFAULT_TASK], 1)[0], Sampling(n=3, max_new_tokens=5, top_p=1.0), shots=1
    )
    m, n, steps = found.shared.drawn.prompt_length, 3, found.shared.drawn.log_probs.shape[1]
    assert (found.stock.path, found.shared.path) == ("stock", "shared")
    assert found.stock.prompt_tokens == n * m
    assert found.shared.prompt_tokens == m
    assert found.stock.kv_bytes == n * (m + steps - 1) * BYTES_PER_TOKEN
    assert found.shared.kv_bytes == (m + n * 5) * BYTES_PER_TOKEN, "allocated for all tokens that may come"
    for side in (found.stock, found.shared):
        assert 0 < side.drawn.first_token_s < side.drawn.total_s
    assert len(found.completions) == 3
    assert not any(verdict.passed for verdict in found.verdicts.values())
    assert model.forward == forward
    assert len(model.get_input_embeddings()._forward_hooks) == hooks


def test_a_call_that_cannot_share_says_so(loaded):
    model, tokenizer = loaded
    found = run_demo(model, tokenizer, pick_tasks([DEFAULT_TASK], 0)[0], Sampling(n=1, max_new_tokens=2), shots=0)
    assert found.shared.path == "stock"
    assert "sharing would save 0 tokens" in found.shared.reason


def test_the_end_names_the_programs_that_are_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = _next_steps(tmp_path / ".venv/bin/python")
    assert "  .venv/bin/python script.py, in which hf_fastdecode.enable(model)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "  .venv/bin/hf-fastdecode generate --model MODEL --prompt TEXT --n 8\n" in text
    assert text.endswith("README.md has a quickstart, docs/README.md lists all pages.")
    assert "  /usr/bin/python3 script.py" in _next_steps(Path("/usr/bin/python3"))


def test_different_tokens_end_the_demo():
    stock = torch.arange(12).view(2, 6)
    check_same(stock, stock.clone(), 4)
    shared = stock.clone()
    shared[1, 5] = 99
    for other, place in ((shared, "completion 1 at token 1"), (stock[:, :5], "completion 0 at token 1")):
        with pytest.raises(FailedCheck, match=place):
            check_same(stock, other, 4)


@pytest.fixture
def task():
    return next(task for task in embedded_tasks() if task["task_id"] == 101)


def test_candidates_are_distinct_ranked_and_checked(loaded, task):
    texts = ["wrong", task["code"], "wrong", task["code"], "def"]
    verdicts, not_tested = judged(texts, task)
    if not_tested:
        pytest.skip(not_tested)
    assert {text: verdict.status for text, verdict in verdicts.items()} == dict(
        zip(texts, ["fail", "pass"] * 2 + ["compile"])
    )
    found = run_demo(*loaded, task, Sampling(n=2, max_new_tokens=2), shots=0)
    completions = [
        Completion(0, 0, text, 5, logp, "stop") for text, logp in zip(texts, (-0.1, -0.2, -0.5, -3.0, -9.0))
    ]
    console = Console(width=200, record=True, file=StringIO())
    found = replace(found, completions=completions, verdicts=verdicts)
    console.print(demo_text(found, task, 0, machine="a CPU", model="a model", best=3))
    text = console.export_text()
    assert "2 of 5 completions pass its tests, 1 of the 3 distinct ones." in text
    rows = [words[1:8:2] for words in map(str.split, text.splitlines()) if words[1:2] in (["1"], ["2"], ["3"])]
    assert rows == [["1", "-0.100", "2x", "fail:"], ["2", "-0.200", "2x", "pass"], ["3", "-9.000", "1x", "compile:"]]


def test_without_a_sandbox_the_demo_says_that_tests_were_not_run(loaded, task, monkeypatch):
    def refuse(*args):
        raise SandboxError("no sandbox; install bubblewrap")

    monkeypatch.setattr("hf_fastdecode.cli.demo_run.choose", refuse)
    found = run_demo(*loaded, task, Sampling(n=2, max_new_tokens=2), shots=0)
    assert (found.verdicts, found.not_tested) == ({}, "no sandbox; install bubblewrap")
    console = Console(width=200, record=True, file=StringIO())
    console.print(demo_text(found, task, 0, machine="a CPU", model="a model", best=1))
    text = console.export_text()
    assert "The tests were not run: no sandbox; install bubblewrap.\n" in text
    assert "not run" in text.splitlines()[-2]
    assert "completions pass" not in text


def test_tasks_and_shots():
    first, other = embedded_tasks()[0], embedded_tasks()[7]
    assert [task["task_id"] for task in pick_tasks([DEFAULT_TASK], 3)] == [DEFAULT_TASK]
    assert pick_tasks([first["task_id"], other["task_id"]], 0) == [first, other]
    with pytest.raises(InputError, match="there is no task 99999; the embedded tasks have ids from"):
        pick_tasks([DEFAULT_TASK, 99999], 3)
    for shots in (-1, 1000):
        with pytest.raises(InputError, match=f"--shots must be between 0 and .* got {shots}"):
            pick_tasks([DEFAULT_TASK], shots)


def test_demo(embedded):
    result = ran("demo", "--n", 3, "--shots", 1, "--max-new-tokens", 4)
    assert result.stderr == ""
    for text in ("3 completions of one prompt", "prompt tokens prefilled", "KV cache", "0 of 3 completions pass"):
        assert text in result.stdout


def test_demo_with_different_tokens(embedded, monkeypatch):
    monkeypatch.setattr("hf_fastdecode.cli.demo_run.torch.equal", lambda *tensors: False)
    result = run("demo", "--n", 2, "--shots", 1, "--max-new-tokens", 2)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("hf-fastdecode: stock and shared drew different tokens")
    assert result.stderr.count("\n") == 1


@needs_weights
def test_demo_of_the_embedded_model():
    result = ran("demo", "--n", 2, "--shots", 1, "--max-new-tokens", 4)
    assert "Both calls drew the same" in " ".join(result.stdout.split())
