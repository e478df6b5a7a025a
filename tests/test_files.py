"""Files: written whole, held by one process, and JSON lines that survive an interruption."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_fastdecode import files
from hf_fastdecode.errors import InputError
from hf_fastdecode.files import JsonlWriter, exclusive, write_text, write_whole


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
    assert partial == tmp_path / f"{path.name}.partial"
    assert names(tmp_path) == [path.name]
    assert path.read_text() == "new"


def test_an_interruption_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_text(tmp_path / "made" / "a.txt", "old")

    def write(partial: Path) -> None:
        partial.write_text("half of the")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, write)
    assert path.read_text() == "old"
    assert names(path.parent) == ["a.txt"]


def test_what_a_killed_process_left_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "a.txt.partial").write_text("half of the")

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
    write_text(tmp_path / "a.txt", "new")
    assert steps == ["file", "rename", "folder"]


def test_a_file_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.jsonl"
    code = f"""
from pathlib import Path
from hf_fastdecode.files import exclusive
with exclusive(Path({str(path)!r}), ValueError("held")):
    pass
"""
    refused: list[str] = []

    def ask() -> None:
        try:
            with exclusive(path, InputError("held")):
                pass
        except InputError as error:
            refused.append(str(error))

    other_path = path.with_name("b.jsonl")
    with exclusive(path, ValueError("held")), exclusive(other_path, ValueError("held")):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert refused == ["held"]
    assert "ValueError: held" in other.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_is_held_by_one_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    with exclusive(tmp_path, ValueError("held")):
        with pytest.raises(ValueError, match="held"), exclusive(tmp_path, ValueError("held")):
            pass
        assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_a_file_system_without_locks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with exclusive(tmp_path / "a.jsonl", ValueError("held")), exclusive(tmp_path, ValueError("held")):
        pass


def test_an_error_lets_go_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt), exclusive(path, ValueError("held")):
        raise KeyboardInterrupt
    with exclusive(path, ValueError("held")):
        pass
    assert names(tmp_path) == [".a.jsonl.lock"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "new"


def append(path: Path, *records: dict[str, int]) -> None:
    with JsonlWriter(path) as writer:
        writer.write(records)


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_long_lines(tmp_path, monkeypatch, block):
    monkeypatch.setattr(files, "_BLOCK", block)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"torn": "' + "x" * 100)
    append(path, {"b": 2})
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'
    path.write_text('{"torn')
    append(path)
    assert path.read_text() == ""


def test_every_batch_reaches_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append((tmp_path / "a.jsonl").read_text()))
    with JsonlWriter(tmp_path / "a.jsonl") as writer:
        writer.write([{"a": 1}, {"a": 2}])
        writer.write([{"a": 3}])
    assert [text.count("\n") for text in synced] == [2, 3]


def test_nothing_of_a_batch_that_json_cannot_hold(tmp_path):
    path = tmp_path / "a.jsonl"
    with JsonlWriter(path) as writer, pytest.raises(ValueError, match="not JSON compliant"):
        writer.write([{"a": 1}, {"a": float("nan")}])
    assert path.read_bytes() == b""
