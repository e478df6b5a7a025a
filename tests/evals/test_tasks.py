"""Loading tasks: forms, files, splits, choices and what is said of wrong ones."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_fastdecode.assets import embedded_tasks
from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.prompts import prompt_format
from hf_fastdecode.evals.tasks import FILES, TASK_NAMES, TaskIds, load_tasks

from .example_tasks import JAVA, MBPP

FULL = {
    "text": "Double.",
    "code": "def double(x):\r\n    return 2 * x",
    "task_id": 11,
    "test_setup_code": "a = 1\r\n",
    "test_list": ["assert double(2) == 4"],
    "challenge_test_list": [],
}
SANITIZED = {
    "source_file": "a",
    "prompt": "Double.",
    "code": "def double(x):\n    return 2 * x",
    "task_id": 11,
    "test_imports": ["import math"],
    "test_list": ["assert double(2) == 4"],
}
MBXP = {
    "task_id": "MBJP/3",
    "prompt": "class A { static int f() {",
    "canonical_solution": None,
    "entry_point": "f",
    "test": "class Main { }",
    "language": "java",
    "description": "One.",
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "canonical_solution": "    return 1\n",
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def writer(content: str, name: str = "tasks.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
        return path

    return writer


def many(*ids: int) -> str:
    return lines(*({**FULL, "task_id": one} for one in ids))


def ids(tasks: Any) -> list[str]:
    return [task.task_id for task in tasks.tasks]


def test_the_two_forms_of_mbpp(write: Any) -> None:
    full = load_tasks("mbpp", data=write(lines(FULL))).tasks[0]
    assert (full.task_id, full.description, full.stem, full.tests) == ("11", "Double.", "", ("assert double(2) == 4",))
    assert (full.reference, full.setup) == ("def double(x):\n    return 2 * x", "a = 1")
    sanitized = load_tasks("mbpp", data=write(json.dumps([SANITIZED]), "tasks.json")).tasks[0]
    again = load_tasks("mbpp-sanitized", data=write(lines(SANITIZED)))
    assert again.tasks == (sanitized,) and load_tasks("mbpp-sanitized", data=write(lines(FULL))).tasks == (full,)
    assert (sanitized.description, sanitized.setup, sanitized.reference) == ("Double.", "import math", full.reference)


def test_mbxp_and_humaneval(write: Any) -> None:
    java = load_tasks("mbxp-java", data=write(lines(MBXP))).tasks[0]
    assert (java.task_id, java.language, java.entry_point, java.reference) == ("MBJP/3", "java", "f", None)
    assert (java.stem, java.tests, java.description) == (MBXP["prompt"], ("class Main { }",), "One.")
    python = load_tasks("humaneval", data=write(lines(HUMANEVAL), "h.jsonl.gz")).tasks[0]
    assert (python.language, python.reference, python.stem) == ("python", "    return 1\n", "def f():\n")


def test_prompts_alone(write: Any) -> None:
    given = load_tasks(str(write(lines({"prompt": "Once"}, {"prompt": "x", "task_id": "a", "answer": 1}))))
    assert [(task.task_id, task.stem, task.tests) for task in given.tasks] == [("1", "Once", ()), ("a", "x", ())]
    form = prompt_format(given)
    assert (form.name, form.prompt(given.tasks[0])) == ("plain", "Once")
    assert form.stop_rule(given.tasks[0]).completion("\n```\n\ndef f(") == "\n```\n\ndef f("


def test_embedded_tasks_need_no_file_and_no_torch() -> None:
    found = load_tasks()
    assert found.name == "embedded" and found.origin == "the package" and not found.note
    assert ids(found) == [str(one["task_id"]) for one in embedded_tasks()]
    assert len(found.examples) >= 9 and not set(found.examples) & set(found.tasks)
    code = (
        "import sys; import hf_fastdecode.evals.prompts, hf_fastdecode.evals.formats; sys.exit('torch' in sys.modules)"
    )
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


def test_splits_limits_and_choices(write: Any) -> None:
    path = write(many(1, 4, 2, 3, 10, 11, 510, 511, 600, 601, 974))
    assert ids(load_tasks("mbpp", data=path)) == ["11", "510"]
    assert ids(load_tasks("mbpp", data=path, split="validation")) == ["511", "600"]
    assert ids(load_tasks("mbpp", data=path, split="all", limit=3)) == ["1", "4", "2"]
    assert ids(load_tasks("mbpp", data=path, task_ids=["Mbpp/601", 11, "11", "MBPP/1"])) == ["601", "11", "1"]
    assert [task.task_id for task in load_tasks("mbpp", data=path).examples] == ["4", "2", "3", "1", "10"]
    java = write(lines(*({**MBXP, "task_id": f"MBJP/{one}"} for one in (3, 11))), "java.jsonl")
    assert ids(load_tasks("mbxp-java", data=java)) == ["MBJP/3", "MBJP/11"]
    assert ids(load_tasks("mbxp-java", data=java, split="test")) == ["MBJP/11"]
    assert ids(load_tasks("mbxp-java", data=java, task_ids=["11", "mbjp/3"])) == ["MBJP/11", "MBJP/3"]


def test_the_digest_is_of_the_tasks(write: Any) -> None:
    path, again = (
        write(many(11, 12)),
        write(json.dumps([json.loads(one) for one in many(11, 12).splitlines()]), "a.json"),
    )
    whole = load_tasks("mbpp", data=path)
    assert whole.digest == load_tasks("mbpp", data=again).digest
    assert whole.digest != load_tasks("mbpp", data=path, limit=1).digest
    assert whole.origin == str(path)


def test_other_data_is_told_and_not_refused(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(many(11))
    note = load_tasks("mbpp", data=path).note
    assert note.startswith(f"{path} is not the published data: 1 problems, sha256 ")
    assert "(published: mbpp.jsonl: 974 problems, sha256 " in note and "\n" not in note
    import hashlib

    from hf_fastdecode.evals import tasks

    pinned = tasks.PublishedFile("mbpp", "a/b.jsonl", 1, hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(tasks, "FILES", (pinned,))
    assert load_tasks("mbpp", data=path).note == ""
    assert load_tasks("mbpp", data=write(many(11), "b.jsonl.gz")).note == ""  # the content counts, decompressed


def test_every_name_but_the_files_own_has_a_published_file() -> None:
    assert {file.task_name for file in FILES} == set(TASK_NAMES) - {"embedded", "prompts"}
    assert all(len(file.sha256) == 64 and file.problems > 100 for file in FILES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mbpp", "", "holds no records"),
        ("mbpp", '{"task_id": 11\n', r"line 1: expected JSON, got"),
        ("mbpp", lines(FULL) + "\n{]\n", r"line 3: expected JSON, got"),
        ("mbpp", "[1", r"tasks.jsonl: expected JSON, got"),
        ("mbpp", "[1]", "item 1: expected a JSON object, got int"),
        ("mbpp", lines(FULL, 5), "line 2: expected a JSON object, got int"),
        ("mbpp", lines(MBXP), 'line 1: this is a record of mbxp-java, not of mbpp; pass `task="mbxp-java"`'),
        (
            "mbxp-java",
            lines({**MBXP, "language": "python"}),
            'of mbxp-python, not of mbxp-java; pass `task="mbxp-python"`',
        ),
        ("mbxp-java", lines({**MBXP, "language": "go"}), "of mbxp-go, not of mbxp-java; choose one of embedded, mbpp"),
        ("humaneval", lines(FULL), 'of mbpp, not of humaneval; pass `task="mbpp"`'),
        ("mbpp", lines(HUMANEVAL), 'of humaneval, not of mbpp; pass `task="humaneval"`'),
        ("mbpp", lines({**FULL, "code": None}), "line 1: field 'code' must be a text, got None"),
        ("mbpp", lines({"test_list": ["a"], "task_id": 1}), "field 'prompt' must be a text, got none; the fields are"),
        (
            "mbpp",
            lines({**FULL, "test_list": "assert 1"}),
            "field 'test_list' must be a list of texts, got 'assert 1'",
        ),
        ("mbpp", lines({**FULL, "test_list": []}), "field 'test_list' is empty"),
        ("mbpp", lines({**FULL, "task_id": None}), "field 'task_id' must be a number or a text, got None"),
        ("mbpp", many(11, 12, 11), "line 3: task id 11 occurs twice"),
        (
            "mbpp",
            many(601, 602),
            r"no task of the split test \(ids 11 to 510\), its ids run from 601 to 602; pass `split=\"all\"`",
        ),
        ("prompts", lines({"prompt": "a"}, HUMANEVAL), "line 2: fields of a programming task: .*entry_point, test"),
        ("prompts", lines({"prompt": "a"}, {"prompt": "a\ud800"}), r"line 2: '\\ud800' is no character"),
        ("prompts", lines({"prompt": "a", "task_id": "\ud800"}), r"line 1: '\\ud800' is no character"),
        ("mbpp", lines({**FULL, "text": "\udfff"}), r"line 1: '\\udfff' is no character"),
    ],
)
def test_wrong_files(write: Any, name: str, content: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_tasks(name, data=write(content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "mbxp"}, r"there are no tasks 'mbxp'; choose one of embedded, mbpp.*, or name a \.jsonl file"),
        ({"limit": 0}, "`limit` must be at least 1, got 0"),
        ({"limit": -3}, "`limit` must be at least 1, got -3"),
        ({"split": "dev"}, "there is no split 'dev'; choose one of prompt, test, validation, train or all"),
        ({"task_ids": ["7"]}, "there is no task 7; the 160 tasks have ids from 101 to 260"),
        ({"task_ids": []}, "`task_ids` names no task"),
        ({"name": "prompts"}, "the tasks prompts need a file in their form; pass `data=FILE`"),
        ({"name": "mbpp", "data": Path("nowhere.jsonl")}, "cannot read nowhere.jsonl: No such file"),
        ({"name": "mbpp", "data": Path(__file__).parent}, "is a folder; name a file of JSON lines"),
    ],
)
def test_wrong_choices(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tasks(**options)


def test_broken_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(FULL).encode())[:-9])
    for content in (path.read_bytes(), b"no gzip"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="is not a whole gzip file"):
            load_tasks("mbpp", data=path)
    text = tmp_path / "a.jsonl"
    text.write_bytes('{"text": "é"}'.encode("latin-1"))
    with pytest.raises(InputError, match="is not UTF-8 text"):
        load_tasks("mbpp", data=text)


def fake_hub(monkeypatch: pytest.MonkeyPatch, loaded: Any) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((*args, options))
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_the_hub_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {
        "train": [{**FULL, "task_id": 700}],
        "test": [{**FULL, "task_id": 11}],
        "prompt": [{**FULL, "task_id": 2}],
    }
    calls = fake_hub(monkeypatch, splits)
    found = load_tasks("mbpp")
    assert calls == [("google-research-datasets/mbpp", "full", {})]
    assert ids(found) == ["11"] and [task.task_id for task in found.examples] == ["2"]
    assert found.origin == "google-research-datasets/mbpp (full)"
    assert found.note == "google-research-datasets/mbpp (full) holds 3 problems, published were 974"
    calls = fake_hub(monkeypatch, {"test": [SANITIZED]})
    assert ids(load_tasks("mbpp-sanitized")) == ["11"]
    assert calls == [("google-research-datasets/mbpp", "sanitized", {})]


def test_mbxp_from_its_repository_since_the_hub_has_a_script_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, [MBXP])
    assert ids(load_tasks("mbxp-java")) == ["MBJP/3"]
    (kind, options), *rest = calls
    assert kind == "json" and not rest and options["data_files"]["test"].endswith("/mbxp/mbjp_release_v1.2.jsonl")


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, ConnectionError("no route\nto host"))
    with pytest.raises(
        InputError, match=r"cannot load openai/openai_humaneval .*: no route to host; download"
    ) as caught:
        load_tasks("humaneval")
    assert str(caught.value).endswith("/data/HumanEval.jsonl.gz and pass `data=HumanEval.jsonl.gz`")


@pytest.mark.parametrize("given", ["11", 11, " 11", "Mbpp/11", "MBPP/11", "mbpp_11", "011"])
def test_ids_of_mbpp(given: object) -> None:
    assert TaskIds([MBPP]).require(given) is MBPP


@pytest.mark.parametrize("given", ["12", "HumanEval/11", "MBJP/11", None, True, 11.0, "", "abc", ["11"]])
def test_ids_that_are_not_of_mbpp(given: object) -> None:
    with pytest.raises(InputError, match="there is no task"):
        TaskIds([MBPP]).require(given)


def test_ids_with_a_prefix() -> None:
    ids = TaskIds([JAVA])
    assert all(ids.require(given) is JAVA for given in ("MBJP/3", "mbjp_3", 3))
    with pytest.raises(InputError, match="there is no task MBPP/3"):
        ids.require("MBPP/3")


OWN_MBPP = {**FULL, "task_id": "mine/1", "text": "Double x."}
OWN_HUMANEVAL = {**HUMANEVAL, "task_id": "mine/1", "prompt": 'def f():\n    """Double x."""\n'}


@pytest.mark.parametrize("record", [OWN_MBPP, OWN_HUMANEVAL], ids=["mbpp", "humaneval"])
@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json", "mine.jsonl.gz"])
def test_tasks_of_ones_own(tmp_path: Path, record: dict[str, Any], name: str) -> None:
    text = json.dumps([record] if name == "mine.json" else record).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    found = load_tasks(str(path))
    assert (found.name, found.origin, found.note) == ("mine", str(path), "")
    assert [task.task_id for task in found.tasks] == ["mine/1"]
    form = prompt_format(found)
    assert "Double x." in form.prompt(found.tasks[0])
    with pytest.raises(InputError, match="were both given; leave one out"):
        load_tasks(str(path), data=path)


@pytest.mark.parametrize("record", [{"task_id": 1, "text": "x"}, {"question": "x", "solutions": "[]"}])
def test_files_without_tasks_that_run(tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(
        InputError, match=r"mine.jsonl line 1: these are no tasks that run here; a task has task_id, text"
    ):
        load_tasks(str(path))
