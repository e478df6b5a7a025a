"""Which implementation of experts decode steps run, and that switching it drops no captures."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from hf_fastdecode.generation.decoding.loop import decode_context
from hf_fastdecode.generation.snapshot import captured_state

from ..tiny_models import tiny_model


@pytest.mark.parametrize(
    ("name", "rows", "dtype", "copies"),
    [
        ("mixtral-window", 1, torch.bfloat16, True),  # two of four experts
        ("mixtral-window", 2, torch.bfloat16, False),
        ("mixtral-window", 2, torch.float32, True),  # as stock
        ("gpt_oss", 16, torch.float16, False),
        ("llama-gqa", 16, torch.float16, True),  # no experts: transformers' context changes nothing
    ],
)
def test_experts_of_many_rows_are_not_copied(
    name: str, rows: int, dtype: torch.dtype, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []

    @contextmanager
    def optimize():
        entered.append(True)
        yield

    model = tiny_model(name).to(dtype)
    monkeypatch.setattr(model, "_optimize_model_for_decode", optimize)
    with decode_context(model, rows):
        assert bool(entered) == copies


def test_captures_outlive_the_switch_of_decode_steps() -> None:
    model = tiny_model("mixtral-window")
    states = []
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        model.set_experts_implementation(implementation)
        states.append(captured_state(model, [model.config]))
    assert states[0] == states[1] != states[2]
