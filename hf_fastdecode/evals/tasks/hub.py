"""Published tasks through `datasets`: from the hub, or from the repository that publishes the files."""

from __future__ import annotations

from typing import Any

from hf_fastdecode.errors import CommandError, one_line

from ...files import Record
from .published import PublishedFile, published_file


def hub_records(task_name: str) -> tuple[list[Record], str, str]:
    """All records of a published data set, in order of their ids.

    Args:
        task_name: Of the data set.

    Returns:
        The records, where they come from, and a line for people if there are more or fewer than were published.

    Raises:
        CommandError: They cannot be had, such as without a network; the remedy is a local file.
    """
    file = published_file(task_name)
    origin = f"{file.hub[0]} ({file.hub[1]})" if file.hub else file.url
    try:
        rows = _rows(file)
    except Exception as error:  # of the network, the hub's clients and the file formats: they share no base class
        raise CommandError(
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
