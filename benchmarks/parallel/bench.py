"""Measures cases on the processes that torchrun started, collectives alone among them; rank 0 has the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hf_fastdecode.measurement.calls import Times
from hf_fastdecode.measurement.rows import status_of
from hf_fastdecode.parallel import shards

from ..operator_time import in_us
from .attention import AttentionBench
from .attention_ways import pass_on
from .cases import AttentionCase, CollectiveCase, StepCase
from .processes import Processes, counted_sends, time_together
from .steps import StepBench

ParallelCase = StepCase | AttentionCase | CollectiveCase


class ParallelBench:
    """The measurements of all processes; `measure` of rank 0 has the others do the same, until it says `finish`."""

    def __init__(self, processes: Processes, *, check: bool = True, repeats: int = 2):
        self.processes, self.device = processes, processes.device
        self._steps = StepBench(processes, repeats=repeats, check=check)
        self._attention = AttentionBench(processes, check=check)
        self._collectives = CollectiveBench(processes)

    def measure(self, case: ParallelCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement, see the classes of the three kinds; on rank 0."""
        self.processes.first((case, way))
        return self._measure(case, way)

    def finish(self) -> None:
        self.processes.first(None)

    def follow(self) -> None:
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


_IN_A_ROW = 32  # in one graph, as many as a model has layers
_BUDGET_S = 0.1


class CollectiveBench:
    """Measures collectives on the processes, all of which call it alike."""

    def __init__(self, processes: Processes):
        self.processes = processes

    @torch.no_grad()
    def measure(self, case: CollectiveCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``us_p20``, ``us_p50``, ``us_p80``: microseconds of one of 32 in a row, of the slowest process.
        ``sent_bytes``: that a rank sends. ``gb_per_s``: these over the median. ``captured``: whether a CUDA graph
        replayed them.
        """
        result: dict[str, Any] = {"status": "ok"}
        result |= dict.fromkeys(("us_p20", "us_p50", "us_p80", "sent_bytes", "gb_per_s", "captured"))
        try:
            call = self._call(case, way)
            with counted_sends(self.processes.count) as sent:
                call()
            times, captured = time_together(
                self.processes, lambda: [call() for _ in range(_IN_A_ROW)], budget_s=_BUDGET_S
            )
        except Exception as error:
            return result | {"status": status_of(error)}
        one = Times(*(seconds / _IN_A_ROW for seconds in times))
        rate = sum(sent) / one.p50 / 1e9
        return result | in_us(one) | {"sent_bytes": sum(sent), "gb_per_s": rate, "captured": captured}

    def _call(self, case: CollectiveCase, way: str) -> Callable[[], object]:
        processes = self.processes
        given = torch.ones(case.bytes // 4, device=processes.device)
        if way == "all-gather":
            gathered = given.new_empty(processes.count * len(given))
            return lambda: shards.all_gather(gathered, given, group=processes.group)
        if way == "all-reduce":
            given.zero_()  # whose sum stays finite
            return lambda: dist.all_reduce(given, group=processes.group)
        received = torch.empty_like(given)
        return lambda: pass_on(given, received, processes)()
