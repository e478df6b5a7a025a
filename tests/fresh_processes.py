"""Processes that have imported neither transformers nor this package, but PyTorch: most of the time of either import.

Each is a fork of one that imports PyTorch once. What is to be seen before PyTorch is imported needs an interpreter of
its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
_SERVER = """
import gc, json, os, sys, traceback
import torch, torch._dynamo

found = {"transformers", "hf_fastdecode"} & set(sys.modules)
assert not found, found
gc.freeze()
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            for number, path in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
            os.environ.update(asked["environment"])
            sys.path[:0] = asked["path"]
            sys.argv = ["-c", *asked["arguments"]]
            exec(asked["code"], {"__name__": "__main__"})
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@lru_cache(maxsize=1)
def _server() -> subprocess.Popen[str]:
    """An isolated interpreter (no PYTHONPATH, no script folder), which ends with this process's end of its input."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run_fresh(
    code: str, *arguments: str, importable: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code without standard input.

    Args:
        code: Python code.
        arguments: Its ``sys.argv[1:]``.
        importable: Whether modules are looked for in this checkout, before the folders of PYTHONPATH.
        environment: Further environment variables.

    Returns:
        Its exit status, 1 after an exception, and what it wrote.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"code": code, "arguments": arguments, "environment": environment, "out": str(out), "err": str(err)}
        laid_in_front = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        path = [str(ROOT), *laid_in_front] if importable else laid_in_front
        server.stdin.write(json.dumps({**asked, "path": path}) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())
