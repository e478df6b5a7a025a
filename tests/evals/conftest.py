"""Sandboxes that tests of evaluations run in, servers that fork, and a small run of the embedded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_fastdecode.cli.models import load_model
from hf_fastdecode.evals.generation import weights_digest
from hf_fastdecode.evals.prompts import PromptFormat, prompt_format
from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.run_folder import Drawing, RunSettings, prompts_digest
from hf_fastdecode.evals.sandbox import ForkServer, Sandbox, SandboxError, choose, python_command
from hf_fastdecode.evals.tasks import load_tasks

from .example_tasks import end_runners
from .processes import ANY, LIMITS, Outcome, outcome


def chosen(name: str) -> Sandbox:
    """A back end; skips the test where it does not isolate."""
    try:
        return choose(name)
    except SandboxError as error:
        pytest.skip(str(error))


def chosen_to_fork(name: str) -> Sandbox:
    if not (sandbox := chosen(name)).forks:
        pytest.skip("it cannot fork here")
    return sandbox


@pytest.fixture(scope="session", params=["bwrap", "unshare", "podman", "docker"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """Every back end that isolates on this machine."""
    return chosen(request.param)


@pytest.fixture(scope="session")
def any_sandbox() -> Sandbox:
    """The back end that `auto` chooses."""
    return chosen("auto")


@pytest.fixture(params=["bwrap", "unshare"])
def forking(request: pytest.FixtureRequest) -> Sandbox:
    """Every sandbox that can fork."""
    return chosen_to_fork(request.param)


@pytest.fixture(scope="module", params=["bwrap", "unshare", "podman", "docker", "bwrap-forks", "unshare-forks"])
def run_python(request: pytest.FixtureRequest) -> Iterator[Callable[..., Outcome]]:
    """Runs a program in every back end: in a new interpreter, or forked from a server."""
    name, _, forks = request.param.partition("-")
    if forks:
        with chosen_to_fork(name).fork_server(ANY) as found:
            yield lambda source, limits=LIMITS, **options: outcome(
                lambda: found.fork(limits), source.encode(), **options
            )
    else:
        (command, readable), sandbox = python_command(), chosen(name)
        yield lambda source, limits=LIMITS, **options: outcome(
            lambda: sandbox.popen([*command, "-c", source], readable=readable, limits=limits), **options
        )


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
