"""Work that processes share by a folder: each item is done, by one of those that are alive."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hf_fastdecode.evals import scoring
from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.run_folder import Lines, Queue, own_part, part_files
from hf_fastdecode.evals.scoring import Result
from hf_fastdecode.files import JsonlWriter, write_text


def started(work: Callable[[], None]) -> int:
    """A process that does some work."""
    if process := os.fork():
        return process
    try:
        work()
    finally:
        os._exit(0)


def done(folder: Path) -> list[int]:
    return [line["item"] for line in Lines(lambda: part_files(folder / "work.jsonl")).new()]


def work(folder: Path, count: int, seconds: float) -> None:
    with own_part(folder / "work.jsonl") as file, Queue(folder / "claims", count) as queue:
        for item in queue.numbers(lambda item: item in done(folder)):
            time.sleep(seconds)
            file.write([{"item": item, "by": os.getpid()}])


def test_processes_share_all_items(tmp_path: Path) -> None:
    processes = [started(lambda: work(tmp_path, 12, 0.02)) for _ in range(3)]
    for process in processes:
        os.waitpid(process, 0)
    assert sorted(done(tmp_path)) == list(range(12))
    assert len(part_files(tmp_path / "work.jsonl")) == 3


def test_what_a_killed_process_had_claimed_is_done_by_another(tmp_path: Path) -> None:
    stuck = started(lambda: work(tmp_path, 3, 60))
    while not (tmp_path / "claims").exists() or not part_files(tmp_path / "work.jsonl"):
        time.sleep(0.01)
    time.sleep(0.1)
    other = started(lambda: work(tmp_path, 3, 0))
    while len(done(tmp_path)) < 2:
        time.sleep(0.01)
    assert sorted(done(tmp_path)) == [1, 2], "the first item is claimed"
    assert os.waitpid(other, os.WNOHANG)[0] == 0, "it waits"
    os.kill(stuck, signal.SIGKILL)
    for process in (stuck, other):
        os.waitpid(process, 0)
    assert sorted(done(tmp_path)) == [0, 1, 2]


def test_items_whose_results_do_not_count_for_others_end(tmp_path: Path) -> None:
    def try_all(name: str) -> None:
        tried: set[int] = set()
        with Queue(tmp_path / "claims", 4) as queue:
            for item in queue.numbers(tried.__contains__):  # nothing that another did counts
                time.sleep(0.02)
                tried.add(item)
                (tmp_path / f"{name}-{item}").touch()

    processes = [started(lambda name=name: try_all(name)) for name in "ab"]
    for process in processes:
        os.waitpid(process, 0)
    assert len(list(tmp_path.glob("?-?"))) == 8


def test_lines_are_those_that_were_added_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = Lines(lambda: [path, tmp_path / "none.jsonl"])
    with JsonlWriter(path) as file:
        file.write([{"x": 1}])
        assert list(lines.new()) == [{"x": 1}]
        file.write([{"x": 2}])
    with path.open("a") as torn:
        torn.write('{"x": 3')
    assert list(lines.new()) == [{"x": 2}]
    write_text(path, '{"x": 4}\n{"x": 5}\n{"x": 6}\n')
    assert list(lines.new()) == [{"x": 4}, {"x": 5}, {"x": 6}]
    assert list(lines.new()) == []


def test_processes_share_a_scoring(tmp_path: Path, monkeypatch) -> None:

    monkeypatch.setattr(scoring, "_PROGRAMS_AT_ONCE", 2)
    tasks = [Task("a", "python", "", "", ("assert f() == 1",))]
    samples = [Sample("a", index, f"def f(): return {index % 5}") for index in range(20)]
    path = tmp_path / "out.jsonl"

    def score_slowly(by_id, part, **options):
        from hf_fastdecode.evals.records import Verdict

        time.sleep(0.05)
        (tmp_path / f"by-{os.getpid()}-{part[0].index}").touch()
        return [Verdict(one.task_id, one.index, "pass" if one.index % 5 == 1 else "fail") for one in part]

    monkeypatch.setattr(scoring, "score", score_slowly)
    processes = [
        started(lambda: scoring.judge(tasks, samples, path, sandbox=None, workers=1, shared=True)) for _ in range(2)
    ]
    for process in processes:
        os.waitpid(process, 0)
    assert len({one.name.split("-")[1] for one in tmp_path.glob("by-*")}) == 2, "both did some"
    assert len(list(tmp_path.glob("by-*"))) == 3, "none did the same"
    assert part_files(path) == []
    again = scoring.judge(tasks, samples, path, sandbox=None, workers=1)
    assert [one.index for one in again] == list(range(20))
    assert [one.status for one in again] == [Result("pass" if i % 5 == 1 else "fail").status for i in range(20)]
    assert len(path.read_text().splitlines()) == 20
    assert len(list(tmp_path.glob("by-*"))) == 3, "all is kept"
