"""Attention of a layer stack measured: each way checked against the oracle, then timed on all processes at once."""

from __future__ import annotations

from typing import Any

import torch

from hf_fastdecode.measurement.calls import Times, begin_peak, collect
from hf_fastdecode.measurement.rows import status_of

from ..latest import Latest
from ..operator_time import in_us
from ..ops.inputs import BOUND, Oracle, make_oracle
from .attention_ways import Stack, first_layer, make_stack, make_step
from .cases import AttentionCase, paper_bytes
from .processes import OneProcess, PeerStatusError, Processes, counted_sends, time_together

_BUDGET_S = 0.4  # of timing a way


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
        result: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"status": "ok"}
        try:
            return result | self._paper(case, way) | self._measured(case, way)
        except Exception as error:
            self.drop()
            return result | {"status": str(error) if isinstance(error, PeerStatusError) else status_of(error)}
        finally:
            collect()

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
        """The bytes of a way by the paper's equations, for all layers."""
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
