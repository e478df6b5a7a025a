"""Scoring into a file: verdicts are appended as they come, and an interrupted scoring goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from ..errors import InputError
from ..files import JsonlWriter, exclusive, json_lines, read_jsonl, write_text
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
    with exclusive(path, InputError(f"another process scores into {path}; wait for it, or name another `out`")):
        workers = workers or usable_cpus()
        by_id = {task.task_id: task for task in tasks}
        programs = {sample: _digest(by_id[sample.task_id], sample, limits) for sample in samples}
        known = dict(_known(path))
        left = [sample for sample in samples if known.get(_key(sample, programs[sample])) is None]
        # Equal programs stand together, so that they run once.
        order = {program: at for at, program in enumerate(dict.fromkeys(programs.values()))}
        left.sort(key=lambda sample: order[programs[sample]])
        bar = tqdm(
            total=len(samples),
            initial=len(samples) - len(left),
            desc="score",
            unit="sample",
            disable=None,
        )
        with bar, JsonlWriter(path) as file:
            for part in _parts(left, programs, _PROGRAMS_AT_ONCE * workers):
                verdicts = score(by_id, part, sandbox=sandbox, limits=limits, workers=workers, progress=False)
                file.write(_line(verdict, programs[sample]) for verdict, sample in zip(verdicts, part, strict=True))
                known |= {
                    _key(sample, programs[sample]): verdict for sample, verdict in zip(part, verdicts, strict=True)
                }
                bar.update(len(part))
        found = [known[_key(sample, programs[sample])] for sample in samples]
        _compact(path, [_line(verdict, programs[sample]) for verdict, sample in zip(found, samples, strict=True)])
        return found


def _line(verdict: Verdict, program: str) -> dict[str, Any]:
    return {**asdict(verdict), "passed": verdict.passed, "program": program}


def _compact(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Have a file hold these lines, followed by the latest line of each other sample.

    An interruption leaves the old lines, of which the last of a sample counts.
    """
    found = list(read_jsonl(path))
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


def _known(path: Path) -> Iterator[tuple[tuple[Any, ...], Verdict]]:
    """Verdicts of a file that need not be formed again."""
    if not path.exists():
        return
    for line in read_jsonl(path):
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
