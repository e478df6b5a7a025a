"""Samples and verdicts in files: our own, and those of other tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.formats import FORMS, export_samples, import_samples
from hf_fastdecode.evals.records import Sample, Task, Verdict, read_samples, read_verdicts
from hf_fastdecode.files import JsonlWriter, read_jsonl

from .example_tasks import JAVA, JAVASCRIPT, MBPP, PYTHON

RECORDS = [Sample("MBPP/1", 0, 'x = "\n\u2028é\ud83d"', 3, -1.25), Sample("<b>", 1, "", None, None)]


def append(path, *records):
    with JsonlWriter(path) as writer:
        writer.write(records)


def test_records_come_back(tmp_path):
    path = tmp_path / "new" / "samples.jsonl"
    append(path, RECORDS[0])
    append(path, RECORDS[1])
    assert read_samples(path) == RECORDS
    assert path.read_bytes().count(b"\n") == 2
    verdicts = [Verdict("1", 0, "pass"), Verdict("1", 1, "timeout", "10 s")]
    append(tmp_path / "verdicts.jsonl", *verdicts)
    assert read_verdicts(tmp_path / "verdicts.jsonl") == verdicts


def test_a_line_cut_anywhere_is_ignored_and_then_replaced(tmp_path):
    path = tmp_path / "samples.jsonl"
    append(path, RECORDS[0])
    first = path.read_bytes()
    append(path, RECORDS[1])
    whole = path.read_bytes()
    for cut in range(len(first), len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = RECORDS if cut >= len(whole) - 1 else RECORDS[:1]
        assert read_samples(path) == kept
        append(path, *RECORDS[len(kept) :])
        assert path.read_bytes() == whole


def test_empty_lines_and_further_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"task_id": "1", "index": 0, "completion": "x", "stop": "eos"})
    path.write_text(f"\n{line}\n  \n")
    assert read_samples(path) == [Sample("1", 0, "x")]
    assert [found["stop"] for found in read_jsonl(path)] == ["eos"]


@pytest.mark.parametrize(
    ("text", "read", "message"),
    [
        (
            "{}\nnot json\n{}\n",
            read_samples,
            "task_id of a sample must be a text, got only 'none'; mend or delete that line",
        ),
        ('{"index": 1, "completion": ""}\n', read_samples, "task_id of a sample must be a text, got only 'compl"),
        ('{"task_id": "1", "index": 1}\n', read_verdicts, "status of a verdict must be a text, got only"),
        ('{"task_id": "1", "index": 1, "status": "ok"}\n', read_verdicts, "got 'ok' for sample 1 of task '1'"),
        ('{"task_id": 1, "index": 0, "completion": ""}\n', read_samples, "task_id of a .* a text, got 1"),
        ('{"task_id": "1", "index": "0", "completion": ""}\n', read_samples, "index of a .* a whole number, got '0'"),
        ('{"task_id": "1", "index": 0, "completion": 5}\n', read_samples, "completion of a .* a text"),
        (
            '{"task_id": "1", "index": 0, "completion": "", "tokens": 1, "sum_logp": "-1"}\n',
            read_samples,
            "sum_logp of a sample must be a finite number, got '-1'",
        ),
        (
            '{"task_id": "1", "index": 0, "completion": "", "tokens": 1, "sum_logp": NaN}\n',
            read_samples,
            "sum_logp of a sample must be a finite number, got nan",
        ),
        ("[1]\n", read_samples, r"line 1: expected a JSON object, got '\[1\]'; mend or delete that line"),
        ('{"task_id": "1"\n\n', read_samples, "line 1: expected a JSON object"),
        (
            '{"task_id": "1", "index": 0, "completion": ""}\n{"completion": "%s' % ("x" * 900) + "\n",
            read_samples,
            r"line 2: expected a JSON object, got '\{\"completion\": \"x+ \.\.\.; mend or delete that line$",
        ),
        ('\n{"task_id": "1", "index": 0, "completion": 5}\n', read_samples, "line 2: completion .*; mend or"),
    ],
)
def test_errors_name_file_line_and_remedy(tmp_path, text, read, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


TASKS = (MBPP, replace(MBPP, task_id="12"))
SAMPLES = [Sample("11", 0, "def f(): pass\n"), Sample("12", 0, "x"), Sample("11", 1, "é\n"), Sample("12", 1, "")]


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_as_written(form: Any, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    export_samples(path, SAMPLES, TASKS, form)
    assert sorted(import_samples(path, TASKS), key=repr) == sorted(SAMPLES, key=repr)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", [PYTHON, JAVA, JAVASCRIPT], ids=lambda task: task.language)
def test_stems_are_put_before_and_taken_away(form: Any, task: Task, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples = [Sample(task.task_id, 0, task.reference or ""), Sample(task.task_id, 1, "}")]
    export_samples(path, samples, [task], form)
    assert import_samples(path, [task]) == samples


def test_own_form_keeps_log_probabilities_and_indices(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    samples = [Sample("11", 7, "x", 3, -1.5), Sample("11", 2, "y", 0, 0.0)]
    export_samples(path, samples, TASKS)
    assert import_samples(path, TASKS) == samples


def test_the_forms_of_the_tools(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def written(form: Any, task: Task) -> Any:
        export_samples(path, [Sample(task.task_id, 0, task.reference or "")], [task], form)
        return json.loads(path.read_text())

    assert written("human-eval", PYTHON) == {"task_id": "MBPP/3", "completion": PYTHON.reference}
    assert written("mxeval", JAVA) == {"task_id": "MBJP/3", "completion": JAVA.reference, "language": "java"}
    assert written("evalplus", MBPP) == {"task_id": "Mbpp/11", "solution": MBPP.reference}
    assert written("evalplus", PYTHON) == {"task_id": "MBPP/3", "solution": PYTHON.stem + (PYTHON.reference or "")}
    assert written("bigcode", PYTHON) == [[PYTHON.stem + (PYTHON.reference or "")]]


def test_spellings_of_ids_and_numbering(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"task_id": 11, "completion": "a"},
        {"task_id": "Mbpp/12", "completion": "b"},
        {"task_id": "MBPP/11", "solution": "c", "_identifier": "Mbpp/11 (line 3 in a.jsonl)"},
        {"_identifier": "Mbpp/12 (line 4 in a.jsonl)", "solution": "d"},
    )
    assert import_samples(path, TASKS) == [
        Sample("11", 0, "a"),
        Sample("12", 0, "b"),
        Sample("11", 1, "c"),
        Sample("12", 1, "d"),
    ]


def test_bigcode_tells_tasks_by_position(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [["a", "b"]])
    assert import_samples(path, TASKS, TASKS[:1]) == [Sample("11", 0, "a"), Sample("11", 1, "b")]
    assert import_samples(path, TASKS, TASKS[1:]) == [Sample("12", 0, "a"), Sample("12", 1, "b")]
    task = replace(PYTHON, stem=f"\n\n{PYTHON.stem}")  # the prompt there is stripped
    stripped = write(tmp_path / "b.json", [[PYTHON.stem.strip() + "\n    return 2"]])
    assert import_samples(stripped, [task]) == [Sample("MBPP/3", 0, "\n    return 2")]


def run(program: str) -> Any:
    scope: dict[str, Any] = {}
    exec(program, scope)
    return scope["double"]


@pytest.mark.parametrize("stem", [PYTHON.stem, "def double(x):\n"], ids=["docstring", "bare"])
def test_a_whole_python_program_replaces_the_stems_function(stem: str, tmp_path: Path) -> None:
    task = replace(PYTHON, stem=stem)
    path = write(
        tmp_path / "a", {"task_id": "MBPP/3", "solution": "import math\n\ndef double(y):\n    return 2 * y\n"}
    )
    (sample,) = import_samples(path, [task])
    assert run(task.program(sample.completion))(4) == 8


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"task_id": 13, "completion": ""}, "line 2: there is no task 13; the 2 tasks have ids from 11 to 12"),
        ({"task_id": "HumanEval/11", "completion": ""}, "line 2: there is no task HumanEval/11"),
        ({"task_id": 11}, "line 2: a sample needs the field 'completion' or 'solution', got task_id"),
        ({"completion": "a"}, "line 2: a sample needs the field 'task_id', got completion"),
        ({"task_id": 11, "completion": 3}, "line 2: field 'completion' must be a text, got 3"),
        ({"task_id": 11, "completion": "", "index": 0}, "line 2: sample 0 of task 11 occurs twice"),
        (
            {"task_id": 11, "completion": "", "index": -1},
            "line 2: field 'index' must be an integer of at least 0, got -1",
        ),
        ({"task_id": 11, "completion": "", "index": True}, "line 2: field 'index' must be an integer"),
        ({"task_id": 11, "completion": "", "sum_logp": "a"}, "line 2: field 'sum_logp' must be a number, got 'a'"),
        ({"task_id": 11, "completion": "", "language": "java"}, "line 2: a sample in java for task 11 in python"),
        ([], "line 2: expected a JSON object, got list"),
    ],
)
def test_wrong_samples(record: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"task_id": 11, "completion": ""}, record)
    with pytest.raises(InputError, match=message):
        import_samples(path, TASKS)


def test_samples_of_tasks_that_are_not_chosen_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"task_id": 11, "completion": "a"}, {"task_id": 12, "completion": "b"})
    assert import_samples(path, TASKS, TASKS[1:]) == [Sample("12", 0, "b")]
    with pytest.raises(InputError, match="there is no task 12"):
        import_samples(path, TASKS[:1], TASKS[:1])


def test_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"task_id": 11, "completion": "a"}\n{"task_id"\n')
    with pytest.raises(InputError, match=r"line 2: expected JSON, got '{.*; mend it"):
        import_samples(path, TASKS)
    path.write_text('[["a"], ["b"')
    with pytest.raises(InputError, match=r"a\.jsonl: expected JSON, got .*; mend it"):
        import_samples(path, TASKS)
    for arrays in ([["a"]], [["a"], ["b"], ["c"]]):
        with pytest.raises(InputError, match=f"generations of {len(arrays)} tasks, .* 2 tasks are chosen; choose"):
            import_samples(write(path, arrays), TASKS)
    with pytest.raises(InputError, match="holds no sample"):
        import_samples(write(path, [[], []]), TASKS)
    with pytest.raises(InputError, match="item 1, program 2: expected a text, got int"):
        import_samples(write(path, [["a", 3], []]), TASKS)
    with pytest.raises(InputError, match="line 1: a Java program must begin with the task's stem"):
        import_samples(write(path, {"task_id": 3, "solution": "class A { }"}), [JAVA])


def test_what_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(InputError, match="there is no task 12 for its samples"):
        export_samples(path, SAMPLES, TASKS[:1])
    with pytest.raises(InputError, match="task 12 has no sample, and bigcode's form tells tasks by position"):
        export_samples(path, SAMPLES[:1], TASKS, "bigcode")
    assert not path.exists()
