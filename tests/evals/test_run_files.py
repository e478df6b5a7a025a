"""Files of a run: written whole, and held by one process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_fastdecode.errors import CommandError
from hf_fastdecode.evals.run_files import exclusive, write_text, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_temporary_file_is_found_by_no_glob_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples-0-of-2.jsonl"
    seen: list[Path] = []

    def write(partial: Path) -> None:
        partial.write_text("new")
        seen.extend([partial, *tmp_path.glob("samples-*-of-*.jsonl")])

    assert write_whole(path, write) == path
    (partial,) = seen
    assert (partial.parent, partial.name[0], partial.suffix) == (tmp_path, ".", path.suffix)
    assert names(tmp_path) == [path.name]
    assert path.read_text() == "new"


def test_an_interruption_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_text(tmp_path / "made" / "a.txt", lambda file: file.write("old"))

    def write(partial: Path) -> None:
        partial.write_text("half of the")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, write)
    assert path.read_text() == "old"
    assert names(path.parent) == ["a.txt"]


def test_what_a_killed_process_left_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / ".a.partial.txt").write_text("half of the")

    def write(partial: Path) -> None:
        with partial.open("a") as file:
            file.write("new")

    assert write_whole(tmp_path / "a.txt", write).read_text() == "new"


def test_the_disk_has_the_content_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    def record_replace(old: Path, new: Path) -> None:
        steps.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_text(tmp_path / "a.txt", lambda file: file.write("new"))
    assert steps == ["file", "rename", "folder"]


def test_a_file_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.jsonl"
    code = f"""
from pathlib import Path
from hf_fastdecode.evals.run_files import exclusive
with exclusive(Path({str(path)!r}), "scores into"):
    pass
"""
    refused: list[str] = []

    def ask() -> None:
        try:
            with exclusive(path, "scores into"):
                pass
        except CommandError as error:
            refused.append(str(error))

    with exclusive(path, "draws samples into"), exclusive(path.with_name("b.jsonl"), "draws samples into"):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    message = f"another process scores into {path}; wait for it, or name another --out"
    assert refused == [message]
    assert message in other.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_error_lets_go_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt), exclusive(path, "scores into"):
        raise KeyboardInterrupt
    with exclusive(path, "scores into"):
        pass
    assert names(tmp_path) == [".a.jsonl.lock"]
