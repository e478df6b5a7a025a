"""Reading stored samples, whoever wrote them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_fastdecode.errors import CommandError

from ...files import Record, parse_records, read_bytes
from ..records import Sample, Task
from ..tasks import TaskIds
from .programs import continuation


def import_samples(path: Path, tasks: Sequence[Task], chosen: Sequence[Task] | None = None) -> list[Sample]:
    """The samples of a file; its form is told by its content.

    One object a line with `task_id` and `completion` (human-eval, mxeval, ours), or `solution`, a whole program
    (EvalPlus); or one JSON array of arrays of programs, in the order of the tasks (bigcode-evaluation-harness). Ids
    may be integers or carry another spelling of the data set's name: ``11``, ``Mbpp/11``, ``MBPP/11``. Samples without
    an `index` are numbered per task in the order of the file.

    Args:
        path: `.jsonl`, `.jsonl.gz` or `.json`.
        tasks: Those that the samples may belong to.
        chosen: Those whose samples are wanted, of `tasks`; an array of arrays is of exactly these. None for all.

    Raises:
        CommandError: The file cannot be read, or a sample is wrong; says in which line.
    """
    content = read_bytes(path)
    if generations := _generations(content):
        return _by_position(generations, tasks if chosen is None else chosen, path)
    wanted = None if chosen is None else {task.task_id for task in chosen}
    ids = TaskIds(tasks)
    seen: Counter[str] = Counter()
    samples: dict[tuple[str, int], Sample] = {}
    for record in parse_records(content, path):
        sample = _sample(record, ids, seen)
        if (sample.task_id, sample.index) in samples:
            raise record.error(f"sample {sample.index} of task {sample.task_id} occurs twice; give each its own index")
        samples[sample.task_id, sample.index] = sample
    return [sample for sample in samples.values() if wanted is None or sample.task_id in wanted]


def _sample(record: Record, ids: TaskIds, seen: Counter[str]) -> Sample:
    fields = record.fields
    task = ids.require(_task_id(record), f"{record.place}: ")
    language = fields.get("language", task.language)
    if language != task.language:
        raise record.error(f"a sample in {language} for task {task.task_id} in {task.language}; name another `task`")
    index = fields.get("index", seen[task.task_id])
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise record.error(f"field 'index' must be an integer of at least 0, got {index!r}")
    seen[task.task_id] += 1
    if "completion" in fields:
        completion = record.text("completion")
    elif "solution" in fields:
        completion = _continuation(task, record.text("solution"), record.place)
    else:
        raise record.error(
            "a sample needs the field 'completion' or 'solution', got " + (", ".join(sorted(fields)) or "no fields")
        )
    sums = (_number(record, name, float) for name in ("sum_logp", "sum_processed_logp"))
    return Sample(task.task_id, index, completion, _number(record, "tokens", int), *sums)


def _task_id(record: Record) -> object:
    if "task_id" in record.fields:
        return record.fields["task_id"]
    if "_identifier" in record.fields:  # EvalPlus: the id, then where it was read
        return record.text("_identifier").partition(" ")[0]
    raise record.error("a sample needs the field 'task_id', got " + (", ".join(sorted(record.fields)) or "no fields"))


def _number(record: Record, name: str, kind: type) -> Any:
    value = record.fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise record.error(f"field {name!r} must be a number, got {value!r}")
    return kind(value)


def _generations(content: bytes) -> list[list[str]]:
    """bigcode's arrays of programs; empty if the content is something else."""
    if not content.lstrip().startswith(b"["):
        return []
    try:
        arrays = json.loads(content)
    except (ValueError, RecursionError):
        return []  # the reader of records says where it is wrong
    return arrays if all(isinstance(one, list) for one in arrays) else []


def _by_position(generations: list[list[str]], tasks: Sequence[Task], path: Path) -> list[Sample]:
    if len(generations) != len(tasks):
        raise CommandError(
            f"{path} holds generations of {len(generations)} tasks, which only their order tells, and {len(tasks)} "
            "tasks are chosen; choose theirs by `task`, `split`, `limit` or `task_ids`"
        )
    if not any(generations):
        raise CommandError(f"{path} holds no sample")
    samples = []
    for number, (task, programs) in enumerate(zip(tasks, generations, strict=True), 1):
        for index, program in enumerate(programs):
            place = f"{path} item {number}, program {index + 1}"
            if not isinstance(program, str):
                raise CommandError(f"{place}: expected a text, got {type(program).__name__}; write programs as texts")
            samples.append(Sample(task.task_id, index, _continuation(task, program, place)))
    return samples


def _continuation(task: Task, program: str, place: str) -> str:
    try:
        return continuation(task, program)
    except ValueError as error:
        raise CommandError(f"{place}: {error}") from error
