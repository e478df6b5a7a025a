"""TRL's trainers whose processes divide a model: completions, losses and weights of an enabled one are stock's.

Each process has prompts of its own, whose samples end at other steps. Each pair of a launch, a trainer, a model and
LoRA or all weights is in some case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..fresh_processes import ROOT, run_fresh

CODE = """
import sys
sys.path += sys.argv[1:]
from tests.clients.sharded_training import Case, captures_follow, compare, rank_dies, reward_fails, run

run([{cases}])
"""
DEEPSPEED = str(Path(sys.prefix, "deepspeed"))
FAILURES = "(reward_fails, Case({0!r}), [1, 1]), (rank_dies, Case({0!r}), [1, -9])"


def run_cases(cases: str, *folders: str) -> None:
    done = run_fresh(CODE.format(cases=cases), *folders, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-8000:]


def test_training_under_fsdp_is_that_of_stock():
    run_cases("""
        (compare, Case("ddp"), [0, 0]),
        (compare, Case("fsdp2"), [0, 0]),
        (compare, Case("fsdp2", "rloo", "gpt_oss", lora=True), [0, 0]),
        (compare, Case("fsdp2", "rloo", "qwen3_5", lora=True), [0, 0]),
        (compare, Case("fsdp1"), [0, 0]),
    """)


def test_training_under_fsdp_with_parameters_on_the_cpu_is_that_of_stock():
    run_cases("""
        (compare, Case("fsdp2-offload", model="qwen3_5"), [0, 0]),
        (compare, Case("fsdp2-offload", "rloo", lora=True), [0, 0]),
        (compare, Case("fsdp2-offload", model="gpt_oss"), [0, 0]),
    """)


def test_training_in_four_processes_is_that_of_stock():
    run_cases("""(compare, Case("fsdp2", processes=4), [0] * 4)""")


def test_training_under_zero_is_that_of_stock():
    run_cases(
        """
        (compare, Case("zero2"), [0, 0]),
        (compare, Case("zero3", "rloo"), [0, 0]),
        (compare, Case("zero3", model="gpt_oss"), [0, 0]),
        (compare, Case("zero3", model="qwen3_5", lora=True), [0, 0]),
        """,
        DEEPSPEED,
    )


def test_training_under_zero_without_gathers_of_trl_is_that_of_stock():
    run_cases(
        """
        (compare, Case("zero3-divided"), [0, 0]),
        (compare, Case("zero3-offload"), [0, 0]),
        (compare, Case("zero3-divided", "rloo", "gpt_oss", lora=True), [0, 0]),
        (compare, Case("zero3-divided", model="qwen3_5"), [0, 0]),
        """,
        DEEPSPEED,
    )


def test_captured_steps_of_a_sampling_model_follow_trained_weights():
    code = CODE.format(cases="(captures_follow, Case('fsdp2', lora=True), [0, 0])")
    # Triton is not imported there yet, as it is in the processes of `run_fresh`.
    environment = os.environ | {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]


def test_all_processes_end_where_one_fails():
    run_cases(FAILURES.format("fsdp2"))
    run_cases(FAILURES.format("zero3-divided"), DEEPSPEED)
