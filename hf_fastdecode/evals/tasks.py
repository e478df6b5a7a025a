"""Programming tasks by name: from the package, files in published forms, and the hub; and by id."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from ..assets import embedded_tasks, fewshot_tasks
from ..errors import InputError, one_line
from ..files import Record, parse_records, read_bytes
from .records import Language, Task

# Fields of tests. Two are not read: harder ones of MBPP, with which nobody scores (pass@k is that of `test_list`), and
# those of HumanEval-X that its prompt shows; `test` has them all.
_TESTS_OF_MBPP: Final = ("test_list", "test_imports", "test_setup_code", "test", "challenge_test_list")
_TESTS_OF_MBXP: Final = ("test", "example_test")
_TASK_FIELDS: Final = frozenset({"canonical_solution", "code", "entry_point", "test", "tests"})
"""Fields of programming tasks: one that lacks some of them is not taken for a prompt alone."""
_HOLDS_TESTS: Final = re.compile(r"(?<!con)(?<!la)(?<!grea)test|assert|_inputs?$|^inputs?_|^inputs?$")
"""Contests and the latest of something are no tests."""


def mbpp_task(record: Record) -> Task:
    """Read a task of MBPP: full with `text` and `test_setup_code`, or sanitized with `prompt` and `test_imports`.

    One of MBPP+ (Liu et al. 2023) has further tests as a program, in `test`, which runs after the others.
    """
    _refuse_other_tests(record, _TESTS_OF_MBPP)
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
    """Read a task of MBXP or HumanEval: a signature with a docstring, and a program that tests the entry point.

    HumanEval's file does not name the language; `canonical_solution` is null where no solution is known.
    """
    _refuse_other_tests(record, _TESTS_OF_MBXP)
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
    if of_tasks := sorted(_TASK_FIELDS & record.fields.keys()):
        raise record.error(
            f"fields of a programming task: {', '.join(of_tasks)}; name a file of such tasks alone, the first "
            "record too, to run their tests, or remove them"
        )
    if not (text := record.text("prompt")):
        raise record.error("field 'prompt' is empty; a completion needs a text to follow")
    return Task(task_id=_number(record, "task_id"), language="python", description="", stem=text, tests=())


def _refuse_other_tests(record: Record, known: tuple[str, ...]) -> None:
    """Refuse a record with tests that are not read, such as EvalPlus' inputs: programs that fail them would pass."""
    for name, value in record.fields.items():
        if name not in known and value and _HOLDS_TESTS.search(name):
            raise record.error(
                f"field {name!r} holds tests that do not run here, and without them wrong programs pass; score with "
                f"the tool that wrote them (eval export), or remove the field to score by {', '.join(known)} alone"
            )


def _recognised(record: Record) -> str:
    fields = record.fields
    if "test_list" in fields:
        return "mbpp"
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


_MXEVAL: Final = "https://raw.githubusercontent.com/amazon-science/mxeval/e09974f990eeaf0c0e8f2b5eaff4be66effb2c86"
_OPENAI: Final = "https://raw.githubusercontent.com/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
_GOOGLE: Final = "https://raw.githubusercontent.com/google-research/google-research/master/mbpp"


@dataclass(frozen=True)
class PublishedFile:
    task_name: str  # the source that reads it
    url: str
    problems: int
    sha256: str  # of the decompressed content
    hub: tuple[str, str] | None = None  # repository and configuration; `datasets` runs no loading scripts

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


# The first file of a task name is the one that is loaded where none is given.
FILES: Final = (
    PublishedFile(
        *("mbpp", f"{_GOOGLE}/mbpp.jsonl", 974),
        "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f",
        hub=("google-research-datasets/mbpp", "full"),
    ),
    PublishedFile(
        *("mbpp-sanitized", f"{_GOOGLE}/sanitized-mbpp.json", 427),
        "ca95deaa9a01ef0a6f439f88bcf0dd3db3563d22f22aad6cae04ebb9a8d8c8e9",
        hub=("google-research-datasets/mbpp", "sanitized"),
    ),
    PublishedFile(
        *("mbxp-python", f"{_MXEVAL}/data/mbxp/mbpp_release_v1.jsonl", 974),
        "2ea7949f20ed5ecaacf4c9970d29430ec3f13772f4dd379665b1234f14b0ec3e",
    ),
    PublishedFile(
        *("mbxp-java", f"{_MXEVAL}/data/mbxp/mbjp_release_v1.2.jsonl", 966),
        "139a0fcdff2f4c6d456c546c82f43a1f389dfe3125f5f2c3f6a12f478483dffd",
    ),
    PublishedFile(
        *("mbxp-javascript", f"{_MXEVAL}/data/mbxp/mbjsp_release_v1.2.jsonl", 966),
        "9e443a1911bcedd8b5193f43d3217666fbf669cd00d54265941a8eb17e396f5a",
    ),
    PublishedFile(
        *("humaneval", f"{_OPENAI}/data/HumanEval.jsonl.gz", 164),
        "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2",
        hub=("openai/openai_humaneval", "openai_humaneval"),
    ),
    PublishedFile(
        *("humaneval", f"{_MXEVAL}/data/multilingual_humaneval/HumanEval.jsonl", 164),
        "ee8ed1495a18a21d3c285c031d38940e3208f1616dc386a32a8d28e968fe94d8",
    ),
)


def _difference(task_name: str, path: Path, content: bytes, problems: int) -> str:
    """A note where a file's decompressed content is not a published one of its task name; else empty."""
    found = hashlib.sha256(content).hexdigest()
    names = _MBPP_NAMES if task_name in _MBPP_NAMES else {task_name}  # the reader of one form reads both
    pinned = [file for file in FILES if file.task_name in names]
    if not pinned or found in (file.sha256 for file in pinned):
        return ""
    known = " or ".join(f"{file.name}: {file.problems} problems, sha256 {file.sha256[:12]}" for file in pinned)
    return f"{path} is not the published data: {problems} problems, sha256 {found[:12]} (published: {known})"


def _hub_records(task_name: str) -> tuple[list[Record], str, str]:
    """Load a published data set in order of its ids, with its origin, and a note on an unexpected number."""
    file = next(file for file in FILES if file.task_name == task_name)
    origin = f"{file.hub[0]} ({file.hub[1]})" if file.hub else file.url
    try:
        rows = _rows(file)
    except Exception as error:  # of the network, the hub's clients and the file formats: they share no base class
        raise InputError(
            f"cannot load {origin}: {one_line(error, 160)}; download {file.url} and pass `data={file.name}`"
        ) from error
    records = [Record(row, f"{origin} row {number}") for number, row in enumerate(rows, 1)]
    note = "" if len(rows) == file.problems else f"{origin} holds {len(rows)} problems, published were {file.problems}"
    return records, origin, note


def _rows(file: PublishedFile) -> list[dict[str, Any]]:
    from datasets import load_dataset  # it takes seconds

    if file.hub is None:
        return list(load_dataset("json", data_files={"test": file.url}, split="test"))
    splits = load_dataset(*file.hub)
    rows = [row for rows in splits.values() for row in rows]
    return sorted(rows, key=lambda row: int(str(row["task_id"]).rpartition("/")[2]))


_READERS: Final[Mapping[str, Callable[[Record], Task]]] = {
    "embedded": mbpp_task,
    "mbpp": mbpp_task,
    "mbpp-sanitized": mbpp_task,
    "mbxp-python": partial(mbxp_task, language="python"),
    "mbxp-java": partial(mbxp_task, language="java"),
    "mbxp-javascript": partial(mbxp_task, language="javascript"),
    "humaneval": partial(mbxp_task, language="python"),
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
    """Load the tasks of a source: one of `TASK_NAMES`, or a file of your tasks in the form of any of them.

    Args:
        data: A `.jsonl`, `.jsonl.gz` or `.json` file in the name's published form, instead of the hub or the package;
            ``prompts`` need one.
        split: One of `SPLITS`, or ``all``. None for the published choice: ``test`` for MBPP, all tasks for the others
            (the papers of MBXP and HumanEval use all).
        limit: Only this many of the first tasks, at least 1.
        task_ids: Only these, in this order, of any split.
    """
    stem = ""
    if name.endswith(_FILES):
        if data is not None:
            raise InputError(f"tasks of the file {name} and `data={data}` were both given; leave one out")
        data, stem = Path(name), Path(name).name.removesuffix(".gz").rpartition(".")[0]
        name, split = _form_of(data), split or "all"
    if name not in _READERS:
        names = ", ".join(TASK_NAMES)
        raise InputError(f"there are no tasks {name!r}; choose one of {names}, or name a .jsonl file")
    if limit is not None and limit < 1:
        raise InputError(f"`limit` must be at least 1, got {limit}; leave it out for all tasks")
    if split not in (None, "all", *SPLITS):
        raise InputError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)} or all")
    records, origin, note = _records(name, data)
    tasks = _parsed(name, records)
    if name == "embedded" or (stem and name in _MBPP_NAMES):
        examples = list(map(_READERS[name], _packaged(fewshot_tasks())))
    else:  # MBPP's, the paper's three first
        solved = [task for task in _within(tasks, "prompt") if task.reference and name in _MBPP_NAMES]
        examples = sorted(solved, key=lambda task: task.task_id not in _PROMPT_ORDER)
    if task_ids is not None:
        find = TaskIds(tasks)
        chosen = list(dict.fromkeys(find.require(one) for one in task_ids))
        if not chosen:
            raise InputError("`task_ids` names no task; leave it out for all tasks")
    else:
        chosen = _of_split(tasks, split or ("test" if name in _MBPP_NAMES else "all"), origin)
    return TaskSet(stem or name, origin, tuple(chosen[:limit]), tuple(examples), "" if stem else note)


def _form_of(data: Path) -> str:
    record = parse_records(read_bytes(data), data)[0]
    found = _recognised(record) or ("humaneval" if {"entry_point", "test"} <= record.fields.keys() else "")
    if found not in _READERS:
        raise record.error(
            "these are no tasks that run here; a task has task_id, text, code and test_list (MBPP), or task_id, "
            "prompt, entry_point, test and canonical_solution (HumanEval; with language, MBXP), or prompt alone"
        )
    return found


def _records(name: str, data: Path | None) -> tuple[list[Record], str, str]:
    """Read records; returns their origin too, and a line where they are not the published ones."""
    if data is not None:
        content = read_bytes(data)
        records = parse_records(content, data)
        _check_form(name, records[0])
        return records, str(data), _difference(name, data, content, len(records))
    if name == "embedded":
        return _packaged(embedded_tasks()), "the package", ""
    if name == "prompts":
        raise InputError("the tasks prompts need a file in their form; pass `data=FILE`")
    return _hub_records(name)


def _packaged(fields: Iterable[dict[str, object]]) -> list[Record]:
    return [Record(one, f"embedded task {one['task_id']}") for one in fields]


def _check_form(name: str, record: Record) -> None:
    found = _recognised(record)
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
        _require_characters(record, task)
        if task.task_id in tasks:
            raise record.error(f"task id {task.task_id} occurs twice; give each task another id")
        tasks[task.task_id] = task
    return list(tasks.values())


def _require_characters(record: Record, task: Task) -> None:
    """Refuse halves of surrogate pairs, which JSON may hold, and no tokenizer or file takes."""
    try:
        "".join((task.task_id, task.description, task.stem, task.setup, task.reference or "", *task.tests)).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise record.error(f"{half!a} is no character but half of a surrogate pair; mend that record") from error


def _of_split(tasks: Sequence[Task], split: str, origin: str) -> list[Task]:
    if split == "all":
        return list(tasks)
    if not (found := _within(tasks, split)):
        first, last = SPLITS[split]
        raise InputError(
            f"{origin} has no task of the split {split} (ids {first} to {last}), its ids run from {tasks[0].task_id} "
            f'to {tasks[-1].task_id}; pass `split="all"`'
        )
    return found


def _within(tasks: Sequence[Task], split: str) -> list[Task]:
    first, last = SPLITS[split]
    numbered = ((task, task.task_id.rpartition("/")[2]) for task in tasks)
    return [task for task, number in numbered if number.isdecimal() and first <= int(number) <= last]


_ID: Final = re.compile(r"(?:([A-Za-z]\w*?)[/_])?(\d+)")
_MBPP: Final = "mbpp"  # tools write MBPP's ids as 11, Mbpp/11 and MBPP/11


@dataclass(frozen=True)
class TaskSet:
    name: str  # of the source, such as mbpp
    origin: str  # where the tasks were read
    tasks: tuple[Task, ...]  # the chosen ones, in the source's order; at least one
    examples: tuple[Task, ...] = ()  # solved, for few-shot prompts; none of them is in the default split
    note: str = ""  # a line for people where the data is not the published one

    @cached_property
    def digest(self) -> str:
        """Hash of the tasks and examples: equal for the same tasks wherever they were read."""
        content = [[asdict(task) for task in tasks] for tasks in (self.tasks, self.examples)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class TaskIds:
    """Finds tasks by the ids that people and other tools give them: ``11``, ``"11"``, ``"Mbpp/11"``, ``"MBJP/11"``."""

    def __init__(self, tasks: Iterable[Task]):
        self._tasks = {_key(task.task_id): task for task in tasks}
        self._prefixes = {prefix for prefix, _ in self._tasks}

    def require(self, given: object, source: str = "") -> Task:
        """The task with an integer or a text, with or without the data set's name, for its id; else an InputError."""
        if isinstance(given, int | str) and not isinstance(given, bool):
            prefix, number = _key(str(given).strip())
            prefixes = {"": self._prefixes, _MBPP: {_MBPP, ""}}.get(prefix, {prefix})
            found = [self._tasks[one, number] for one in prefixes if (one, number) in self._tasks]
            if len(found) == 1:
                return found[0]
        known = [task.task_id for task in self._tasks.values()]
        raise InputError(
            f"{source}there is no task {given}; the {len(known)} tasks have ids from {known[0]} to {known[-1]}"
        )


def _key(task_id: str) -> tuple[str, str]:
    """Split an id into data set's name in lower case, and number; one of another form is the name."""
    match = _ID.fullmatch(task_id)
    return (task_id, "") if match is None else ((match[1] or "").lower(), str(int(match[2])))
