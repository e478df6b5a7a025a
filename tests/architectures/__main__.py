"""``python -m tests.architectures [CLASS ...]``: compare all generating classes, or these, with stock.

Prints each class's verdict and how many there are of each kind. Of a run over all classes it writes
``docs/architectures.md``; of one over some, it replaces their rows, if the page is of the installed transformers. The
exit code is 1 when any class gave other tokens than stock, raised, or proved nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from logging import CRITICAL, getLogger
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import transformers
from transformers.utils import logging

from .classes import generating_classes
from .compare import Verdict, verdict_on
from .page import PAGE, read, version, written

_PROCESSES = 2
_SECONDS = 120.0
_FAILURES = ("wrong", "crashed", "blind")


def main() -> int:
    """Run the command; returns the exit code."""
    asked = sys.argv[1:]
    if unknown := sorted(set(asked) - set(generating_classes())):
        sys.exit(f"{unknown[0]} is no generating class of the installed transformers")
    logging.set_verbosity(logging.CRITICAL)
    getLogger("hf_fastdecode").setLevel(CRITICAL)  # the verdicts tell
    torch.set_num_threads(1)  # each process has a core to itself, and a fork has none of its parent's threads
    verdicts: dict[str, Verdict] = {}
    for name, verdict, seconds in _verdicts(asked or list(generating_classes())):
        verdicts[name] = verdict
        print(f"{seconds:6.1f} s  {name}: {verdict.kind}{verdict.reason and ', '}{verdict.reason}", flush=True)
    counts = Counter(verdict.kind for verdict in verdicts.values())
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    if not asked or version() == transformers.__version__:
        PAGE.write_text(written(({} if not asked else read()) | verdicts))
    return int(any(counts[kind] for kind in _FAILURES))


def _verdicts(names: Sequence[str]) -> Iterator[tuple[str, Verdict, float]]:
    """Each class's verdict and seconds, as they come: a process for each class, so that none ends the run."""
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(names))
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < _PROCESSES:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send_verdict, args=(name, theirs))
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


def _send_verdict(name: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    pipe.send(verdict_on(name))


if __name__ == "__main__":
    sys.exit(main())
