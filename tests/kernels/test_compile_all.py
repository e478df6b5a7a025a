"""`make test-compile` pretends to have a GPU: the package must launch there all that is to be compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_fastdecode.kernels.failures import Kernel

from ..conversion.page_tables import read_table
from ..fresh_processes import ROOT

LAUNCHES = """
from tests.kernels.compile_all.launches import launches
from tests.kernels.compile_all.pretended import pretending

with pretending((9, 0)):
    print(*sorted({launch.kernel.__module__.split(".")[2] for launch in launches()}))
"""


@pytest.mark.exhaustive
def test_launches_on_a_pretended_gpu() -> None:
    """In an interpreter of its own, where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "experts",
        "forest_decode",
        "latent_queries",
        "pointwise",
        "prefill",
        "row_products",
        "sampling",
        "slim_append",
        "slim_decode",
        "state_scans",
        "state_steps",
        "stored_product",
    ]


def test_the_page_has_all_kernels_and_gpus() -> None:
    """Which `make test-compile` writes."""
    (_, *gpus, _), *lines = read_table(ROOT / "docs" / "limits.md", "tests.kernels.compile_all")
    assert [gpu.partition(":")[0] for gpu in gpus] == ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
    assert [(name, other) for name, *_, other in lines] == [
        (name.removeprefix("the "), other) for name, other in (kernel.value for kernel in Kernel)
    ]
    rooms = [int(gpu.partition("(")[2].split()[0]) for gpu in gpus]
    for _, *cells, _ in lines:
        for cell, room in zip(cells, rooms, strict=True):
            assert cell in ("Hopper only", "not measured") or int(cell.removesuffix(", reduced")) <= room
