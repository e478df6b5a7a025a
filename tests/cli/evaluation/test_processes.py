"""Runs in processes of their own: one that is killed, and several for one folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ...fresh_processes import run_fresh
from ...workers import made_once
from ..command_line import needs_weights, ran
from .forked_runs import OPTIONS, PROMPTS, write_prompts


def generate(out: Path, *options: str) -> None:
    """`eval generate` here: an interpreter takes longer to start than the run does."""
    ran("eval", "generate", *OPTIONS, *options, "--out", out)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The samples of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("unbroken")
    generate(out)
    return (out / "samples.jsonl").read_bytes()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[tuple[int, str]]]:
    """The folders of a killed run and of one that two processes share, and how these ended: exit code and words."""

    def run_all() -> tuple[Path, Path, list[tuple[int, str]]]:
        folder = tmp_path_factory.mktemp("left")
        parts = [folder / name for name in ("killed", "shared", "seen.json")]
        code = "import sys; from tests.cli.evaluation.forked_runs import run_all; run_all(*sys.argv[1:])"
        done = run_fresh(code, *map(str, parts))
        assert done.returncode == 0, done.stderr[-4000:]
        return parts[0], parts[1], [tuple(one) for one in json.loads(parts[2].read_text())]

    return made_once(tmp_path_factory, "left", run_all)


@needs_weights
def test_a_run_killed_within_a_line_goes_on_to_the_same_bytes(
    unbroken: bytes, left: tuple[Path, Path, object]
) -> None:
    killed = left[0]
    path = killed / "samples.jsonl"
    left_behind = path.read_bytes()
    assert 0 < len(left_behind) < len(unbroken) and not left_behind.endswith(b"\n"), "it was killed within a line"
    generate(killed)
    assert path.read_bytes() == unbroken


@needs_weights
def test_launched_processes_share_a_file_of_prompts(
    left: tuple[Path, Path, list[tuple[int, str]]], tmp_path: Path
) -> None:
    from hf_fastdecode.evals.run_folder import merged_samples

    _, shared, ended = left
    for status, said in ended:
        assert status == 0, said
    drawn = [int(re.search(r"(\d+) samples drawn into", said)[1]) for _, said in ended]  # type: ignore[index]
    assert sum(drawn) == 4 * len(PROMPTS)
    merged_samples(shared, ["1", "2", "3"], 4)
    alone = tmp_path / "alone"
    generate(alone, "--task", str(write_prompts(alone)))
    assert (shared / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
