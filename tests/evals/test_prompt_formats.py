"""Prompt formats: what models read."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest

from hf_fastdecode.assets import embedded_tasks, few_shot_prompt
from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.prompts import prompt_format
from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.tasks import TaskSet, load_tasks

from .stems import JAVA, JAVASCRIPT, MBPP, PYTHON


def of(*tasks: Task, examples: tuple[Task, ...] = ()) -> TaskSet:
    return TaskSet("a", "a test", tasks, examples)


class Template:
    """A tokenizer with a chat template."""

    chat_template = "some"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return "".join(f"<{one['role']}>{one['content']}</>" for one in messages) + "<assistant>"


def test_embedded_prompts_are_those_that_the_model_was_trained_on() -> None:
    tasks = load_tasks("embedded", limit=5)
    for shots in (0, 3):
        found = prompt_format(tasks, shots=shots)
        for task, fields in zip(tasks.tasks, embedded_tasks(), strict=False):
            assert found.prompt(task) == few_shot_prompt(fields, shots)


def test_austin_is_as_published() -> None:
    one, two = (replace(MBPP, task_id=str(number), description=f"Task {number}.") for number in (2, 3))
    found = prompt_format(of(MBPP, examples=(one, two)), "austin", shots=1)
    assert found.prompt(MBPP) == (
        "You are an expert Python programmer, and here is your task: Task 2. Your code should pass these tests:\n\n"
        "assert double(2) == 4\nassert double(0) == 0\n[BEGIN]\ndef double(x):\n    return 2 * x\n[DONE]\n\n"
        "You are an expert Python programmer, and here is your task: Write a function to double a number. Your code "
        "should pass these tests:\n\nassert double(2) == 4\nassert double(0) == 0\n[BEGIN]\n"
    )
    assert (
        found.stop_rule(MBPP).completion("def double(x):\n    return 2 * x\n[DONE]\n\nYou are")
        == "def double(x):\n    return 2 * x\n"
    )


def test_bigcode_is_as_published() -> None:
    found = prompt_format(of(MBPP), "bigcode")
    assert found.prompt(MBPP) == '"""\nWrite a function to double a number.\nassert double(2) == 4\n"""\n'
    text = "def f(x):\n    return 2 * x\n\ndef double(x):\n    return f(x)\n\nassert double(2) == 4"
    assert found.stop_rule(MBPP).completion(text) == text.partition("\nassert")[0]
    assert found.stop_rule(MBPP).completion("def f(") == "def f("  # as there, nothing is repaired
    assert found.prompt(PYTHON) == PYTHON.stem.strip()
    assert found.stop_rule(PYTHON).completion("\n    return 2 * x\n\ndef f():") == "\n    return 2 * x\n"


@pytest.mark.parametrize("task", [PYTHON, JAVA, JAVASCRIPT], ids=lambda task: task.language)
def test_mbxp_is_the_stem(task: Task) -> None:
    found = prompt_format(of(task))
    assert (found.name, found.prompt(task), found.special_tokens) == ("mbxp", task.stem, True)
    assert found.stop_rule(task).completion(task.reference or "") == task.reference


@pytest.mark.parametrize("task", [PYTHON, JAVA, JAVASCRIPT, MBPP], ids=lambda task: task.task_id)
def test_chat_asks_and_begins_the_block(task: Task) -> None:
    found = prompt_format(of(task), chat_tokenizer=Template())
    prompt = found.prompt(task)
    assert prompt.startswith("<user>") and prompt.endswith(f"</><assistant>```{task.language}\n{task.stem}")
    assert (task.stem.strip() or task.tests[1]) in prompt.partition("<assistant>")[0]
    assert not found.special_tokens
    completion = found.stop_rule(task).completion(f"{task.reference}\n```\nIt doubles.")
    assert completion.rstrip() == (task.reference or "").rstrip()
    if task.language == "python":
        ast.parse(task.program(completion))


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (of(MBPP), {"name": "mbxp"}, 'task 11 has no signature .* use `prompt_format="austin"` or'),
        (
            of(JAVA),
            {"name": "austin", "shots": 0},
            'task MBJP/3 begins with a signature; .* use `prompt_format="mbxp"`',
        ),
        (of(JAVA), {"name": "bigcode"}, 'bigcode is for Python, got a task in java; use `prompt_format="mbxp"`'),
        (of(MBPP), {"name": "basic"}, "there is no prompt format 'basic'; choose one of mbxp, austin, bigcode"),
        (of(MBPP), {}, "`shots` must be between 0 and 0, .* got 3; pass a file that also holds the tasks 1 to 10"),
        (of(MBPP, examples=(MBPP,)), {"shots": 2}, "`shots` must be between 0 and 1, the solved examples, got 2$"),
        (
            of(MBPP),
            {"name": "austin", "chat_tokenizer": Template()},
            '`chat` and `prompt_format="austin"` were both given',
        ),
        (of(MBPP), {"chat_tokenizer": object()}, "the tokenizer object has no chat template; leave out `chat`"),
    ],
)
def test_formats_that_cannot_be(tasks: TaskSet, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompt_format(tasks, **options)
