"""Verdicts on many classes, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from logging import CRITICAL, getLogger
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from transformers.utils import logging

from .compare import Verdict

_SECONDS = 300.0


def verdicts_of(
    names: Sequence[str], judge: Callable[[str], Verdict], *, processes: int = 2
) -> Iterator[tuple[str, Verdict, float]]:
    """Each class's verdict and seconds, as they come: a process for each class, so that none ends the run.

    Args:
        names: Classes.
        judge: Gives the verdict on a class.
        processes: How many run at a time.
    """
    logging.set_verbosity(logging.CRITICAL)
    getLogger("hf_fastdecode").setLevel(CRITICAL)  # the verdicts tell
    torch.set_num_threads(1)  # each process has a core to itself, and a fork has none of its parent's threads
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(names))
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send_verdict, args=(judge, name, theirs))
            process.start()
            theirs.close()
            running[ours] = name, process, time.monotonic()
        done = wait(list(running), timeout=1.0)
        for pipe, (name, process, start) in list(running.items()):
            seconds = time.monotonic() - start
            if pipe in done:
                try:
                    verdict = pipe.recv()
                except EOFError:
                    process.join()
                    verdict = Verdict("crashed", f"its process ended with exit code {process.exitcode}")
            elif seconds > _SECONDS:
                process.kill()
                verdict = Verdict("crashed", f"it took more than {_SECONDS:.0f} seconds")
            else:
                continue
            process.join()
            pipe.close()
            del running[pipe]
            yield name, verdict, seconds


def _send_verdict(judge: Callable[[str], Verdict], name: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    pipe.send(judge(name))
