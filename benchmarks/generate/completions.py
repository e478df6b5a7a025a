"""Time of a step while completions grow: one call of `generate`, timed at several lengths of its completions."""

from __future__ import annotations

import time
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from hf_fastdecode.generation.decoding.stopping import HostStoppingCriteria
from hf_fastdecode.measurement.calls import begin_peak, collect, idle_time, peak_over, seeded, synchronize, what_ran
from hf_fastdecode.measurement.rows import status_of

from ..ops.ceilings import measure_ceilings
from .calls import LatestModel, caller, kv_bytes_per_token
from .cases import CompletionCase, GenerateCase
from .check import check_way
from .ways import GenerateWay, find_way, using

_WARM_UP = 24  # tokens of the calls that capture and compile
_STEPS_BETWEEN_LOOKS = 64  # between comparisons with the budget, each of which synchronizes with the device


class CompletionBench:
    """Measures growing completions on one device; with `check`, one of our ways only after its check.

    A call ends after `budget_s` seconds of decoding; spans that it did not finish have no time.
    """

    def __init__(self, device: torch.device, *, check: bool = True, budget_s: float = 120.0):
        self.device, self.check, self.budget_s = device, check, budget_s
        self._model = LatestModel(device)
        self._timed: dict[tuple[GenerateCase, tuple[int, ...], str], dict[str, Any]] = {}

    def measure(self, case: CompletionCase, way_name: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``ms_per_step``: mean over the steps of the span. ``kv_floor_ms``: what reading the keys and values of a step
        takes at the rate of a copy, measured in the same run; of a slim model those of the ordinary one.
        ``peak_bytes``: most memory over the weights in the whole call. ``ran``: what our report says ran.
        """
        key = case.call, case.marks, way_name
        if key not in self._timed:  # once for all spans of the call
            self._timed[key] = self._time(case, find_way(way_name))
        found = dict(self._timed[key])
        times, bytes_per_token = found.pop("times", {}), found.pop("bytes_per_token", 0)
        result = dict.fromkeys(_COLUMNS) | found
        if result["status"] != "ok":
            return result
        if case.span not in times:
            return result | {"status": f"not run: cut short after {self.budget_s:g} s"}
        floor_s = case.kv_tokens() * bytes_per_token / self._copy_rate
        return result | {"ms_per_step": times[case.span], "kv_floor_ms": 1e3 * floor_s}

    @cached_property
    def _copy_rate(self) -> float:
        return measure_ceilings(self.device).bytes_per_s

    def _time(self, case: CompletionCase, way: GenerateWay) -> dict[str, Any]:
        dtype = getattr(torch, case.call.dtype)
        if self.check and way.exact and way.enable is not None and (red := check_way(way, self.device, dtype)):
            return {"status": red}
        try:
            return self._measured(case, way)
        except Exception as error:
            return {"status": status_of(error)}

    def _measured(self, case: CompletionCase, way: GenerateWay) -> dict[str, Any]:
        model = self._model.of(case.call, way)
        collect()
        before = begin_peak(self.device)
        with using(model, way):
            call = caller(model, case.call, way)
            for _ in range(1 + way.compiles):  # compilers record in the second call
                call(_WARM_UP)
            collect()
            begin_peak(self.device)
            clock = StepClock(case.call.context, case.marks, self.device, self.budget_s)
            with seeded(self.device):
                caller(model, case.call, way, stopping=clock)(case.call.new_tokens)
            ran = None if way.enable is None else what_ran(model)
        return {
            "status": "ok",
            "times": clock.ms_per_step(),
            "bytes_per_token": kv_bytes_per_token(model),
            "peak_bytes": peak_over(self.device, before),
            "ran": ran,
        }


_COLUMNS = ("status", "ms_per_step", "kv_floor_ms", "peak_bytes", "ran")


class StepClock(HostStoppingCriteria):
    """Times a call when its completions have `marks` tokens, and ends it after `budget_s` seconds.

    CUDA events take the time, so that steps do not wait for the host.
    """

    def __init__(self, prompt_length: int, marks: tuple[int, ...], device: torch.device, budget_s: float):
        self.prompt_length, self.marks, self.device, self.budget_s = prompt_length, marks, device, budget_s
        self._taken: dict[int, Any] = {}
        self._start: float | None = None

    def is_over(self, length: int) -> bool:
        """Take the time if the length is at a mark; return whether the call has taken too long."""
        tokens = length - self.prompt_length
        if tokens in self.marks:
            self._taken[tokens] = self._now()
        if tokens % _STEPS_BETWEEN_LOOKS:
            return False
        now = idle_time(self.device)
        self._start = self._start or now
        return now - self._start > self.budget_s

    def ms_per_step(self) -> dict[tuple[int, int], float]:
        """Milliseconds of a step in each span that was finished."""
        synchronize(self.device)
        return {
            (first, last): self._ms(self._taken[first], self._taken[last]) / (last - first)
            for first, last in pairwise(self.marks)
            if last in self._taken
        }

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _ms(self, before: Any, after: Any) -> float:
        if self.device.type != "cuda":
            return 1e3 * float(after - before)
        return float(before.elapsed_time(after))
