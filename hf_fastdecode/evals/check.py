"""Does a completion pass its task's tests? Runs it in a fresh Python process with a time limit.

This is a time limit and not a sandbox: the program runs with your user's rights and may read and write files, start
processes (one that leaves its process group outlives the check) and open connections. Run untrusted models inside a
container or a virtual machine. Passing is decided by a nonce and not by an exit code, which keeps a program that exits
early, prints or crashes from passing by accident. A program written to cheat can: it shares a process with its tests.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

_DONE: Final = "[DONE]"
_MEMORY: Final = 2 << 30  # bytes of data segment; a program of this size needs a hundredth
_REPORT_BYTES: Final = 4096

# The harness takes over stdout for its report before the program can see it, reads its job from stdin so that the
# nonce is in no file and no argument, and writes the nonce only after the last test.
_HARNESS: Final = """
import json, os, sys
job = json.load(sys.stdin)
try:
    import resource
except ImportError:
    resource = None
if resource is not None:
    for name, limit in job["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
report = os.dup(1)
os.set_inheritable(report, False)
null = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
scope = {"__name__": "__main__"}
stage = "program"
try:
    exec(compile(job["program"], "completion.py", "exec"), scope)
    stage = "test setup"
    exec(compile(job["setup"], "setup.py", "exec"), scope)
    for number, test in enumerate(job["tests"], 1):
        stage = f"test {number}"
        exec(compile(test, "test.py", "exec"), scope)
except BaseException as error:
    os.write(report, f"{type(error).__name__} in {stage}: {error}"[:300].encode(errors="replace"))
else:
    os.write(report, job["nonce"].encode())
os._exit(0)
"""


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one completion and, where it failed, why."""

    passed: bool
    reason: str


def truncate(completion: str) -> str:
    """What stands before the first ``[DONE]``."""
    return completion.partition(_DONE)[0]


def check_completion(
    task: Mapping[str, Any], completion: str, timeout_s: float = 5.0, memory_bytes: int = _MEMORY
) -> CheckResult:
    """Run a completion and its task's tests in a fresh ``python -I`` process.

    The process works in a temporary folder, in its own process group that is killed at the end, under limits on time,
    CPU time, memory, file size and core dumps (the last four where the system has them). A completion passes only if a
    random nonce arrives after the last test; exit codes and printed text count for nothing. It is a time limit and not
    a sandbox.

    Args:
        task: MBPP fields; ``test_list`` and, if present, ``test_setup_code`` (run after the program) are read.
        completion: program text; what follows the first ``[DONE]`` is ignored.
        timeout_s: wall-clock limit in seconds, above 0.
        memory_bytes: limit of the data segment.

    Raises:
        ValueError: the time limit is not positive, or the task has no tests.
    """
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s}; MBPP's tests need about 1 s at most, use 5.0")
    if not task["test_list"]:
        raise ValueError("test_list must hold at least one test, got none; every program would pass")
    nonce = secrets.token_hex(16)
    job = {
        "program": truncate(completion),
        "setup": task.get("test_setup_code") or "",
        "tests": list(task["test_list"]),
        "nonce": nonce,
        "limits": {
            "RLIMIT_CPU": math.ceil(timeout_s) + 1,
            "RLIMIT_DATA": memory_bytes,
            "RLIMIT_FSIZE": 1 << 24,
            "RLIMIT_CORE": 0,
        },
    }
    with tempfile.TemporaryDirectory(prefix="check-") as folder, tempfile.TemporaryFile() as report:
        return _run(json.dumps(job).encode(), Path(folder), report, nonce, timeout_s)


def _run(job: bytes, folder: Path, report: Any, nonce: str, timeout_s: float) -> CheckResult:
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _HARNESS],
        stdin=subprocess.PIPE,
        stdout=report,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ},
        start_new_session=True,
    )
    try:
        process.communicate(job, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return CheckResult(False, f"no verdict within {timeout_s:g} s")
    finally:
        _kill_group(process)
    report.seek(0)
    text = report.read(_REPORT_BYTES).decode(errors="replace")
    if text == nonce:
        return CheckResult(True, "passed")
    return CheckResult(False, text or f"ended before its tests did, with exit code {process.returncode}")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started in its group, and reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def check_many(
    pairs: Sequence[tuple[Mapping[str, Any], str]],
    timeout_s: float = 5.0,
    workers: int | None = None,
    progress: bool = True,
) -> list[CheckResult]:
    """Check (task, completion) pairs in a thread pool; results in order.

    Equal completions of one task run once: samples of one prompt repeat each other a lot.

    Args:
        pairs: MBPP-style tasks, each with a completion.
        timeout_s: wall-clock limit of each.
        workers: processes at a time; by default one per CPU.
        progress: show a tqdm bar.
    """
    keys = [(tuple(task["test_list"]), task.get("test_setup_code") or "", truncate(text)) for task, text in pairs]
    unique = dict(zip(keys, pairs, strict=True))
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        checks = pool.map(lambda pair: check_completion(pair[0], pair[1], timeout_s), unique.values())
        bar = tqdm(checks, total=len(unique), desc="check", unit="program", disable=not progress)
        verdicts = dict(zip(unique, bar, strict=True))
    return [verdicts[key] for key in keys]
