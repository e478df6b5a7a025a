"""TRL's trainers whose processes divide a model: completions, losses and weights of an enabled one are stock's.

Each process has prompts of its own, whose samples end at other steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..fresh_processes import run_fresh

CODE = """
import sys
sys.path += sys.argv[1:]
from tests.clients.sharded_training import Case, compare, rank_dies, reward_fails, run

run([{cases}])
"""
FAILURES = "(reward_fails, Case({0!r}), [1, 1]), (rank_dies, Case({0!r}), [1, -9])"


def run_cases(cases: str, *folders: str) -> None:
    done = run_fresh(CODE.format(cases=cases), *folders, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-8000:]


def test_training_under_fsdp_is_that_of_stock():
    run_cases("""
        (compare, Case("ddp"), [0, 0]),
        (compare, Case("fsdp2"), [0, 0]),
        (compare, Case("fsdp2", "rloo", "gpt_oss", lora=True), [0, 0]),
        (compare, Case("fsdp2-offload", model="qwen3_5"), [0, 0]),
        (compare, Case("fsdp1"), [0, 0]),
    """)


def test_training_under_zero_is_that_of_stock():
    run_cases(
        """
        (compare, Case("zero2"), [0, 0]),
        (compare, Case("zero3", "rloo"), [0, 0]),
        (compare, Case("zero3-divided"), [0, 0]),
        (compare, Case("zero3-divided", "rloo", "gpt_oss", lora=True), [0, 0]),
        (compare, Case("zero3-divided", model="qwen3_5"), [0, 0]),
        """,
        str(Path(sys.prefix, "deepspeed")),
    )


def test_all_processes_end_where_one_fails():
    run_cases(FAILURES.format("fsdp2"))
    run_cases(FAILURES.format("zero3-divided"), str(Path(sys.prefix, "deepspeed")))
