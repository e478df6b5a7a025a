"""Operators measured: every way of a case checked against the oracle, then timed against the device's ceilings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_fastdecode.measurement.calls import collect
from hf_fastdecode.measurement.rows import NotAvailableError

from ..operator_time import Ceilings, Output, in_us, measure_ceilings, time_operator
from .cases import OpCase
from .inputs import BOUND, OpInputs, Oracle, make_inputs, make_oracle, sets_needed
from .ways import OP_WAYS, OpWay, Unmerged


class OpBench:
    """Measures operators on one device; with `check`, a way is timed only if its error is within the rule."""

    def __init__(self, device: torch.device, *, check: bool = True):
        self.device, self.check = device, check
        self._prepared: tuple[OpCase, list[OpInputs], Oracle | None] | None = None

    @cached_property
    def ceilings(self) -> Ceilings:
        return measure_ceilings(self.device)

    @torch.no_grad()
    def measure(self, case: OpCase, way_name: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``us_p20``, ``us_p50``, ``us_p80``: microseconds of a call. ``bytes``, ``flops``: what it must move and compute
        at least. ``floor_us``: what that takes at the measured ceilings; ``over_floor``: the time over it.
        ``tb_per_s``, ``tflop_per_s``: rates that the time means. ``error_ratio``: times PyTorch's own error. A row
        whose ``status`` is not ``ok`` has no times, and the status says why.
        """
        way = OP_WAYS[way_name]
        part = way.part(case)
        result: dict[str, Any] = {"status": "ok", "variant": None, "us_p20": None, "us_p50": None, "us_p80": None}
        result |= self._accounting(part)
        if reason := way.not_run(case, self.device):
            return result | {"status": f"not run: {reason}"}
        for _ in range(2):  # what earlier ways left in pools may have been in the way
            try:
                return result | self._timed(part, way)
            except torch.OutOfMemoryError:
                self.drop_inputs()
                collect()
            except NotAvailableError as error:
                return result | {"status": f"not run: {error}"}
        return result | {"status": "does not fit"}

    def _accounting(self, case: OpCase) -> dict[str, Any]:
        itemsize = getattr(torch, case.dtype).itemsize
        return {
            "over_floor": None,
            "tb_per_s": None,
            "tflop_per_s": None,
            "bytes": case.bytes(itemsize),
            "flops": case.flops,
            "floor_us": 1e6 * self.ceilings.floor_s(case, itemsize),
            "copy_tb_per_s": self.ceilings.bytes_per_s / 1e12,
            "matmul_tflop_per_s": self.ceilings.flops_per_s / 1e12,
            "error_ratio": None,
        }

    def _timed(self, case: OpCase, way: OpWay) -> dict[str, Any]:
        inputs, oracle = self._inputs(case)
        if way.copies:
            inputs = inputs[: self._sets_of_copies(case, len(inputs))]
        found = []
        for variant, calls in way.variants(inputs).items():
            row = {"variant": variant} | time_if_right(
                calls, self.device, lambda output: self._error(output, oracle, way), variant
            )
            if "status" in row:
                return row
            found.append(row)
            del calls
        best = min(found, key=lambda row: row["us_p50"])
        itemsize, us = getattr(torch, case.dtype).itemsize, best["us_p50"]
        return best | {
            "over_floor": us / (1e6 * self.ceilings.floor_s(case, itemsize)),
            "tb_per_s": case.bytes(itemsize) / us / 1e6,
            "tflop_per_s": case.flops / us / 1e6,
        }

    def _error(self, output: Tensor | Unmerged, oracle: Oracle | None, way: OpWay) -> float | None:
        if oracle is None:
            return None
        return oracle.error(output if isinstance(output, Tensor) else output.result(), way.yardstick)

    def _inputs(self, case: OpCase) -> tuple[Sequence[OpInputs], Oracle | None]:
        """Inputs and oracle of a case; kept until another case asks."""
        if self._prepared is None or self._prepared[0] != case:
            self._prepared = None
            inputs = make_inputs(case, self.device)
            self._prepared = case, inputs, make_oracle(inputs[0]) if self.check else None
        return self._prepared[1:]

    def _sets_of_copies(self, case: OpCase, most: int) -> int:
        """Number of sets of copies to make; OutOfMemoryError if they would not fit, as finding out takes seconds."""
        size = case.copied_bytes(getattr(torch, case.dtype).itemsize)
        sets = min(most, sets_needed(size, self.device))
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if sets * size > 0.95 * free:
                raise torch.OutOfMemoryError(f"{sets * size} bytes of copies, {free} are free")
        return sets

    def drop_inputs(self) -> None:
        self._prepared = None


def time_if_right(
    calls: Sequence[Callable[[], Output]],
    device: torch.device,
    error_of: Callable[[Output], float | None],
    name: str = "it",
) -> dict[str, Any]:
    """Times of calls as columns, if the error of what they compute is within the rule before and after; else a status.

    `error_of` gives how many times PyTorch's own error an output errs, or None where it is not checked.
    """
    error = error_of(calls[0]())
    if error is not None and not error <= BOUND:
        status = f"wrong: {name} errs {error:.2f} times PyTorch's error, at most {BOUND:g} is right"
        return {"status": status, "error_ratio": error}
    times, output = time_operator(calls, device)
    again = error_of(output)
    if again is not None and not again <= BOUND:
        status = f"wrong: {name} errs {again:.2f} times PyTorch's error when it is repeated"
        return {"status": status, "error_ratio": again}
    return in_us(times) | {"error_ratio": error}
