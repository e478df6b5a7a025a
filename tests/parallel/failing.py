"""Runs scenarios in which one of two processes fails, each scenario in two processes of its own, all at once.

A scenario is a function of a model and the process's rank. It calls the model by `Calls.make`, which records how each
call ended; a process that is killed records nothing.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..fresh_processes import run_fresh
from ..ports import free_port

LIMIT = 180
"""Seconds after which processes are killed."""


@dataclass(frozen=True)
class Ended:
    """How a call ended: the value that it returned, or the error's class and text, and its attribute `rank`."""

    value: Any
    error: str = ""
    rank: int | None = None
    seconds: float = 0.0


@dataclass
class Calls:
    """Calls of a scenario, in one process."""

    model: PreTrainedModel
    rank: int
    ended: list[Ended] = field(default_factory=list)

    def make(self, call: Callable[[], Any]) -> None:
        """Make a call, which may fail."""
        began = time.monotonic()
        value, error, rank = None, "", None
        try:
            value = call()
        except Exception as raised:
            error, rank = f"{type(raised).__name__}: {raised}", getattr(raised, "rank", None)
        self.ended.append(Ended(value, error, rank, time.monotonic() - began))

    def note(self, value: Any) -> None:
        """Record something else."""
        self.ended.append(Ended(value))


@dataclass(frozen=True)
class _Scenario:
    run: Callable[[Calls], None]
    victim: int | None


_SCENARIOS: dict[str, _Scenario] = {}


def scenario(*, victim: int | None = None) -> Callable[[Callable[[Calls], None]], Callable[[Calls], None]]:
    """Let a function run in two processes, of which the victim does not reach its end."""

    def mark(function: Callable[[Calls], None]) -> Callable[[Calls], None]:
        _SCENARIOS[function.__name__] = _Scenario(function, victim)
        return function

    return mark


def at_nth(number: int, owner: Any, name: str, action: Callable[[], None]) -> Any:
    """Context in which the n-th use of a function does something first."""
    original, uses = getattr(owner, name), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal uses
        uses += 1
        if uses == number:
            action()
        return original(*arguments, **named)

    return mock.patch.object(owner, name, counted)


def send_itself(what: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), what)


def run_all(module: str, folder: Path, out: Path, *, backend: str = "gloo") -> dict[str, dict[int, list[Ended]]]:
    """Run a module's scenarios over the model in a folder; returns by rank how the calls ended."""
    code = "import json, sys; from tests.parallel.failing import run; run(*map(json.loads, sys.argv[1:]))"
    environment = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    if backend == "gloo":
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    done = run_fresh(code, *map(json.dumps, (module, str(folder), str(out), backend)), **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[int, list[Ended]]] = {}
    for file in sorted(out.glob("*.json")):
        name, rank = file.stem.split(".")
        found.setdefault(name, {})[int(rank)] = [Ended(**one) for one in json.loads(file.read_text())]
    return found


def run(module: str, folder: str, out: str, backend: str) -> None:
    """Run the module's scenarios in forks of this process: on the CPU all at once, on GPUs one after another."""
    from importlib import import_module

    from ..short_calls import share_short_calls

    share_short_calls()
    import_module(f"tests.parallel.{module}")
    for names in [[name] for name in _SCENARIOS] if backend == "nccl" else [list(_SCENARIOS)]:
        processes = {name: _start(name, folder, out, backend) for name in names}
        end = time.monotonic() + LIMIT
        for name, pids in processes.items():
            waited_for = [pid for rank, pid in enumerate(pids) if rank != _SCENARIOS[name].victim]
            while waited_for and time.monotonic() < end:
                waited_for = [pid for pid in waited_for if os.waitpid(pid, os.WNOHANG)[0] == 0]
                time.sleep(0.02)
            victims = [pid for rank, pid in enumerate(pids) if rank == _SCENARIOS[name].victim]
            for pid in waited_for + victims:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _start(name: str, folder: str, out: str, backend: str) -> list[int]:
    os.environ["MASTER_PORT"] = str(free_port())
    pids = []
    for rank in (0, 1):
        if (pid := os.fork()) == 0:
            try:
                _run_one(name, rank, folder, Path(out, f"{name}.{rank}.json"), backend)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        pids.append(pid)
    return pids


def _run_one(name: str, rank: int, folder: str, out: Path, backend: str) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of tp_plan
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, timeout=timedelta(seconds=LIMIT))
    calls = Calls(AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval(), rank)
    _SCENARIOS[name].run(calls)
    out.write_text(json.dumps([asdict(one) for one in calls.ended]))
    if _SCENARIOS[name].victim is None:  # the other still asks the store, which ends with the process of rank 0
        other, end = out.with_name(f"{name}.{1 - rank}.json"), time.monotonic() + LIMIT
        while not other.exists() and time.monotonic() < end:
            time.sleep(0.05)
