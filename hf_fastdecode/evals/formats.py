"""Import and export of samples for human-eval, EvalPlus, bigcode-evaluation-harness and mxeval."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, get_args

from ..errors import InputError
from ..files import Record, json_lines, parse_records, read_bytes, shown, write_text
from .prompts import continued
from .records import Sample, Task
from .tasks import TaskIds


def import_samples(path: Path, tasks: Sequence[Task], chosen: Sequence[Task] | None = None) -> list[Sample]:
    """Read the samples of a file, whose form is recognised by its content; an InputError names the wrong line.

    One object a line with `task_id` and `completion` (human-eval, mxeval, ours), or `solution`, a whole program
    (EvalPlus); or one JSON array of arrays of programs, in the order of the tasks (bigcode-evaluation-harness). Ids
    may be integers or carry another spelling of the data set's name: ``11``, ``Mbpp/11``, ``MBPP/11``. Samples without
    an `index` are numbered per task in the order of the file. Of samples of the tasks, those of the chosen ones are
    returned; an array of arrays belongs to exactly these.
    """
    content = read_bytes(path)
    if generations := _generations(content):
        return _by_position(generations, tasks if chosen is None else chosen, path)
    wanted = None if chosen is None else {task.task_id for task in chosen}
    ids = TaskIds(tasks)
    counts: Counter[str] = Counter()
    samples: dict[tuple[str, int], Sample] = {}
    for record in parse_records(content, path):
        sample = _sample(record, ids, counts)
        if (sample.task_id, sample.index) in samples:
            raise record.error(f"sample {sample.index} of task {sample.task_id} occurs twice; give each another index")
        samples[sample.task_id, sample.index] = sample
    return [sample for sample in samples.values() if wanted is None or sample.task_id in wanted]


def _sample(record: Record, ids: TaskIds, counts: Counter[str]) -> Sample:
    fields = record.fields
    task = ids.require(_task_id(record), f"{record.place}: ")
    language = fields.get("language", task.language)
    if language != task.language:
        raise record.error(f"a sample in {language} for task {task.task_id} in {task.language}; name another `task`")
    index = fields.get("index", counts[task.task_id])
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise record.error(f"field 'index' must be an integer of at least 0, got {shown(index)}; mend that line")
    counts[task.task_id] += 1
    if "completion" in fields:
        completion = record.text("completion")
    elif "solution" in fields:
        completion = _continuation(task, record.text("solution"), record.place)
    else:
        raise record.error(
            "a sample needs the field 'completion' or 'solution', got "
            f"{', '.join(sorted(fields)) or 'no fields'}; mend that line"
        )
    sums = (_number(record, name, float) for name in ("sum_logp", "sum_processed_logp"))
    return Sample(task.task_id, index, completion, _number(record, "tokens", int), *sums)


def _task_id(record: Record) -> object:
    if "task_id" in record.fields:
        return record.fields["task_id"]
    if "_identifier" in record.fields:  # EvalPlus: the id, then where it was read
        return record.text("_identifier").partition(" ")[0]
    got = ", ".join(sorted(record.fields)) or "no fields"
    raise record.error(f"a sample needs the field 'task_id', got {got}; mend that line")


def _number(record: Record, name: str, kind: type) -> Any:
    value = record.fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise record.error(f"field {name!r} must be a number, got {shown(value)}; mend that line")
    return kind(value)


def _generations(content: bytes) -> list[list[str]]:
    """Read bigcode's arrays of programs; empty if the content is something else."""
    if not content.lstrip().startswith(b"["):
        return []
    try:
        arrays = json.loads(content)
    except (ValueError, RecursionError):
        return []  # the reader of records says where it is wrong
    return arrays if all(isinstance(one, list) for one in arrays) else []


def _by_position(generations: list[list[str]], tasks: Sequence[Task], path: Path) -> list[Sample]:
    if len(generations) != len(tasks):
        raise InputError(
            f"{path} holds generations of {len(generations)} tasks, which only their order tells, and {len(tasks)} "
            "tasks are chosen; choose theirs by `task`, `split`, `limit` or `task_ids`"
        )
    if not any(generations):
        raise InputError(f"{path} holds no sample")
    samples = []
    for number, (task, programs) in enumerate(zip(tasks, generations, strict=True), 1):
        for index, program in enumerate(programs):
            source = f"{path} item {number}, program {index + 1}"
            if not isinstance(program, str):
                raise InputError(f"{source}: expected a text, got {type(program).__name__}; write programs as texts")
            samples.append(Sample(task.task_id, index, _continuation(task, program, source)))
    return samples


def _continuation(task: Task, program: str, source: str) -> str:
    try:
        return continued(task, program)
    except InputError as error:
        raise InputError(f"{source}: {error}; give what follows the task's stem as 'completion'") from error


Form = Literal["own", "human-eval", "mxeval", "evalplus", "bigcode"]
FORMS: Final[tuple[str, ...]] = get_args(Form)


def export_samples(path: Path, samples: Sequence[Sample], tasks: Sequence[Task], form: Form = "own") -> None:
    """Write samples in the form that a tool reads; an existing file is replaced once all is written.

    ``own`` has log-probabilities, ``human-eval`` and ``mxeval`` completions, ``evalplus`` and ``bigcode`` programs. An
    InputError where a sample has no task, or in ``bigcode``'s form, which identifies tasks by order, a task no sample.
    """
    by_id = {task.task_id: task for task in tasks}
    if strange := [sample.task_id for sample in samples if sample.task_id not in by_id]:
        raise InputError(f"there is no task {strange[0]} for its samples; name the task set that they were made from")
    if form != "bigcode":
        lines = (_fields(sample, by_id[sample.task_id], form) for sample in samples)
        write_text(path, json_lines(lines, ascii_only=True))
        return
    programs: dict[str, list[str]] = {task.task_id: [] for task in tasks}
    for sample in sorted(samples, key=lambda one: one.index):
        programs[sample.task_id].append(by_id[sample.task_id].program(sample.completion))
    if empty := [task_id for task_id, found in programs.items() if not found]:
        raise InputError(
            f"task {empty[0]} has no sample, and bigcode's form tells tasks by position; pass fewer tasks"
        )
    write_text(path, json.dumps(list(programs.values())))


def _fields(sample: Sample, task: Task, form: Form) -> dict[str, Any]:
    if form == "own":
        return asdict(sample)
    if form == "evalplus":
        task_id = f"Mbpp/{task.task_id}" if task.task_id.isdecimal() else task.task_id
        return {"task_id": task_id, "solution": task.program(sample.completion)}
    language = {"language": task.language} if form == "mxeval" else {}
    return {"task_id": task.task_id, "completion": sample.completion, **language}
