"""Kernels that begin to compile before they are needed: while prompts are prefilled, and after the first capture."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.steps.cuda_graph import CapturedStep
from hf_fastdecode.kernels.ahead import Launch
from hf_fastdecode.kernels.compiling_process import CompilingProcess

from ..tiny_models import ragged_prompts, seeded, tiny_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_an_output_layer_without_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of quantized models, some of whose layers store no tensor of that name."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    model = tiny_model("llama-gqa")
    model.lm_head = nn.Sequential(model.lm_head)
    call = ragged_prompts(41) | {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 3}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_the_first_step_that_is_captured_has_those_of_other_sizes_compiled(
    uncaptured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    asked: list[list[Launch]] = []
    told: list[str] = []

    class Process:
        def compile(self, launches: list[Launch]) -> None:
            asked.append(launches)

        def is_running(self) -> bool:
            return True

        def end(self) -> None:
            told.append("end")

    def capture(step: CapturedStep, make: Callable[[CapturedStep], None] = CapturedStep.capture) -> None:
        make(step)
        step._graph.replay()  # as on a GPU, where it runs while it is captured

    monkeypatch.setattr(CapturedStep, "capture", capture)
    monkeypatch.setattr(CompilingProcess, "start", lambda _: Process())
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    model = tiny_model("llama-gqa", num_hidden_layers=1)
    with fd.enabled(model, mode="graph", backend="triton"):
        for samples in (3, 5):
            model.generate(**ragged_prompts(41), do_sample=True, num_return_sequences=samples, max_new_tokens=2)
        assert state_of(model).captures.count == 2
        assert not told
    assert told == ["end"]
    (launches,) = asked
    tiles = {launch.options["BLOCK_M"] for launch in launches if launch.kernel.fn.__name__ == "node_partials"}
    assert tiles == {16, 32, 64, 128}
