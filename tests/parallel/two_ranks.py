"""Runs scenarios in two processes that compute one model together, and brings back what each saw.

Processes start once for all scenarios of some files. A scenario is a function of the models, marked by `scenario`; it
returns what JSON holds.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import socket
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..fresh_processes import run_fresh
from ..interpreter import make_faster

SECONDS = 60
"""Time limit of a communication, after which a scenario fails that left the other process waiting."""


@dataclass
class Models:
    """The models of a scenario, in one of the two processes.

    Attributes:
        rank: 0 or 1.
        split: By the name of its folder, a model that both compute together.
        alone: The same, computed by this process.
    """

    rank: int
    split: Mapping[str, PreTrainedModel]
    alone: Mapping[str, PreTrainedModel]


@dataclass(frozen=True)
class Seen:
    """What a process saw of a scenario: the value that it returned, or the error's class and text."""

    value: Any = None
    error: str = ""


_SCENARIOS: dict[str, Callable[[Models], Any]] = {}


def scenario(function: Callable[[Models], Any]) -> Callable[[Models], Any]:
    """Let a function run in both processes."""
    _SCENARIOS[function.__name__] = function
    return function


def run_on_two(
    files: list[str], folders: Mapping[str, Path], out: Path, *, backend: str = "gloo"
) -> dict[str, tuple[Seen, Seen]]:
    """Run the scenarios of test modules, by their names, over models in folders; returns what ranks 0 and 1 saw."""
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    code = "import json, sys; from tests.parallel.two_ranks import run; run(*map(json.loads, sys.argv[1:]))"
    given = {name: str(folder) for name, folder in folders.items()}
    arguments = map(json.dumps, (files, given, str(out), backend))
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    if backend == "gloo":
        # Where there is a GPU, tensor parallelism takes it; kernels are interpreted as in other tests on the CPU.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = run_fresh(code, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {name: (Seen(**seen[0][name]), Seen(**seen[1][name])) for name in seen[0]}


def run(files: list[str], folders: dict[str, str], out: str, backend: str) -> None:
    """Run the modules' scenarios in this process and in a fork of it, each with a GPU of its own for ``nccl``."""
    from importlib import import_module

    if backend == "gloo":
        make_faster()
    for file in files:
        import_module(f"tests.parallel.{file}")
    rank = int(os.fork() == 0)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of tp_plan
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, timeout=timedelta(seconds=SECONDS))
    load = AutoModelForCausalLM.from_pretrained
    split = {name: load(path, tp_plan="auto").eval() for name, path in folders.items()}
    alone = {name: load(path).to(device).eval() for name, path in folders.items()}
    seen = {}
    for name, scenario in _SCENARIOS.items():
        try:
            seen[name] = {"value": scenario(Models(rank, split, alone))}
        except Exception as error:
            seen[name] = {"error": f"{type(error).__name__}: {error}"}
        distributed.barrier()
    Path(out, f"{rank}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.destroy_process_group()
    if rank:
        os._exit(0)
    assert os.wait()[1] == 0
