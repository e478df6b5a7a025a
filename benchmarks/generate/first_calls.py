"""First calls of fresh processes, which compile and capture, with empty caches on disk or those of an earlier one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_fastdecode.measurement.calls import seeded, wall_seconds, what_ran
from hf_fastdecode.measurement.rows import NotAvailableError, status_of

from .calls import caller, load
from .cases import FirstCallsCase, GenerateCase
from .ways import find_way, using

_CALLS = {1: "first_call_s", 2: "second_call_s", 3: "third_call_s", 10: "tenth_call_s"}
_COLUMNS = ("status", *_CALLS.values(), "more_rows_s", "longer_prompt_s", "reused_first_token_s", "ran")
_FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_MOST_S = 900.0
_UNTIL_CAPTURED = 5
"""Calls of a prompt until its passes are captured in ``auto``."""


class FirstCallsBench:
    def __init__(self, device: torch.device):
        self.device = device
        self._filled: dict[tuple[GenerateCase, str], TemporaryDirectory[str]] = {}  # by processes with cold caches

    def measure(self, case: FirstCallsCase, way_name: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``first_call_s``, ``second_call_s``, ``third_call_s``, ``tenth_call_s``: seconds of the same call, from an idle
        device to an idle device, the model being loaded. Then in the same process: ``more_rows_s``, the first call
        with half as many samples more; ``longer_prompt_s``, the first with a prompt of twice the length.
        ``reused_first_token_s``: the median of calls of one new token with ``reuse_prefix=True``, after calls of the
        same prompt; None for ways that are not ours. ``ran``: what our report says ran in the tenth call.
        """
        result, key = dict.fromkeys(_COLUMNS), (case.call, way_name)
        folder = self._filled.pop(key, None) if case.caches == "warm" else None
        try:
            if folder is None:
                folder = self._filled[key] = TemporaryDirectory()
                found = self._in_process(case, way_name, folder.name)
            if case.caches == "warm":
                found = self._in_process(case, way_name, folder.name)
        except (OSError, subprocess.TimeoutExpired) as error:
            found = {"status": status_of(error)}
        return result | found

    def _in_process(self, case: FirstCallsCase, way_name: str, folder: str) -> dict[str, Any]:
        environment = os.environ | {name: str(Path(folder, part)) for name, part in _FOLDERS.items()}
        asked = json.dumps({"case": asdict(case.call), "way": way_name, "device": str(self.device)})
        command = [sys.executable, "-m", __name__, asked]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_MOST_S)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return {"status": f"failed: the process ended with {done.returncode}: {last[:200]}"}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def time_calls(case: GenerateCase, way_name: str, device: torch.device) -> dict[str, Any]:
    """The columns of `FirstCallsBench.measure`, in this process."""
    way = find_way(way_name)
    model = load(case.shape, device, getattr(torch, case.dtype), way.slim)

    def seconds(of: GenerateCase, new_tokens: int | None = None) -> float:
        call = caller(model, of, way)
        with seeded(device):
            return wall_seconds(lambda: call(new_tokens or of.new_tokens), device)

    with using(model, way):
        times = [seconds(case) for _ in range(max(_CALLS))]
        ran = None if way.enable is None else what_ran(model)
        more = seconds(replace(case, samples=case.samples + -(-case.samples // 2)))
        longer = seconds(replace(case, context=2 * case.context))
    reused = None
    if way.enable is not None:
        with using(model, replace(way, enable={**way.enable, "reuse_prefix": True})):
            for _ in range(_UNTIL_CAPTURED):
                seconds(case)
            reused = median(seconds(case, 1) for _ in range(5))
    calls: dict[str, float | None] = {name: times[number - 1] for number, name in _CALLS.items()}
    return {
        "status": "ok",
        **calls,
        "more_rows_s": more,
        "longer_prompt_s": longer,
        "reused_first_token_s": reused,
        "ran": ran,
    }


def main() -> None:
    """Time the calls that the argument describes, and print their columns in the last line."""
    asked = json.loads(sys.argv[1])
    try:
        found = time_calls(GenerateCase(**asked["case"]), asked["way"], torch.device(asked["device"]))
    except (NotAvailableError, ValueError, torch.OutOfMemoryError) as error:
        found = {"status": status_of(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
