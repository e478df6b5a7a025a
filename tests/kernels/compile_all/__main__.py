"""Compiles for every GPU by every Triton; see the package."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import triton

from .launches import launches
from .pretended import GPUS, pretending


def compile_for(capability: tuple[int, int]) -> int:
    """Compile everything for one GPU with the Triton at hand. Prints a line; returns how much failed."""
    most, failed = 0, 0
    with pretending(capability):
        found = launches()
        for launch in found:
            try:
                kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
            except Exception as error:
                failed += 1
                print(f"{launch}: {error}", flush=True)
                continue
            used = kernel.metadata.shared
            most = max(most, used)
            if used > 1024 * GPUS[capability].shared_memory:
                failed += 1
                print(f"{launch}: takes {used} bytes of shared memory", flush=True)
    gpu = f"Triton {triton.__version__}, sm_{capability[0]}{capability[1]}"
    room = f"up to {most / 1024:.0f} of {GPUS[capability].shared_memory} KiB of shared memory"
    print(f"{gpu}: {len(found) - failed} of {len(found)} kernels compiled, {room}", flush=True)
    return failed


def main() -> None:
    """Compile for every GPU by every Triton, each in a process of its own."""
    if sys.argv[1:2] == ["--gpu"]:
        major, minor = map(int, sys.argv[2].split("."))
        sys.exit(compile_for((major, minor)) > 0)

    def compiles(folder: str, capability: tuple[int, int]) -> bool:
        path = os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH")) if part)
        command = [sys.executable, "-m", "tests.kernels.compile_all", "--gpu", ".".join(map(str, capability))]
        ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        print(ran.stdout if ran.stdout else ran.stderr[-4000:], end="", flush=True)
        return ran.returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        sys.exit(not all([*threads.map(compiles, *zip(*product((*sys.argv[1:], ""), GPUS)))]))


if __name__ == "__main__":
    main()
