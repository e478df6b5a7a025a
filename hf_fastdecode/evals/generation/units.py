"""Units of work: which samples one call of `generate` draws, and from which seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import CommandError
from ..settings import SAMPLES


@dataclass(frozen=True)
class Unit:
    """The samples of one call.

    Attributes:
        tasks: Numbers of the tasks in the run.
        first: Index of the first sample of each task.
        count: Samples of each task.
    """

    tasks: tuple[int, ...]
    first: int
    count: int

    def seed(self, run_seed: int, task_ids: Sequence[str]) -> int:
        """The call's seed, from that of the run, the ids of its tasks and its first sample."""
        text = "\n".join([str(run_seed), str(self.first), *(task_ids[task] for task in self.tasks)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def samples(self) -> Iterator[tuple[int, int]]:
        """Task number and index of each sample, in the order of the call's rows."""
        return ((task, self.first + offset) for task in self.tasks for offset in range(self.count))


def units_of(tasks: int, n: int, rows: int) -> list[Unit]:
    """Divide a run into calls of at most `rows` rows.

    Args:
        tasks: Number of tasks.
        n: Samples of each.
        rows: Most rows of a call. Several tasks share a call where their samples fit, and a task's samples come in
            chunks where they do not.
    """
    if n >= rows:
        chunks = [(first, min(rows, n - first)) for first in range(0, n, rows)]
        return [Unit((task,), first, count) for task in range(tasks) for first, count in chunks]
    together = rows // n
    return [Unit(tuple(range(first, min(first + together, tasks))), 0, n) for first in range(0, tasks, together)]


@dataclass(frozen=True)
class Shard:
    """One of several processes that share a run.

    Attributes:
        number: From 1.
        count: Of all.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``i/N``.

        Raises:
            CommandError: It is not of that form, or `i` is not between 1 and `N`.
        """
        number, slash, count = text.partition("/")
        if not (
            slash and text.isascii() and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)
        ):
            raise CommandError(f"`shard` must be i/N with i from 1 to N, such as 1/4, got {text!r}")
        return cls(int(number), int(count))

    def own(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that this process draws."""
        return list(units[self.number - 1 :: self.count])

    @property
    def file_name(self) -> str:
        """Where its samples go; those of several shards are merged into that of one."""
        return SAMPLES if self.count == 1 else f"samples-{self.number}-of-{self.count}.jsonl"


WHOLE = Shard()
"""One process for all of a run."""
