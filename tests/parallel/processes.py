"""Runs scenarios in two or more processes that compute together, and brings back what each saw.

Processes start once for all scenarios of some files. A scenario is a function of the models, marked by `scenario`; it
returns what JSON holds.
"""

from __future__ import annotations

import gc
import json
import os
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_fastdecode.parallel import sequence

from ..fresh_processes import run_fresh
from ..interpreter import make_faster, merging_two_at_once
from ..ports import place_of
from ..short_calls import share_short_calls

SECONDS = 180
"""Time limit of a communication, after which a scenario fails that left the other processes waiting."""

FEW_TOKENS = 2
"""Consecutive tokens of a suffix on one rank, in scenarios on the CPU: short suffixes are divided too."""


@dataclass
class Models:
    """The models of a scenario by the names of their folders, in one of its processes."""

    rank: int
    group: ProcessGroup
    split: Mapping[str, PreTrainedModel]  # computed by all processes together, by tensor parallelism
    alone: Mapping[str, PreTrainedModel]  # the same, computed by this process


@dataclass(frozen=True)
class Seen:
    """The value that a scenario returned in a process, or the error's class and text, and where it was raised."""

    value: Any = None
    error: str = ""
    trace: str = field(default="", compare=False)


class _Scenario(NamedTuple):
    run: Callable[[Models], Any]
    ranks: int


_SCENARIOS: dict[str, _Scenario] = {}


def scenario(function: Callable[[Models], Any]) -> Callable[[Models], Any]:
    """Let a function run in two processes."""
    add_scenario(function.__name__, function)
    return function


def add_scenario(name: str, function: Callable[[Models], Any], ranks: int = 2) -> None:
    """Let a function run in so many processes, under this name."""
    if name in _SCENARIOS:
        raise ValueError(f"two scenarios are called {name!r}")
    _SCENARIOS[name] = _Scenario(function, ranks)


def run_scenarios(
    files: list[str], folders: Mapping[str, Path], out: Path, *, ranks: Sequence[int] = (2,), backend: str = "gloo"
) -> dict[str, tuple[Seen, ...]]:
    """Run scenarios of test modules, over models in these folders; returns what each rank saw, from 0.

    Args:
        out: A folder for results.
        ranks: Of how many processes the scenarios are; as many start as the largest asks for.
        backend: ``gloo`` on the CPU, or ``nccl`` with a GPU for each process.
    """
    code = "import json, sys; from tests.parallel.processes import run; run(*map(json.loads, sys.argv[1:]))"
    given = {name: str(folder) for name, folder in folders.items()}
    arguments = map(json.dumps, (files, given, str(out), sorted(ranks), backend))
    count = max(ranks)
    environment = place_of(count)
    if backend == "gloo":
        # Where there is a GPU, tensor parallelism takes it; kernels are interpreted as in other tests on the CPU.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = run_fresh(code, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [json.loads((out / f"{rank}.json").read_text()) for rank in range(count)]
    return {name: tuple(Seen(**one[name]) for one in seen if name in one) for name in seen[0]}


def run(files: list[str], folders: dict[str, str], out: str, ranks: list[int], backend: str) -> None:
    """Run the modules' scenarios in this process and in forks of it, each with a GPU of its own for ``nccl``."""
    from importlib import import_module

    with ExitStack() as changes:
        if backend == "gloo":
            make_faster()
            changes.enter_context(merging_two_at_once())
            sequence.SUFFIX_BLOCK = FEW_TOKENS
        share_short_calls()
        for file in files:
            import_module(f"tests.parallel.{file}")
        gc.freeze()  # collections that code asks for leave out modules
        _run_all(folders, out, ranks, backend)


def _run_all(folders: dict[str, str], out: str, ranks: list[int], backend: str) -> None:
    rank, count = 0, max(ranks)
    for other in range(1, count):
        if os.fork() == 0:
            rank = other
            break
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of tp_plan
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, timeout=timedelta(seconds=SECONDS))
    whole = distributed.group.WORLD
    groups = {size: whole if size == count else distributed.new_group(list(range(size))) for size in ranks}
    load = AutoModelForCausalLM.from_pretrained
    split = {name: load(path, tp_plan="auto").eval() for name, path in folders.items()}
    alone = {name: load(path).to(device).eval() for name, path in folders.items()}
    seen: dict[str, dict[str, Any]] = {}
    for name, scenario in _SCENARIOS.items():
        if scenario.ranks not in ranks or rank >= scenario.ranks:
            continue
        group = groups[scenario.ranks]
        try:
            seen[name] = {"value": scenario.run(Models(rank, group, split, alone))}
        except Exception as error:
            seen[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-4000:]}
        try:
            distributed.barrier(group)
        except RuntimeError as error:  # an error of one process alone, which the others wait for
            raise RuntimeError(f"after {name!r}, of which rank {rank} saw {seen[name]}") from error
    Path(out, f"{rank}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.destroy_process_group()
    if rank:
        os._exit(0)
    assert all(os.wait()[1] == 0 for _ in range(1, count))
