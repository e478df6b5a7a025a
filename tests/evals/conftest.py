"""Sandboxes that tests of evaluations run in, servers that fork, and a small run of the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_fastdecode.cli.models import load_model
from hf_fastdecode.evals.prompts import PromptFormat, prompt_format
from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.rescore import weights_digest
from hf_fastdecode.evals.run_folder import Drawing, RunSettings, prompts_digest
from hf_fastdecode.evals.sandbox import ForkServer, Sandbox, SandboxError, choose
from hf_fastdecode.evals.tasks import load_tasks

from .example_tasks import end_runners
from .processes import ANY


@pytest.fixture(scope="session", params=["bwrap", "unshare", "podman", "docker"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """Every back end that isolates on this machine."""
    try:
        return choose(request.param)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def any_sandbox() -> Sandbox:
    """The back end that `auto` chooses."""
    try:
        return choose()
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["bwrap", "unshare"])
def forking(request: pytest.FixtureRequest) -> Sandbox:
    """Every sandbox that can fork."""
    try:
        sandbox = choose(request.param)
    except SandboxError as error:
        pytest.skip(str(error))
    if not sandbox.forks:
        pytest.skip("it cannot fork here")
    return sandbox


@pytest.fixture
def server(forking: Sandbox) -> Iterator[ForkServer]:
    with forking.fork_server(ANY) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def ended_runners() -> Iterator[None]:
    yield
    end_runners()


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
