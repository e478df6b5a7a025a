"""The data sets as published: where they are, what their files are recognised by, and loading them with `datasets`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_fastdecode.errors import InputError, one_line

from ...files import Record

_MXEVAL: Final = "https://raw.githubusercontent.com/amazon-science/mxeval/e09974f990eeaf0c0e8f2b5eaff4be66effb2c86"
_OPENAI: Final = "https://raw.githubusercontent.com/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
_GOOGLE: Final = "https://raw.githubusercontent.com/google-research/google-research/master/mbpp"


@dataclass(frozen=True)
class PublishedFile:
    """A file of a data set."""

    task_name: str  # the source that reads it
    url: str
    problems: int
    sha256: str  # of the decompressed content
    hub: tuple[str, str] | None = None  # repository and configuration; `datasets` runs no loading scripts

    @property
    def name(self) -> str:
        """Of the file."""
        return self.url.rpartition("/")[2]


# The first file of a task name is the one that is loaded where none is given.
FILES: Final = (
    PublishedFile(
        "mbpp",
        f"{_GOOGLE}/mbpp.jsonl",
        974,
        "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f",
        ("google-research-datasets/mbpp", "full"),
    ),
    PublishedFile(
        "mbpp-sanitized",
        f"{_GOOGLE}/sanitized-mbpp.json",
        427,
        "ca95deaa9a01ef0a6f439f88bcf0dd3db3563d22f22aad6cae04ebb9a8d8c8e9",
        ("google-research-datasets/mbpp", "sanitized"),
    ),
    PublishedFile(
        "mbxp-python",
        f"{_MXEVAL}/data/mbxp/mbpp_release_v1.jsonl",
        974,
        "2ea7949f20ed5ecaacf4c9970d29430ec3f13772f4dd379665b1234f14b0ec3e",
    ),
    PublishedFile(
        "mbxp-java",
        f"{_MXEVAL}/data/mbxp/mbjp_release_v1.2.jsonl",
        966,
        "139a0fcdff2f4c6d456c546c82f43a1f389dfe3125f5f2c3f6a12f478483dffd",
    ),
    PublishedFile(
        "mbxp-javascript",
        f"{_MXEVAL}/data/mbxp/mbjsp_release_v1.2.jsonl",
        966,
        "9e443a1911bcedd8b5193f43d3217666fbf669cd00d54265941a8eb17e396f5a",
    ),
    PublishedFile(
        "humaneval",
        f"{_OPENAI}/data/HumanEval.jsonl.gz",
        164,
        "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2",
        ("openai/openai_humaneval", "openai_humaneval"),
    ),
    PublishedFile(
        "humaneval",
        f"{_MXEVAL}/data/multilingual_humaneval/HumanEval.jsonl",
        164,
        "ee8ed1495a18a21d3c285c031d38940e3208f1616dc386a32a8d28e968fe94d8",
    ),
)


def published_file(task_name: str) -> PublishedFile:
    """The file that a task name is loaded from where none is given."""
    return next(file for file in FILES if file.task_name == task_name)


def difference(task_name: str, path: Path, content: bytes, problems: int) -> str:
    """A note where a file's decompressed content is none of those published for a task name, else empty."""
    found = hashlib.sha256(content).hexdigest()
    either = {"mbpp", "mbpp-sanitized"}  # the reader of one form reads both
    names = either if task_name in either else {task_name}
    pinned = [file for file in FILES if file.task_name in names]
    if not pinned or found in (file.sha256 for file in pinned):
        return ""
    known = " or ".join(f"{file.name}: {file.problems} problems, sha256 {file.sha256[:12]}" for file in pinned)
    return f"{path} is not the published data: {problems} problems, sha256 {found[:12]} (published: {known})"


def hub_records(task_name: str) -> tuple[list[Record], str, str]:
    """All records of a published data set in order of their ids, their origin, and a note on an unexpected number.

    An InputError where they cannot be loaded, e.g. without a network; the remedy is a local file.
    """
    file = published_file(task_name)
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
