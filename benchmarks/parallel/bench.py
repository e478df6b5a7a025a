"""Measures cases on the processes that torchrun started: steps, attention and collectives; rank 0 has the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hf_fastdecode._compat import all_gather_vectors
from hf_fastdecode.measurement.calls import Times, begin_peak, guarded

from ..latest import Latest
from ..operator_time import in_us
from ..ops.inputs import BOUND, Oracle, make_oracle
from .attention_ways import Stack, first_layer, make_stack, make_step, pass_on
from .cases import AttentionCase, CollectiveCase, StepCase, paper_bytes
from .processes import OneProcess, Processes, counted_sends, guarded_by_all, time_together
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
        if isinstance(case, StepCase):
            self._attention.drop()  # what the kind before keeps would be in the way
            return self._steps.measure(case, way)
        self._steps.drop()
        if isinstance(case, AttentionCase):
            return self._attention.measure(case, way)
        self._attention.drop()
        return self._collectives.measure(case, way)


_BUDGET_S = 0.4  # of timing a way of attention


class AttentionBench:
    """Measures attention on the processes, all of which call it alike; with `check`, a way is timed only if it is
    right."""

    def __init__(self, processes: Processes, *, check: bool = True):
        self.processes, self.check = processes, check
        self._stack: Latest[Any] = Latest()  # by case, and whether it has whole contexts
        self._oracle: Latest[Oracle | None] = Latest()  # None but on rank 0
        self._without: Latest[Times] = Latest()

    @torch.no_grad()
    def measure(self, case: AttentionCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``us_p20``, ``us_p50``, ``us_p80``: microseconds of a layer, a step's over the number of layers, of the slowest
        process. ``us_per_step``: of all layers. ``communication_share``: what a step takes longer than without
        communication, over the step. ``captured``: whether a CUDA graph replayed it. ``sent_bytes``: that a rank sends
        in a step, counted; ``paper_sent_bytes``: by the paper's equations 10 and 14. ``peak_bytes``: most memory of a
        process, keys and values among it; ``paper_bytes``: those of all layers, and what one layer needs besides by
        equations 8 and 9. ``error_ratio``: times PyTorch's own error, the largest of all ranks.
        """
        return guarded_by_all(_COLUMNS, self.drop, lambda: self._paper(case, way) | self._measured(case, way))

    def drop(self) -> None:
        self._stack.drop()

    def _measured(self, case: AttentionCase, way: str) -> dict[str, Any]:
        stack = self._inputs(case, whole=way == "one-gpu")
        if way == "one-gpu":  # while the others wait
            alone = OneProcess(self.processes.device)
            found = self.processes.first(self.processes.alone(lambda: self._timed(case, way, stack, alone)[0]))
            return {"communication_share": 0.0, **found}
        result, times = self._timed(case, way, stack, self.processes)
        if times is None:
            return result

        def without() -> Times:
            if way == "no-communication":
                return times
            alone = self.processes.together(lambda: make_step("no-communication", stack, self.processes))
            return time_together(self.processes, alone, budget_s=_BUDGET_S)[0]

        if way == "no-communication":
            self._without.drop()
        least = self._without.of(case, without)
        return result | {"communication_share": max(0.0, 1 - least.p50 / times.p50)}

    def _timed(
        self, case: AttentionCase, way: str, stack: Stack, processes: Processes | OneProcess
    ) -> tuple[dict[str, Any], Times | None]:
        """Columns of a way, and its times if it is right."""
        device = processes.device
        begin_peak(device)
        step = processes.together(lambda: make_step(way, stack, self.processes))
        with counted_sends(processes.count) as sent:
            outputs = step()
        result: dict[str, Any] = {"sent_bytes": sum(sent)}
        if self.check and way != "no-communication":
            result["error_ratio"] = error = self._error(outputs[0], processes)
            if not error <= BOUND:
                status = f"wrong: it errs {error:.2f} times PyTorch's error, at most {BOUND:g} is right"
                return result | {"status": status}, None
        del outputs
        times, captured = time_together(processes, step, budget_s=_BUDGET_S)
        peak = max(processes.gathered(torch.cuda.max_memory_allocated(device))) if device.type == "cuda" else None
        layer = Times(*(seconds / case.layers for seconds in times))
        return result | {
            "captured": captured,
            "peak_bytes": peak,
            **in_us(layer),
            "us_per_step": 1e6 * times.p50,
        }, times

    def _inputs(self, case: AttentionCase, *, whole: bool) -> Any:
        """The layers with this rank's part of each context, or with all of it, which rank 0 alone makes.

        The oracle is made while nothing is held.
        """
        rank, device = self.processes.rank, self.processes.device

        def make() -> Stack | None:
            if self.check:
                self._oracle.of(case, lambda: self.processes.alone(lambda: make_oracle(first_layer(case, device))))
            if whole:
                return self.processes.alone(lambda: make_stack(case, device, None))
            return self.processes.together(lambda: make_stack(case, device, rank))

        return self._stack.of((case, whole), make)

    def _error(self, output: torch.Tensor, processes: Processes | OneProcess) -> float:
        """The largest error of all ranks' outputs, found on rank 0."""
        outputs, found = processes.gathered(output.cpu()), None
        if self._oracle.value is not None:
            oracle = self._oracle.value
            found = max(oracle.error(one.to(processes.device)) for one in outputs)
        error: float = processes.first(found)
        return error

    def _paper(self, case: AttentionCase, way: str) -> dict[str, Any]:
        size = getattr(torch, case.dtype).itemsize
        name = {"ring": "ring", "tree": "tree", "three-all-reduces": "tree"}.get(way)
        if name is None:
            return {}
        stored = case.stored_bytes(size)
        sent, held = paper_bytes(case, size)[name]
        return {"paper_sent_bytes": case.layers * sent, "paper_bytes": (case.layers - 1) * stored + held}


_COLUMNS = (
    *("status", "us_p20", "us_p50", "us_p80", "us_per_step", "communication_share", "captured"),
    *("sent_bytes", "paper_sent_bytes", "peak_bytes", "paper_bytes", "error_ratio"),
)


_IN_A_ROW = 32  # in one graph, as many as a model has layers
_COLLECTIVES_BUDGET_S = 0.1
_COLLECTIVE_COLUMNS = ("status", "us_p20", "us_p50", "us_p80", "sent_bytes", "gb_per_s", "captured")


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
        return guarded(_COLLECTIVE_COLUMNS, lambda: self._measured(case, way))

    def _measured(self, case: CollectiveCase, way: str) -> dict[str, Any]:
        call = self._call(case, way)
        with counted_sends(self.processes.count) as sent:
            call()
        row = lambda: [call() for _ in range(_IN_A_ROW)]  # noqa: E731
        times, captured = time_together(self.processes, row, budget_s=_COLLECTIVES_BUDGET_S)
        one = Times(*(seconds / _IN_A_ROW for seconds in times))
        rate = sum(sent) / one.p50 / 1e9
        return in_us(one) | {"sent_bytes": sum(sent), "gb_per_s": rate, "captured": captured}

    def _call(self, case: CollectiveCase, way: str) -> Callable[[], object]:
        processes = self.processes
        given = torch.ones(case.bytes // 4, device=processes.device)
        if way == "all-gather":
            gathered = given.new_empty(processes.count * len(given))
            return lambda: all_gather_vectors(gathered, given, group=processes.group)
        if way == "all-reduce":
            given.zero_()  # whose sum stays finite
            return lambda: dist.all_reduce(given, group=processes.group)
        received = torch.empty_like(given)
        return lambda: pass_on(given, received, processes)()
