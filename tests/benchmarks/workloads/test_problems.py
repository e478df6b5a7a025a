"""Prompts of problems: MBPP's few-shot prompt, and that of an APPS file."""

from __future__ import annotations

import json

import pytest

from benchmarks.workloads.cases import check_point, parse_points, problem_prompts
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt
from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.tasks import load_tasks


@pytest.fixture
def apps(tmp_path):
    """Six problems: the second without a solution, the third with starter code."""
    path = tmp_path / "apps.jsonl"
    lines = [
        {
            "problem_id": number,
            "question": f"Question {number}?\n",
            "solutions": json.dumps([f"print({number})\n", "other"] if number != 1 else []),
            "starter_code": "def f():" if number == 2 else "",
        }
        for number in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_tasks("apps", data=path)


def test_the_embedded_tasks_have_mbpps_prompt():
    prompts = problem_prompts(load_tasks("embedded"), 3)
    assert prompts == [few_shot_prompt(task, 3) for task in embedded_tasks()]


def test_apps_shows_its_first_solved_problems_and_asks_the_others(apps):
    prompts = problem_prompts(apps, 2)
    shown = "".join(
        f"QUESTION:\nQuestion {number}?\n\nUse Standard Input format\n\nANSWER:\nprint({number})\n\n"
        for number in (0, 3)
    )
    assert prompts == [
        f"{shown}QUESTION:\nQuestion {number}?\n\nUse Standard Input format\n\nANSWER:\n" for number in (1, 4, 5)
    ]


@pytest.mark.parametrize("shots", [5, 9])
def test_apps_with_too_few_problems_are_refused(apps, shots):
    with pytest.raises(InputError, match=f"has 5 problems without starter code, too few for {shots} solved"):
        problem_prompts(apps, shots)


def test_tasks_of_another_form_are_refused(tmp_path):
    path = tmp_path / "humaneval.jsonl"
    record = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "check", "entry_point": "f"}
    path.write_text(json.dumps(record | {"canonical_solution": "    return 1\n"}) + "\n")
    with pytest.raises(InputError, match="`shots` must be between 0 and 0, the solved examples, got 3"):
        problem_prompts(load_tasks("humaneval", data=path), 3)


def test_points_and_counts():
    assert parse_points("8x4, 2x16,8x4") == [(8, 4), (2, 16)]
    check_point(2, 2, 2)


@pytest.mark.parametrize("text", ["", "8", "8x", "x8", "0x2", "2x-1", "2x2,", "²x2", "2x2x2"])
def test_points_of_another_form_are_refused(text):
    with pytest.raises(InputError, match="`points` are PROBLEMSxSAMPLES with commas between, such as 4x8,8x16, got"):
        parse_points(text)
