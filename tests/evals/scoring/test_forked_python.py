"""Python programs in an interpreter that was forked: outputs are those of a new one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox
from hf_fastdecode.evals.scoring.python import PythonRunner

from ...cases import exhaustive_but

LIMITS = Limits(cpu_seconds=2, wall_seconds=20, memory_bytes=256 << 20, address_bytes=1 << 30, output_bytes=1 << 20)
TASK = Task("1", "python", "", "", ("result = f()", "assert result is not None"))

PROGRAMS = """
import sys
def f():
    frame, frames = sys._getframe(), 0
    while frame:
        frame, frames = frame.f_back, frames + 1
    return frames
---
def f(depth=0):
    try:
        return f(depth + 1)
    except RecursionError:
        return depth
---
f = lambda: sorted(globals())
---
import sys
f = lambda: [sys.argv, sys.path, str(sys.flags), __name__, sys.getrecursionlimit(), sys.gettrace() is None]
---
import collections
f = lambda: collections.abc.Mapping.__name__
---
import collections, typing
f = lambda: collections.abc.Mapping.__name__
---
import importlib
f = lambda: importlib.util.find_spec("os").name
---
import xml
f = lambda: xml.etree.__name__
---
import concurrent
f = lambda: concurrent.futures.__name__
---
f = lambda: math.pi
---
import os.path
f = lambda: [os.getpid() > 1, os.listdir("."), os.path.abspath("."), sorted(os.environ)]
---
f = lambda: [hash("text"), list({"one", "two", "three"}), list({b"x", 1.5, None, "y"})]
---
import random
random.seed(3)
f = lambda: [random.random(), random.choice("abc"), random.gauss(0, 1)]
---
import gc
f = lambda: [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()]
---
import warnings
f = lambda: [str(one) for one in warnings.filters]
---
import threading
f = lambda: [threading.current_thread().name, threading.active_count()]
---
import decimal
f = lambda: [decimal.getcontext().prec, decimal.Decimal(1) / 3]
---
import signal
f = lambda: [str(signal.getsignal(number)) for number in range(1, 65)]
---
import sys
print("x" * 9999)
f = lambda: [sys.stdin.read(), sys.stdin.encoding, sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.errors]
---
import resource
f = lambda: [resource.getrlimit(number) for number in range(16)]
---
import os
f = lambda: [sorted(os.listdir("/proc/self/fd")), os.getsid(0) == os.getpid(), os.umask(7)]
---
import datetime, json, re
f = lambda: [json.dumps(str(datetime.date(2020, 1, 1))), re.findall("a+", "aaba")]
---
import subprocess, sys
f = lambda: subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True).stdout
---
import atexit, os
atexit.register(lambda: open("/tmp/end", "w"))
def f():
    if os.fork() == 0:
        raise SystemExit
    os.wait()
    return os.listdir("/tmp")
---
import time
f = lambda: time.process_time() < 1
---
import dataclasses, typing
@dataclasses.dataclass
class Pair:
    left: int
    right: typing.Optional[int] = None
f = lambda: str(Pair(1))
""".split("---")


@pytest.fixture(scope="module")
def runners(any_sandbox: Sandbox) -> Iterator[tuple[PythonRunner, PythonRunner]]:
    """One that forks, as often as there are programs, and one that starts a new interpreter for each."""
    if not any_sandbox.forks:
        pytest.skip("it cannot fork here")
    with (
        PythonRunner(any_sandbox, LIMITS) as forked,
        PythonRunner(replace(any_sandbox, may_fork=False), LIMITS) as new,
    ):
        yield forked, new


@pytest.mark.parametrize("program", exhaustive_but(PROGRAMS[::3], PROGRAMS))
def test_outputs_are_those_of_a_new_interpreter(runners: tuple[PythonRunner, PythonRunner], program: str) -> None:
    forked, new = runners
    expected, found = new.check(TASK, program), forked.check(TASK, program)
    assert expected.outputs
    assert (found, found.outputs) == (expected, expected.outputs)
