"""Runs in two processes what `test_measured` looks at, and writes what each of them found."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops.inputs import make_oracle
from benchmarks.parallel.attention_ways import first_layer, make_stack, make_step
from benchmarks.parallel.bench import ParallelBench, ParallelCase
from benchmarks.parallel.cases import ATTENTION_WAYS, STEP_WAYS, AttentionCase, CollectiveCase, StepCase
from benchmarks.parallel.processes import Processes, counted_sends

from ...interpreter import make_faster

CASE = AttentionCase("small", 64, rows=2, layers=1, heads=4, kv_heads=2, head_dim=32, ranks=2, dtype="float32")
STEPS = StepCase("tiny", 80, rows=2, ranks=2, new_tokens=3, fill="random", dtype="float32")


def attention(processes: Processes) -> dict[str, Any]:
    """Each way's error over PyTorch's, and the bytes that it sends."""
    oracle, found = make_oracle(first_layer(CASE, processes.device)), {}
    for way in ATTENTION_WAYS:
        alone = way == "one-gpu"
        if alone and processes.rank:
            continue
        step = make_step(way, make_stack(CASE, processes.device, None if alone else processes.rank), processes)
        with counted_sends(processes.count) as sent:
            (out,) = step()
        found[way] = oracle.error(out), sum(sent)
    return found


def measured(processes: Processes) -> dict[str, Any]:
    """Rows of each kind, on rank 0; another rank follows."""
    bench = ParallelBench(processes, check=False, repeats=1)
    if processes.rank:
        bench.follow()
        return {}
    asked: list[tuple[ParallelCase, str]] = [(STEPS, way) for way in STEP_WAYS]
    asked += [(CollectiveCase(1 << 14, 2), "all-gather"), (CASE, "no-communication")]
    found = {f"{case.columns()['case']} {way}": bench.measure(case, way) for case, way in asked}
    bench.finish()
    return found


def main(out: str) -> None:
    make_faster()
    gc.freeze()  # collections that a bench asks for leave out modules
    rank = int(os.fork() == 0)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    processes = Processes(torch.device("cpu"))
    found = {"attention": attention(processes), "measured": measured(processes)}
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    processes.gathered(None)
    if rank:
        os._exit(0)
    assert os.wait()[1] == 0
    sys.stdout.flush()
    os._exit(0)
