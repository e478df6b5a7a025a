"""Captured steps of layers with states, uncaptured and interpreted: they update buffers that all captures share."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import modes

from ..architectures.classes import tiny_model_of
from ..tiny_models import ragged_prompts
from .test_states import run
from .uncaptured import SAMPLING, on_the_cpu

pytest.importorskip("triton")
pytestmark = on_the_cpu

PROMPTS, OTHER = ragged_prompts(21, 17, shared=10), ragged_prompts(17, 25, shared=10, seed=1)
ENDING = SAMPLING | {"eos_token_id": list(range(3, 40)), "max_new_tokens": 5}
BEAMS = {"do_sample": False, "num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def with_states_alone():
    if CACHE == "past_key_values":
        pytest.skip("this release has another name for its cache, and it runs stock")
    return tiny_model_of("Mamba2ForCausalLM")


IN_MODULES = [] if CACHE == "past_key_values" else ["RecurrentGemmaForCausalLM"]
NAMES = ["Qwen3NextForCausalLM", "FalconH1ForCausalLM", "MiniMaxForCausalLM", "KimiLinearForCausalLM", *IN_MODULES]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_stocks(name, uncaptured, monkeypatch):
    """States beside attention, in one layer with it, and beside latents.

    Rows leave for a smaller capture, and beams are reordered.
    """
    monkeypatch.setattr(modes, "_STEPS_OF_A_CAPTURE", 0)  # of so few steps none pays for a capture
    model = tiny_model_of(name)
    calls = [ENDING, *([BEAMS] if name == "Qwen3NextForCausalLM" else [])]
    stock = [run(model, arguments, PROMPTS) for arguments in calls]
    with fd.enabled(model, min_saved_tokens=1, mode="graph", backend="triton"):
        for arguments, tokens in zip(calls, stock, strict=True):
            assert torch.equal(run(model, arguments, PROMPTS), tokens)
            report = fd.explain(model).last_call
            assert (report.path, report.mode) == ("shared", "graph")
            assert arguments is BEAMS or report.compactions >= 1


def test_calls_share_captures_and_buffers(uncaptured, with_states_alone):
    """More rows get larger buffers, which serve fewer as well."""
    model = with_states_alone
    more = SAMPLING | {"num_return_sequences": 5}
    calls = [(SAMPLING, PROMPTS, 8), (SAMPLING, OTHER, 8), (more, PROMPTS, 16), (SAMPLING, PROMPTS, 16)]
    stock = [run(model, arguments, prompts) for arguments, prompts, _ in calls]
    with fd.enabled(model, min_saved_tokens=1, mode="graph", backend="triton"):
        captures, made = state_of(model).captures, []
        for (arguments, prompts, rows), tokens in zip(calls, stock, strict=True):
            assert torch.equal(run(model, arguments, prompts), tokens)
            assert captures._buffers.rows == rows
            made.append(captures.count)
        assert made == [1, 1, 2, 3]  # the first capture was of the smaller buffers
        assert len({id(step.buffers) for step in captures._steps}) == 1


def test_a_returned_cache_keeps_its_states(uncaptured, with_states_alone):
    model = with_states_alone
    stock = run(model, SAMPLING, PROMPTS)
    with fd.enabled(model, min_saved_tokens=1, mode="graph", backend="triton"):
        returned = run(model, SAMPLING | {"return_dict_in_generate": True}, PROMPTS)
        assert torch.equal(returned.sequences, stock)
        layers = returned[CACHE].state_layers
        held = [one.clone() for layer in layers for one in layer.states.tensors]
        run(model, SAMPLING, OTHER)
        assert all(map(torch.equal, held, [one for layer in layers for one in layer.states.tensors]))
