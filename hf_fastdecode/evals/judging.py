"""Scoring into a file: verdicts are appended as they come, and an interrupted scoring goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from ..errors import InputError
from ..files import JsonlWriter, exclusive, json_lines, read_jsonl, write_text
from .queue import Lines, Queue, own_part, part_files
from .records import Sample, Task, Verdict
from .sandbox import Limits, Sandbox
from .scoring import LANGUAGES, score, usable_cpus

_PROGRAMS_AT_ONCE: Final = 128
"""For each worker, programs between two writes."""

_PROTOCOL: Final = 4
"""Raised with each change of what verdicts mean or hold, so that those of older files are formed again."""


def judge(
    tasks: Sequence[Task],
    samples: Sequence[Sample],
    path: Path,
    *,
    sandbox: Sandbox,
    limits: Limits | None = None,
    workers: int | None = None,
    shared: bool = False,
) -> list[Verdict]:
    """Score samples and write a line for each: a `Verdict`'s fields, ``passed``, and a hash of what decided it.

    Existing lines are kept where program, tests, limits, the language's version and the meaning of verdicts are the
    same; a ``sandbox_error`` is scored again. Lines are appended as they come. At the end the file has one line for
    each of these samples, in their order, and then one for each other sample that it had.

    Returns:
        A verdict per sample, in their order.

    Raises:
        InputError: The file holds something other than results, or another process scores into it.
    """
    workers = workers or usable_cpus()
    by_id = {task.task_id: task for task in tasks}
    programs = {sample: _digest(by_id[sample.task_id], sample, limits) for sample in samples}
    # Equal programs stand together, so that they run once.
    order = {program: at for at, program in enumerate(dict.fromkeys(programs.values()))}
    lines = Lines(lambda: [*filter(Path.exists, [path]), *part_files(path)])
    known: dict[tuple[Any, ...], Verdict] = {}

    def left(part: Sequence[Sample]) -> list[Sample]:
        """Those of some samples without a verdict in the files."""
        if not all(_key(sample, programs[sample]) in known for sample in part):
            known.update(_known(path, lines.new()))
        return [sample for sample in part if _key(sample, programs[sample]) not in known]

    def scored(part: list[Sample]) -> Iterator[dict[str, Any]]:
        verdicts = score(by_id, part, sandbox=sandbox, limits=limits, workers=workers, progress=False)
        for sample, verdict in zip(part, verdicts, strict=True):
            known[_key(sample, programs[sample])] = verdict
            yield _line(verdict, programs[sample])

    chosen: Iterator[list[Sample]]
    with ExitStack() as stack:
        in_order = sorted(samples, key=lambda sample: order[programs[sample]])
        if shared:
            file = stack.enter_context(own_part(path))
            parts = list(_parts(in_order, programs, _PROGRAMS_AT_ONCE))
            queue = stack.enter_context(Queue(path.with_name(f".{path.name}.claims"), len(parts)))
            chosen = (parts[number] for number in queue.numbers(lambda number: not left(parts[number])))
        else:
            held = InputError(f"another process scores into {path}; wait for it, or name another `out`")
            stack.enter_context(exclusive(path, held))
            file = stack.enter_context(JsonlWriter(path))
            chosen = _parts(left(in_order), programs, _PROGRAMS_AT_ONCE * workers)
        there = len(samples) - len(left(in_order))
        bar = stack.enter_context(tqdm(total=len(samples), initial=there, desc="score", unit="sample", disable=None))
        for part in chosen:
            todo = left(part) if shared else part
            file.write(scored(todo))
            bar.update(len(todo))
        known.update(_known(path, lines.new()))  # what others have scored
        found = [known[_key(sample, programs[sample])] for sample in samples]
        results = [_line(verdict, programs[sample]) for verdict, sample in zip(found, samples, strict=True)]
        with exclusive(path, None) if shared else nullcontext():
            _compact(path, results)
            for part_file in part_files(path) if shared else ():
                part_file.unlink(missing_ok=True)
        return found


def _line(verdict: Verdict, program: str) -> dict[str, Any]:
    return {**asdict(verdict), "passed": verdict.passed, "program": program}


def _compact(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Have a file hold these lines, followed by the latest line of each other sample.

    An interruption leaves the old lines, of which the last of a sample counts.
    """
    found = list(read_jsonl(path)) if path.exists() else []
    others = {_place(line): line for line in found if {"task_id", "index"} <= line.keys()}
    for line in lines:
        others.pop(_place(line), None)
    wanted = [*lines, *others.values()]
    if found != wanted:
        write_text(path, json_lines(wanted))


def _place(line: dict[str, Any]) -> tuple[Any, Any]:
    return line["task_id"], line["index"]


def _parts(left: Sequence[Sample], programs: dict[Sample, str], count: int) -> Iterator[list[Sample]]:
    """The samples in parts of `count` different programs; equal programs are in one part."""
    part: list[Sample] = []
    seen: set[str] = set()
    for sample in left:
        if programs[sample] not in seen and len(seen) == count:
            yield part
            part, seen = [], set()
        seen.add(programs[sample])
        part.append(sample)
    if part:
        yield part


def _known(path: Path, lines: Iterator[dict[str, Any]]) -> Iterator[tuple[tuple[Any, ...], Verdict]]:
    """Verdicts among the lines of result files that need not be formed again."""
    for line in lines:
        if "status" not in line:
            raise InputError(f"{path} holds lines that are no results; name another `out`")
        if line.get("status") != "sandbox_error" and {"task_id", "index", "status", "program"} <= line.keys():
            own = (line["task_id"], line["index"], line["status"], line.get("detail", ""), line.get("outputs", ""))
            verdict = Verdict(*own)
            yield (verdict.task_id, verdict.index, line["program"]), verdict


def _key(sample: Sample, program: str) -> tuple[Any, ...]:
    return sample.task_id, sample.index, program


def _digest(task: Task, sample: Sample, limits: Limits | None) -> str:
    """A hash of all that decides a sample's verdict."""
    language = LANGUAGES[task.language]
    content = asdict(task) | {
        "completion": sample.completion,
        "limits": asdict(limits or language.limits),
        "protocol": _PROTOCOL,
        "version": language.version(),
    }
    del content["description"], content["reference"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
