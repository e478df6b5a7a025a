"""Operators measured: every way of a case checked against the oracle, then timed against the device's ceilings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_fastdecode.measurement.rows import NotAvailableError

from ..latest import Latest
from ..operator_time import OperatorBench, Output, in_us, time_operator
from .cases import OpCase
from .inputs import BOUND, OpInputs, Oracle, make_inputs, make_oracle, sets_needed
from .ways import OP_WAYS, OpWay, Unmerged


class OpBench(OperatorBench):
    """Measures operators on one device."""

    def __init__(self, device: torch.device, *, check: bool = True):
        super().__init__(device, check=check)
        self.inputs: Latest[tuple[Sequence[OpInputs], Oracle | None]] = Latest()

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
        itemsize = getattr(torch, part.dtype).itemsize
        result: dict[str, Any] = dict.fromkeys(_COLUMNS) | {
            "status": "ok",
            "bytes": part.bytes(itemsize),
            "flops": part.flops,
            "floor_us": 1e6 * self.ceilings.floor_s(part, itemsize),
            "copy_tb_per_s": self.ceilings.bytes_per_s / 1e12,
            "matmul_tflop_per_s": self.ceilings.flops_per_s / 1e12,
        }
        if reason := way.not_run(case, self.device):
            return result | {"status": f"not run: {reason}"}
        for _ in range(2):  # what earlier ways left in pools may have been in the way
            try:
                result |= self._timed(part, way)
            except torch.OutOfMemoryError:
                self.inputs.drop()
                continue
            except NotAvailableError as error:
                return result | {"status": f"not run: {error}"}
            if us := result["us_p50"]:
                result |= {"over_floor": us / result["floor_us"], "tb_per_s": result["bytes"] / us / 1e6}
                result["tflop_per_s"] = part.flops / us / 1e6
            return result
        return result | {"status": "does not fit"}

    def _timed(self, case: OpCase, way: OpWay) -> dict[str, Any]:
        def make() -> tuple[Sequence[OpInputs], Oracle | None]:
            made = make_inputs(case, self.device)
            return made, make_oracle(made[0]) if self.check else None

        inputs, oracle = self.inputs.of((case, self.check), make)
        if way.copies:
            inputs = inputs[: self._sets_of_copies(case, len(inputs))]

        def error_of(output: Tensor | Unmerged) -> float | None:
            whole = output if isinstance(output, Tensor) else output.result()
            return None if oracle is None else oracle.error(whole, way.yardstick)

        found = []
        for variant, calls in way.variants(inputs).items():
            row = {"variant": variant} | time_if_right(calls, self.device, error_of, variant)
            if "status" in row:
                return row
            found.append(row)
            del calls
        return min(found, key=lambda row: row["us_p50"])

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


_COLUMNS = (
    *("status", "variant", "us_p20", "us_p50", "us_p80", "over_floor", "tb_per_s", "tflop_per_s", "bytes", "flops"),
    *("floor_us", "copy_tb_per_s", "matmul_tflop_per_s", "error_ratio"),
)


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
