"""Processes that run `eval generate`: forks of one that has imported what they need, most of their time."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers.models.llama import modeling_llama  # noqa: F401  # of the embedded model

import hf_fastdecode.api
import hf_fastdecode.evals.generation  # noqa: F401
from hf_fastdecode.__main__ import main
from hf_fastdecode.files import JsonlWriter

from ...ports import place_of

PROMPTS = ("def double(x):\n", "# The first of a list.\n", "Write a function to add two numbers.\n")
OPTIONS = ("--limit", "3", "--n", "4", "--shots", "1", "--max-new-tokens", "24", "--rows", "2", "--device", "cpu")


def write_prompts(beside: Path) -> Path:
    """A file of prompts without ids and tests, beside a folder."""
    path = beside.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def run_all(killed: str, shared: str, seen: str) -> None:
    """Kill a run of one process, share one of prompts between two, and write what these said to a JSON file."""
    _kill_once_drawing(Path(killed))
    place = place_of(2)  # on one thread: else accelerate has all cores compute, which on some CPUs rounds otherwise
    # As launchers start them; accelerate's starts a single one on a CPU.
    said = [Path(f"{seen}.{rank}") for rank in (0, 1)]
    task = ("--task", str(write_prompts(Path(shared))))
    processes = [
        _start(Path(shared), said[rank], *task, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in (0, 1)
    ]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    Path(seen).write_text(json.dumps([[status, file.read_text()] for status, file in zip(statuses, said)]))


def _kill_once_drawing(out: Path) -> None:
    """Within a line of its third batch of samples."""
    whole, batches = JsonlWriter.write, itertools.count(1)

    def write(self: JsonlWriter, records: Iterable[Any]) -> None:
        whole(self, records := list(records))
        if next(batches) == 3:
            os.ftruncate(self._file.fileno(), self._file.tell() - 20)
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(JsonlWriter, "write", write):
        os.waitpid(_start(out, Path(os.devnull)), 0)


def _start(out: Path, said: Path, *options: str, **variables: str) -> int:
    """The id of a process whose standard error goes to a file, with further options and environment variables."""
    if process := os.fork():
        return process
    status = 1
    try:
        os.environ |= variables
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        torch.set_num_threads(1)
        sys.argv = ["hf-fastdecode", "eval", "generate", *OPTIONS, *options, "--out", str(out)]
        main()
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(status)
