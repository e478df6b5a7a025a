"""Compiles for every GPU by every Triton; see the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import triton

from .launches import Launch, launches, to_compile
from .pretended import GPUS, pretending
from .table import cells, write


def compile_for(capability: tuple[int, int], *, show: bool) -> int:
    """Compile everything for one GPU with the Triton at hand; returns how much failed.

    Prints failures and a line, and with `show` the GPU's cells of the table as the last one.
    """
    compiled: list[tuple[Launch, int]] = []
    with pretending(capability):
        found = launches()
        chosen = to_compile(found)
        for launch in chosen:
            try:
                kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
            except Exception as error:
                print(f"{launch}: {error}", flush=True)
                continue
            used = kernel.metadata.shared
            if used > 1024 * GPUS[capability].shared_memory:
                print(f"{launch}: takes {used} bytes of shared memory", flush=True)
                continue
            compiled.append((launch, used))
    gpu = f"Triton {triton.__version__}, sm_{capability[0]}{capability[1]}"
    most = max((used for _, used in compiled), default=0)
    room = f"up to {most / 1024:.0f} of {GPUS[capability].shared_memory} KiB of shared memory"
    print(f"{gpu}: {len(compiled)} of {len(chosen)} kernels compiled, {room}", flush=True)
    if show:
        print(json.dumps(cells(capability, found, compiled)), flush=True)
    return len(chosen) - len(compiled)


def main() -> None:
    """Compile for every GPU by every Triton, each in a process of its own; write the table of the installed one."""
    if sys.argv[1:2] == ["--gpu"]:
        major, minor = map(int, sys.argv[2].split("."))
        sys.exit(compile_for((major, minor), show="--table" in sys.argv) > 0)
    of_installed = {}

    def compiles(folder: str, capability: tuple[int, int]) -> bool:
        path = os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH")) if part)
        command = [sys.executable, "-m", "tests.kernels.compile_all", "--gpu", ".".join(map(str, capability))]
        command += ["--table"] * (not folder)
        ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        lines = ran.stdout.splitlines()
        if ran.returncode == 0 and not folder:
            of_installed[capability] = json.loads(lines.pop())
        print("\n".join(lines) if lines else ran.stderr[-4000:], flush=True)
        return ran.returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        all_compile = all([*threads.map(compiles, *zip(*product((*sys.argv[1:], ""), GPUS)))])
    if len(of_installed) == len(GPUS):
        write(of_installed)
    sys.exit(not all_compile)


if __name__ == "__main__":
    main()
