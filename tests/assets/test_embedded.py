"""The embedded model and tasks: what they are, and that training never saw the held-out compositions."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fastdecode.assets import (
    MODEL_PATH,
    SEPARATOR,
    embedded_folder,
    embedded_tasks,
    few_shot_prompt,
    fewshot_tasks,
    load_embedded,
)
from hf_fastdecode.evals.generation import draw_rows, samples_of, sharing
from hf_fastdecode.evals.prompts import prompt_format
from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.run_folder import Drawing
from hf_fastdecode.evals.sandbox import Sandbox, SandboxError, choose
from hf_fastdecode.evals.scoring import score
from hf_fastdecode.evals.tasks import load_tasks
from tools.embedded_model import corpus
from tools.embedded_model.data import separator_ids


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    """Where generated programs run."""
    try:
        return choose()
    except SandboxError as error:
        pytest.skip(str(error))


FIELDS = {"task_id", "text", "code", "test_list", "test_setup_code", "challenge_test_list"}


@lru_cache
def loaded() -> tuple[Any, Any]:
    return load_embedded()


def test_tasks_follow_mbpps_schema() -> None:
    tasks, shots = embedded_tasks(), fewshot_tasks()
    assert len(tasks) >= 100
    assert len(shots) >= 12
    for task in (*tasks, *shots):
        assert set(task) == FIELDS
        assert len(task["test_list"]) == 3
        assert all(test.startswith("assert ") for test in task["test_list"])
        assert task["test_setup_code"] == ""
        assert task["challenge_test_list"] == []
    ids = [task["task_id"] for task in (*tasks, *shots)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("tasks", [embedded_tasks(), fewshot_tasks()], ids=["held-out", "few-shot"])
def test_reference_code_passes_its_tests(tasks: list[corpus.Task], sandbox: Sandbox) -> None:
    # One process for all: each task runs in a namespace of its own.
    runs = [f"exec({task['code'] + chr(10) + chr(10).join(task['test_list'])!r}, {{}})" for task in tasks]
    together = Task("all", "python", "", "", ("assert done",))
    program = Sample("all", 0, "\n".join([*runs, "done = True"]))
    (verdict,) = score({"all": together}, [program], sandbox=sandbox, progress=False)
    assert verdict.passed, verdict


def test_stored_tasks_are_what_the_tools_make() -> None:
    held_out = corpus.held_out_examples(0, corpus.TASKS_PRECISE, corpus.TASKS_VAGUE)
    stored = [task | {"task_id": 0} for task in embedded_tasks()]
    assert stored == [example.as_task(0) for example in held_out]
    shots = [task | {"task_id": 0} for task in fewshot_tasks()]
    assert shots == [example.as_task(0) for example in corpus.few_shot_examples(0, corpus.TASKS_FEW_SHOT)]
    assert all(corpus.is_held_out(example.signature) for example in held_out)


def test_training_does_not_contain_held_out_tasks() -> None:
    held_out = corpus.held_out_examples(0, corpus.TASKS_PRECISE, corpus.TASKS_VAGUE)
    counts = corpus.check_disjoint(held_out, corpus.training_blocks(0, 2))
    assert counts["examples"] == 2 * corpus.BLOCK
    assert counts["signatures"] == counts["bodies"] == 0
    shots = corpus.few_shot_examples(0, corpus.TASKS_FEW_SHOT)
    assert corpus.check_disjoint(held_out, iter([shots]))["bodies"] == 0


def test_the_corpus_does_not_depend_on_what_was_drawn_before(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = corpus.training_block(3, 1)
    monkeypatch.setattr(corpus, "BLOCK", 5)
    assert corpus.training_block(3, 1) == whole[:5]
    assert corpus.training_block(3, 2) != whole[:5]


def test_the_model_is_small_multi_head_and_rotary() -> None:
    assert (MODEL_PATH / "model.safetensors").stat().st_size <= 8_000_000
    model, _ = loaded()
    config = model.config
    assert config.model_type == "llama"
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.head_dim == 64
    assert config.num_attention_heads * config.head_dim == config.hidden_size
    assert config.rope_parameters["rope_type"] == "default"
    assert config.max_position_embeddings == 4096
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_done_is_one_token_and_ends_generation() -> None:
    model, tokenizer = loaded()
    assert tokenizer.eos_token == "[DONE]"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    prompt = few_shot_prompt(embedded_tasks()[0], 3)
    ids = tokenizer(prompt).input_ids
    assert ids.count(tokenizer.eos_token_id) == 3
    assert tokenizer.decode(ids) == prompt


def test_examples_tokenize_alone_as_in_a_prompt() -> None:
    _, tokenizer = loaded()
    prompt = few_shot_prompt(embedded_tasks()[0], 2)
    parts = [tokenizer(part).input_ids for part in prompt.split(SEPARATOR + "You are")]
    separator = separator_ids(tokenizer.backend_tokenizer)
    heads = tokenizer("You are").input_ids
    assert tokenizer(prompt).input_ids == parts[0] + [t for part in parts[1:] for t in (*separator, *heads, *part)]


def test_few_shot_prompts_count_their_shots() -> None:
    task = embedded_tasks()[0]
    assert few_shot_prompt(task, 0).endswith(task["test_list"][2] + "\n[BEGIN]\n")
    assert few_shot_prompt(task, 12).count("[DONE]\n\n") == 12
    assert few_shot_prompt(task, fewshot_tasks()[:2]) == few_shot_prompt(task, 2)
    with pytest.raises(ValueError, match="between 0 and 40, got 41"):
        few_shot_prompt(task, 41)


def test_generate_stops_by_itself_and_solves_some_tasks(sandbox: Sandbox) -> None:
    model, tokenizer = loaded()
    tasks = embedded_tasks()[:12]
    inputs = tokenizer(few_shot_prompt(tasks[0], 3), return_tensors="pt")
    out = model.generate(**inputs, do_sample=False, max_new_tokens=192)
    assert out[0, -1] == tokenizer.eos_token_id
    assert out.shape[1] - inputs.input_ids.shape[1] < 192
    assert model.generation_config.max_new_tokens is None  # which would come before a caller's max_length
    counts = passing(12, 1, Drawing(temperature=0), sandbox)
    assert sum(counts) >= 2


def passing(tasks: int, count: int, drawing: Drawing, sandbox: Sandbox) -> list[int]:
    """How many of so many samples of each of the first tasks pass."""
    model, tokenizer = loaded()
    tokenizer.padding_side = "left"
    chosen = load_tasks(limit=tasks)
    form = prompt_format(chosen, shots=1)
    with sharing(model, drawing):
        drawn = draw_rows(model, tokenizer, form, chosen.tasks, count, drawing, seed=0)
    samples = samples_of(drawn, model, tokenizer, form, chosen.tasks)
    found = score({task.task_id: task for task in chosen.tasks}, samples, sandbox=sandbox, progress=False)
    passed = Counter(verdict.task_id for verdict in found if verdict.passed)
    return [passed[task.task_id] for task in chosen.tasks]


def test_more_samples_solve_more_tasks(sandbox: Sandbox) -> None:
    counts = passing(6, 8, Drawing(), sandbox)
    assert sum(count > 0 for count in counts) > sum(counts) / 8


@pytest.mark.parametrize("kind", ["cache", "read-only cache"])
def test_programs_may_write_beside_the_embedded_model(tmp_path, monkeypatch, kind):
    """As lighteval does, which keeps its cache where the model is; the installed package stays as it is."""
    home = tmp_path / "home"
    if kind == "read-only cache":
        home.write_text("")  # where no folder can be made
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    before = {file.name: file.stat().st_mtime_ns for file in MODEL_PATH.iterdir()}
    model, tokenizer = load_embedded()
    places = {Path(one) for one in (model.config._name_or_path, model.name_or_path, tokenizer.name_or_path)}
    (place,) = places
    assert place == embedded_folder()
    assert place.is_relative_to(home) == (kind == "cache")
    (place / "cache").mkdir(exist_ok=True)
    (place / "config.json").write_text((place / "config.json").read_text())
    assert {file.name: file.stat().st_mtime_ns for file in MODEL_PATH.iterdir()} == before
    assert torch.equal(load_embedded()[0].lm_head.weight, model.lm_head.weight)


def test_a_copy_of_another_user_is_left_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    theirs = embedded_folder()
    monkeypatch.setattr("hf_fastdecode.assets.os.access", lambda path, mode: Path(path) != theirs)
    assert embedded_folder() != theirs
    assert {file.name for file in MODEL_PATH.iterdir()} <= {file.name for file in embedded_folder().iterdir()}


def test_the_copy_of_the_embedded_model_is_made_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    copies = {embedded_folder() for _ in range(2)}
    assert len(copies) == 1
    assert {file.name for file in copies.pop().iterdir()} == {file.name for file in MODEL_PATH.iterdir()}
    assert len(list((tmp_path / "hf_fastdecode").iterdir())) == 1
