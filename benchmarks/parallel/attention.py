"""Attention of a layer stack measured: each way checked against the oracle, then timed on all processes at once."""

from __future__ import annotations

from typing import Any

import torch

from hf_fastdecode.measurement.calls import Times, begin_peak, collect
from hf_fastdecode.measurement.rows import status_of

from ..operator_time import in_us
from ..ops.inputs import BOUND, Oracle, make_oracle
from . import cases as volumes
from .attention_ways import Stack, first_layer, make_stack, make_step
from .cases import AttentionCase
from .processes import OneProcess, PeerStatusError, Processes, counted_sends, time_together

_BUDGET_S = 0.4  # of timing a way


class AttentionBench:
    """Measures attention on the processes, all of which call it alike; with `check`, a way is timed only if it is
    right."""

    def __init__(self, processes: Processes, *, check: bool = True):
        self.processes, self.check = processes, check
        self._stack: tuple[tuple[AttentionCase, bool], Stack | None] | None = None  # whether it has whole contexts
        self._checked: AttentionCase | None = None  # whose oracle rank 0 has
        self._oracle: tuple[AttentionCase, Oracle] | None = None
        self._without: tuple[AttentionCase, Times] | None = None

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
        self._stack = None
        collect()

    def _measured(self, case: AttentionCase, way: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        stack = self._inputs(case, whole=way == "one-gpu")
        if way == "one-gpu":
            found: dict[str, Any] = self.processes.first(self.processes.alone(lambda: self._alone(case, stack)))
            return found
        assert stack is not None
        begin_peak(self.processes.device)
        step = self.processes.together(lambda: make_step(way, stack, self.processes))
        with counted_sends(self.processes.count) as sent:
            outputs = step()
        result["sent_bytes"] = sum(sent)
        errors = self._errors(case, outputs[0]) if way != "no-communication" else None
        del outputs
        if errors is not None:
            result["error_ratio"] = max(errors)
            if red := _red(max(errors)):
                return result | red
        times, captured = time_together(self.processes, step, budget_s=_BUDGET_S)
        result |= {"captured": captured, "peak_bytes": self._peak()} | _columns(case, times)
        if way == "no-communication":
            self._without = case, times
        elif self._without is None or self._without[0] != case:
            alone = self.processes.together(lambda: make_step("no-communication", stack, self.processes))
            self._without = case, time_together(self.processes, alone, budget_s=_BUDGET_S)[0]
        result["communication_share"] = max(0.0, 1 - self._without[1].p50 / times.p50)
        return result

    def _alone(self, case: AttentionCase, stack: Stack | None) -> dict[str, Any]:
        """The whole context on this process, while the others wait."""
        assert stack is not None
        device = self.processes.device
        begin_peak(device)
        step = make_step("one-gpu", stack, self.processes)
        result: dict[str, Any] = {"sent_bytes": 0, "communication_share": 0.0}
        if self._oracle is not None and self.check:
            result["error_ratio"] = error = self._oracle[1].error(step()[0])
            if red := _red(error):
                return result | red
        times, captured = time_together(OneProcess(device), step, budget_s=_BUDGET_S)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return result | {"captured": captured, "peak_bytes": peak} | _columns(case, times)

    def _make_oracle(self, case: AttentionCase) -> None:
        self._oracle = None
        self._oracle = case, make_oracle(first_layer(case, self.processes.device))
        collect()

    def _inputs(self, case: AttentionCase, *, whole: bool) -> Stack | None:
        """The layers with this rank's part of each context, or with all of it on rank 0 and none on the others.

        They are kept until another way asks for others; the oracle is made while nothing is held.
        """
        if self._stack is None or self._stack[0] != (case, whole):
            self.drop()
            if self.check and self._checked != case:
                self.processes.alone(lambda: self._make_oracle(case))
                self._checked = case
            rank, device = self.processes.rank, self.processes.device

            def make() -> Stack | None:
                if whole:
                    return make_stack(case, device, None) if rank == 0 else None
                return make_stack(case, device, rank)

            self._stack = (case, whole), self.processes.together(make)
        return self._stack[1]

    def _errors(self, case: AttentionCase, output: torch.Tensor) -> list[float] | None:
        """The error of each rank's output, found on rank 0."""
        if not self.check:
            return None
        outputs = self.processes.gathered(output.cpu())
        found = None
        if self._oracle is not None and self.processes.rank == 0:
            found = [self._oracle[1].error(one.to(self.processes.device)) for one in outputs]
        errors: list[float] = self.processes.first(found)
        return errors

    def _peak(self) -> int | None:
        if self.processes.device.type != "cuda":
            return None
        return max(self.processes.gathered(torch.cuda.max_memory_allocated(self.processes.device)))

    def _paper(self, case: AttentionCase, way: str) -> dict[str, Any]:
        """The bytes of a way by the paper's equations, for all layers."""
        size = getattr(torch, case.dtype).itemsize
        stored = volumes.stored_bytes(case, size)
        if way.startswith("ring") and way != "ring-partials":
            sent, besides = volumes.ring_volume(case, size), volumes.ring_memory(case, size) - stored
        elif way in ("tree", "three-all-reduces"):
            sent, besides = volumes.tree_volume(case), volumes.tree_memory(case, size) - stored
        else:
            return {}
        return {"paper_sent_bytes": case.layers * sent, "paper_bytes": case.layers * stored + besides}


_COLUMNS = (
    *("status", "us_p20", "us_p50", "us_p80", "us_per_step", "communication_share", "captured"),
    *("sent_bytes", "paper_sent_bytes", "peak_bytes", "paper_bytes", "error_ratio"),
)


def _red(error: float) -> dict[str, Any] | None:
    """The status of a way that errs too much, else None."""
    if error <= BOUND:
        return None
    return {"status": f"wrong: it errs {error:.2f} times PyTorch's error, at most {BOUND:g} is right"}


def _columns(case: AttentionCase, times: Times) -> dict[str, Any]:
    layer = Times(*(seconds / case.layers for seconds in times))
    return {**in_us(layer), "us_per_step": 1e6 * times.p50}
