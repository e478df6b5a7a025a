"""What generate, inspect and demo print."""

from __future__ import annotations

import json

import pytest
from typer.testing import Result

from hf_fastdecode.assets import embedded_tasks, few_shot_prompt

from .checkpoint import embed
from .command_line import PROMPT, needs_weights, run

# --- generate --------------------------------------------------------------------------------------------------------


def lines(result: Result) -> list[dict]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_same_seed_same_completions_with_and_without_stock(checkpoint):
    common = ["generate", "--model", checkpoint, "--prompt", PROMPT, "--prompt", PROMPT[9:], "--n", 3]
    common += ["--max-new-tokens", 6, "--seed", 7, "--json"]
    shared, again, stock = run(*common), run(*common), run(*common, "--stock")
    assert "shared (" in shared.stderr
    assert "stock transformers, as asked" in stock.stderr
    assert shared.stdout == again.stdout
    found = lines(shared)
    assert [(line["prompt"], line["sample"]) for line in found] == [(p, s) for p in range(2) for s in range(3)]
    assert len({line["text"] for line in found}) > 1
    for ours, theirs in zip(found, lines(stock), strict=True):
        assert ours.pop("mean_logp") == pytest.approx(theirs.pop("mean_logp"), abs=2e-5)
        assert ours == theirs
    assert {line["text"] for line in lines(run(*common, "--seed", 8))} != {line["text"] for line in found}


def test_texts_on_stdout_and_the_rest_on_stderr(checkpoint):
    common = ["generate", "--model", checkpoint, "--n", 2, "--max-new-tokens", 4]
    result = run(*common, "--explain", stdin=PROMPT)
    assert result.exit_code == 0
    texts = [line["text"] for line in lines(run(*common, "--json", stdin=PROMPT))]
    assert result.stdout == "".join(text if text.endswith("\n") else text + "\n" for text in texts)
    assert result.stderr.startswith("--- prompt 0, sample 0: 4 tokens, mean log-p -")
    assert "last generate call: shared (" in result.stderr
    assert "2 completions, 8 tokens in" in result.stderr


def test_a_short_prompt_is_shared_where_that_is_asked_for(checkpoint):
    common = ["generate", "--model", checkpoint, "--prompt", PROMPT[:40], "--n", 2, "--max-new-tokens", 2, "--explain"]
    assert "(min_saved_tokens)" in run(*common).stderr
    assert "last generate call: shared (" in run(*common, "--min-saved-tokens", 0).stderr


def test_greedy_from_a_file(checkpoint, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    arguments = ["generate", "--model", checkpoint, "--prompt-file", file, "--greedy", "--max-new-tokens", 3, "--json"]
    assert len(lines(run(*arguments))) == 1


def test_a_prompt_from_each_file(checkpoint, tmp_path):
    files = [tmp_path / "first.txt", tmp_path / "second.txt"]
    for file, text in zip(files, (PROMPT, PROMPT[9:]), strict=True):
        file.write_text(text)
    common = ["generate", "--model", checkpoint, "--greedy", "--max-new-tokens", 3, "--json"]
    found = lines(run(*common, "--prompt-file", files[0], "--prompt-file", files[1]))
    assert [line["prompt"] for line in found] == [0, 1]
    assert found == lines(run(*common, "--prompt", PROMPT, "--prompt", PROMPT[9:]))


def test_the_prompt_of_a_task(checkpoint):
    common = ["generate", "--model", checkpoint, "--greedy", "--max-new-tokens", 3, "--json"]
    first, second = embedded_tasks()[:2]
    found = lines(run(*common, "--task-id", first["task_id"], "--task-id", second["task_id"], "--shots", 1))
    texts = [few_shot_prompt(task, 1) for task in (first, second)]
    assert found == lines(run(*common, "--prompt", texts[0], "--prompt", texts[1]))


# --- inspect ---------------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("fields", "attention", "bytes_per_token"),
    [
        ({}, "MHA", 2 * 3 * 8 * 8 * 4),
        ({"num_key_value_heads": 2}, "GQA", 2 * 3 * 2 * 8 * 4),
        ({"num_key_value_heads": 1, "head_dim": 24, "dtype": "bfloat16"}, "MQA", 2 * 3 * 1 * 24 * 2),
    ],
    ids=["mha", "gqa", "mqa-head-dim"],
)
def test_inspect_by_hand(tmp_path, fields, attention, bytes_per_token):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, **fields}))
    options = ["inspect", file, "--context", 100, 1000, "--n", 4, 64, "--new-tokens", 20]
    found = json.loads(run(*options, "--json").stdout)
    assert (found["attention"], found["bytes_per_token"], found["can_share"]) == (attention, bytes_per_token, True)
    assert [(row["context"], row["samples"]) for row in found["rows"]] == [(100, 4), (100, 64), (1000, 4), (1000, 64)]
    last = found["rows"][-1]
    assert last["kv_bytes"]["stock"] == 64 * 1020 * bytes_per_token
    assert last["kv_bytes"]["shared"] == (1000 + 64 * 20) * bytes_per_token
    assert last["step_bytes"]["ratio"] == pytest.approx(64 * 1010 / (1000 + 64 * 10), abs=1e-4)
    table = run(*options)
    assert table.exit_code == 0
    assert f"KV per token  {bytes_per_token:,} bytes" in table.stdout
    assert "can share     yes" in table.stdout


@needs_weights
def test_inspect_the_embedded_model():
    found = json.loads(run("inspect", "embedded", "--json").stdout)
    assert (found["attention"], found["can_share"]) == ("MHA", True)


# --- demo ------------------------------------------------------------------------------------------------------------


def test_demo(checkpoint, monkeypatch):
    embed(checkpoint, monkeypatch)
    result = run("demo", "--n", 3, "--shots", 1, "--max-new-tokens", 4, "--best", 2)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for text in ("3 completions of one prompt", "prompt tokens prefilled", "KV cache", "0 of 3 completions pass"):
        assert text in result.stdout


def test_demo_with_different_tokens(checkpoint, monkeypatch):
    embed(checkpoint, monkeypatch)
    monkeypatch.setattr("hf_fastdecode.cli.demo_run.torch.equal", lambda *tensors: False)
    result = run("demo", "--n", 2, "--shots", 1, "--max-new-tokens", 2)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("hf-fastdecode: stock and shared drew different tokens")
    assert result.stderr.count("\n") == 1


@needs_weights
def test_demo_of_the_embedded_model():
    result = run("demo", "--n", 2, "--shots", 1, "--max-new-tokens", 4)
    assert result.exit_code == 0, result.stderr
    assert "Both calls drew the same" in " ".join(result.stdout.split())
