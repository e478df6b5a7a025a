"""Tasks by name, from the package, a file or the hub, and by id."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from hf_fastdecode.assets import embedded_tasks, fewshot_tasks
from hf_fastdecode.errors import InputError

from ...files import Record, parse_records, read_bytes
from ..records import Task
from .published import difference, hub_records
from .readers import apps_task, mbpp_task, mbxp_task, prompt_task, recognised

_READERS: Final[Mapping[str, Callable[[Record], Task]]] = {
    "embedded": mbpp_task,
    "mbpp": mbpp_task,
    "mbpp-sanitized": mbpp_task,
    "mbxp-python": partial(mbxp_task, language="python"),
    "mbxp-java": partial(mbxp_task, language="java"),
    "mbxp-javascript": partial(mbxp_task, language="javascript"),
    "humaneval": partial(mbxp_task, language="python"),
    "apps": apps_task,
    "prompts": prompt_task,
}
TASK_NAMES: Final = tuple(_READERS)

# MBPP's splits by task id (its README); MBXP keeps the ids.
SPLITS: Final = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}

_PROMPT_ORDER: Final = ("2", "3", "4")  # the three of Austin et al. 2021
_FILES: Final = (".jsonl", ".jsonl.gz", ".json")
_MBPP_NAMES: Final = frozenset({"mbpp", "mbpp-sanitized"})


def load_tasks(
    name: str = "embedded",
    *,
    data: Path | None = None,
    split: str | None = None,
    limit: int | None = None,
    task_ids: Sequence[str | int] | None = None,
) -> TaskSet:
    """The tasks of a source.

    Args:
        name: One of `TASK_NAMES`, or a file of tasks of one's own, in the form of any of them. ``embedded`` comes with
            the package; ``apps`` and ``prompts``, which have no tests, need a file.
        data: A `.jsonl`, `.jsonl.gz` or `.json` file in the name's published form, instead of the hub.
        split: One of `SPLITS`, or ``all``. None for the published choice: ``test`` for MBPP, all tasks for the others
            (the papers of MBXP and HumanEval use all).
        limit: Only this many of the first tasks, at least 1.
        task_ids: Only these, in this order, of any split.
    """
    own = ""
    if name.endswith(_FILES):
        if data is not None:
            raise InputError(f"tasks of the file {name} and `data={data}` were both given; leave one out")
        data, own = Path(name), Path(name).name.removesuffix(".gz").rpartition(".")[0]
        name, split = _form_of(data), split or "all"
    if name not in _READERS:
        names = ", ".join(one for one in TASK_NAMES if one != "apps")  # which has no tests that can be run
        raise InputError(f"there are no tasks {name!r}; choose one of {names}, or name a .jsonl file")
    if limit is not None and limit < 1:
        raise InputError(f"`limit` must be at least 1, got {limit}; leave it out for all tasks")
    if split not in (None, "all", *SPLITS):
        raise InputError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)} or all")
    records, origin, note = _records(name, data)
    tasks = _parsed(name, records)
    examples = _examples(name, tasks)
    if name == "embedded" or (own and name in _MBPP_NAMES):
        examples = tuple(map(_READERS[name], _packaged(fewshot_tasks())))
    if task_ids is not None:
        find = TaskIds(tasks)
        chosen = list(dict.fromkeys(find.require(one) for one in task_ids))
        if not chosen:
            raise InputError("`task_ids` names no task; leave it out for all tasks")
    else:
        chosen = _of_split(tasks, split or ("test" if name in _MBPP_NAMES else "all"), origin)
    return TaskSet(own or name, origin, tuple(chosen[:limit]), examples, "" if own else note)


def _form_of(data: Path) -> str:
    """The name whose form the records of a file have."""
    record = parse_records(read_bytes(data), data)[0]
    found = recognised(record) or ("humaneval" if {"entry_point", "test"} <= record.fields.keys() else "")
    if found not in _READERS or found == "apps":
        raise record.error(
            "these are no tasks that run here; a task has task_id, text, code and test_list (MBPP), or task_id, "
            "prompt, entry_point, test and canonical_solution (HumanEval; with language, MBXP), or prompt alone"
        )
    return found


def _records(name: str, data: Path | None) -> tuple[list[Record], str, str]:
    """Records, where they were read, and a line where they are not the published ones."""
    if data is not None:
        content = read_bytes(data)
        records = parse_records(content, data)
        _check_form(name, records[0])
        return records, str(data), difference(name, data, content, len(records))
    if name == "embedded":
        return _packaged(embedded_tasks()), "the package", ""
    if name in ("apps", "prompts"):
        raise InputError(f"the tasks {name} need a file in their form; pass `data=FILE`")
    return hub_records(name)


def _packaged(fields: Iterable[dict[str, object]]) -> list[Record]:
    return [Record(one, f"embedded task {one['task_id']}") for one in fields]


def _check_form(name: str, record: Record) -> None:
    found = recognised(record)
    expected = "mbpp" if name == "embedded" or name in _MBPP_NAMES else name
    if found and found != expected:
        remedy = f'pass `task="{found}"`' if found in TASK_NAMES else f"choose one of {', '.join(TASK_NAMES)}"
        raise record.error(f"this is a record of {found}, not of {name}; {remedy}, or name another file")


def _parsed(name: str, records: Sequence[Record]) -> list[Task]:
    tasks: dict[str, Task] = {}
    for number, record in enumerate(records, 1):
        if name == "prompts":
            record.fields.setdefault("task_id", number)
        task = _READERS[name](record)
        if task.task_id in tasks:
            raise record.error(f"task id {task.task_id} occurs twice; give each task an id of its own")
        tasks[task.task_id] = task
    return list(tasks.values())


def _examples(name: str, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """MBPP's tasks for few-shot prompts, the paper's three first."""
    if name not in _MBPP_NAMES:
        return ()
    found = [task for task in _within(tasks, *SPLITS["prompt"]) if task.reference]
    return tuple(sorted(found, key=lambda task: task.task_id not in _PROMPT_ORDER))


def _of_split(tasks: Sequence[Task], split: str, origin: str) -> list[Task]:
    if split == "all":
        return list(tasks)
    found = _within(tasks, *SPLITS[split])
    if not found:
        first, last = SPLITS[split]
        raise InputError(
            f"{origin} has no task of the split {split} (ids {first} to {last}), its ids run from {tasks[0].task_id} "
            f'to {tasks[-1].task_id}; pass `split="all"`'
        )
    return found


def _within(tasks: Sequence[Task], first: int, last: int) -> list[Task]:
    numbers = ((task, task.task_id.rpartition("/")[2]) for task in tasks)
    return [task for task, number in numbers if number.isdecimal() and first <= int(number) <= last]


_ID: Final = re.compile(r"(?:([A-Za-z]\w*?)[/_])?(\d+)")
_MBPP: Final = "mbpp"  # tools write MBPP's ids as 11, Mbpp/11 and MBPP/11


@dataclass(frozen=True)
class TaskSet:
    """Tasks of one source."""

    name: str  # of the source, such as mbpp
    origin: str  # where the tasks were read
    tasks: tuple[Task, ...]  # the chosen ones, in the source's order; at least one
    examples: tuple[Task, ...] = ()  # solved, for few-shot prompts; none of them is in the default split
    note: str = ""  # a line for people where the data is not the published one

    @cached_property
    def digest(self) -> str:
        """A hash of the tasks and examples: equal for the same tasks wherever they were read."""
        content = [[asdict(task) for task in tasks] for tasks in (self.tasks, self.examples)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class TaskIds:
    """Finds tasks by the ids that people and other tools give them: ``11``, ``"11"``, ``"Mbpp/11"``, ``"MBJP/11"``."""

    def __init__(self, tasks: Iterable[Task]):
        self._tasks = {_key(task.task_id): task for task in tasks}
        self._prefixes = {prefix for prefix, _ in self._tasks}

    def find(self, given: object) -> Task | None:
        """The task with an integer or a text, with or without the data set's name, for its id."""
        if isinstance(given, bool) or not isinstance(given, (int, str)):
            return None
        prefix, number = _key(str(given).strip())
        prefixes = {"": self._prefixes, _MBPP: {_MBPP, ""}}.get(prefix, {prefix})
        found = [self._tasks[one, number] for one in prefixes if (one, number) in self._tasks]
        return found[0] if len(found) == 1 else None

    def require(self, given: object, place: str = "") -> Task:
        """The task with an id; an InputError if there is none."""
        if task := self.find(given):
            return task
        known = [task.task_id for task in self._tasks.values()]
        raise InputError(
            f"{place}there is no task {given}; the {len(known)} tasks have ids from {known[0]} to {known[-1]}"
        )


def _key(task_id: str) -> tuple[str, str]:
    """Data set's name in lower case, and number; an id of another form is its own name."""
    match = _ID.fullmatch(task_id)
    return (task_id, "") if match is None else ((match[1] or "").lower(), str(int(match[2])))
