"""Measures cases on the processes that torchrun started: rank 0 has the rows, and the others follow it."""

from __future__ import annotations

from typing import Any

from .attention import AttentionBench
from .cases import AttentionCase, CollectiveCase, StepCase
from .collectives import CollectiveBench
from .processes import Processes
from .steps import StepBench

ParallelCase = StepCase | AttentionCase | CollectiveCase


class ParallelBench:
    """The measurements of all processes; `measure` of rank 0 has the others do the same, until it says `finish`."""

    def __init__(self, processes: Processes, *, check: bool = True, repeats: int = 2):
        self.processes = processes
        self._steps = StepBench(processes, repeats=repeats, check=check)
        self._attention = AttentionBench(processes, check=check)
        self._collectives = CollectiveBench(processes)

    def measure(self, case: ParallelCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement, see the classes of the three kinds; on rank 0."""
        self.processes.first((case, way))
        return self._measure(case, way)

    def finish(self) -> None:
        """Let the other processes go; on rank 0."""
        self.processes.first(None)

    def follow(self) -> None:
        """Measure what rank 0 does, on another rank."""
        while (asked := self.processes.first(None)) is not None:
            self._measure(*asked)

    def _measure(self, case: ParallelCase, way: str) -> dict[str, Any]:
        # What the kind before keeps would be in the way.
        if not isinstance(case, StepCase):
            self._steps.drop()
        if not isinstance(case, AttentionCase):
            self._attention.drop()
        if isinstance(case, StepCase):
            return self._steps.measure(case, way)
        if isinstance(case, AttentionCase):
            return self._attention.measure(case, way)
        return self._collectives.measure(case, way)
