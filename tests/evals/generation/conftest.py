"""The embedded model, some of its tasks, and settings of a small run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_fastdecode.cli.models import load_model
from hf_fastdecode.evals.prompts import PromptFormat, prompt_format
from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.rescore import weights_digest
from hf_fastdecode.evals.run_folder import Drawing, RunSettings, prompts_digest
from hf_fastdecode.evals.tasks import load_tasks


@dataclass(frozen=True)
class Small:
    """A model, its tasks, and the settings of a run over them."""

    model: Any
    tokenizer: Any
    tasks: tuple[Task, ...]
    form: PromptFormat
    settings: RunSettings


@pytest.fixture(scope="package")
def small() -> Small:
    model, tokenizer = load_model("embedded", "auto", torch.device("cpu"))
    tasks = load_tasks(limit=3)
    form = prompt_format(tasks, shots=1)
    settings = RunSettings(
        model="embedded",
        weights=weights_digest(model),
        dtype="float32",
        device="cpu",
        task=tasks.name,
        prompts=prompts_digest(
            [task.task_id for task in tasks.tasks], tokenizer([form.prompt(task) for task in tasks.tasks]).input_ids
        ),
        format=form.name,
        n=4,
        seed=0,
        rows=8,
        drawing=Drawing(max_new_tokens=20),
    )
    return Small(model, tokenizer, tasks.tasks, form, settings)
