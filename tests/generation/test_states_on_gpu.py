"""Models with a state per row, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import modes

from ..architectures.classes import tiny_model_of
from ..tiny_models import ragged_prompts
from .test_states import BEAMS, CLASSES, PROMPTS, SAMPLING, run

pytestmark = pytest.mark.gpu
ON_GPU = {name: one.cuda() for name, one in PROMPTS.items()} if torch.cuda.is_available() else {}

ENDING = SAMPLING | {"eos_token_id": list(range(3, 15)), "max_new_tokens": 40}
"""Rows end after different numbers of steps: the host looks for them every few steps."""


def alike(left, right):
    """The share of equal tokens in the first fifty; by chance it is one in a hundred behind the prompts."""
    return (left[:, :52] == right[:, :52]).float().mean().item() if left.shape[0] == right.shape[0] else 0.0


@pytest.fixture(params=CLASSES)
def each(request):
    return tiny_model_of(request.param)


def logits_of_steps(model, prompt, tokens, cache):
    """Logits ``[1, tokens, vocabulary]`` of tokens ``[1, tokens]``, fed one by one behind a prompt."""
    with torch.no_grad():
        if cache is None:
            output = model(prompt, use_cache=True)
            cache = getattr(output, "cache", None) or getattr(output, CACHE)
        return torch.cat([model(token[:, None], **{CACHE: cache}).logits for token in tokens.T], 1)


def test_tokens_are_stocks_in_float32(each):
    model = copy.deepcopy(each).cuda()
    stock = run(model, ENDING, ON_GPU)
    with fd.enabled(model, min_saved_tokens=1):
        assert torch.equal(run(model, ENDING, ON_GPU), stock)
        report = fd.explain(model).last_call
        assert (report.path, report.mode) == ("shared", "eager")  # attention kernels take half precision only
        assert report.compactions >= 1


def test_captured_steps_are_those_that_run_eagerly(each, monkeypatch):
    """Rows that end leave for a smaller capture; other prompts, and beams, need no other."""
    monkeypatch.setattr(modes, "_STEPS_OF_A_CAPTURE", 0)
    model = copy.deepcopy(each).bfloat16().cuda()
    other = {name: one.cuda() for name, one in ragged_prompts(25, 60, 41, shared=20, seed=3).items()}
    calls = [(ENDING, ON_GPU), (ENDING, other), (BEAMS, ON_GPU)]
    with fd.enabled(model, min_saved_tokens=1, mode="eager", backend="triton"):
        eager = [run(model, *call) for call in calls]
    with fd.enabled(model, min_saved_tokens=1, mode="graph"):
        for number, (call, expected) in enumerate(zip(calls, eager, strict=True)):
            found = run(model, *call)
            report = fd.explain(model).last_call
            assert report.mode == "graph", report.mode_reason
            assert alike(found, expected) > 0.9
            assert number == 2 or report.compactions >= 1
        assert state_of(model).captures.count <= 8


def test_captured_steps_err_as_little_as_stock(each):
    model, prompt = copy.deepcopy(each).bfloat16().cuda(), PROMPTS["input_ids"][1:2]
    more = {"return_dict_in_generate": True, "output_logits": True}
    with fd.enabled(model, mode="graph", min_saved_tokens=1):
        drawn = model.generate(prompt.cuda(), do_sample=False, max_new_tokens=9, **more)
        assert fd.explain(model).last_call.mode == "graph"
    tokens = drawn.sequences[:, prompt.shape[1] : -1]
    with torch.no_grad():
        exact = each(drawn.sequences.cpu()).logits[:, prompt.shape[1] : -1]
    stock = logits_of_steps(model, prompt.cuda(), tokens, None)
    found = torch.stack(drawn.logits[1:], 1)
    stock_error, error = ((one.float().cpu() - exact).pow(2).mean().sqrt() for one in (stock, found))
    assert error <= 2 * stock_error


def test_a_returned_cache_keeps_its_states(each):
    """Other calls use the memory in which captured steps update states."""
    model = copy.deepcopy(each).bfloat16().cuda()
    arguments = SAMPLING | {"return_dict_in_generate": True}
    with fd.enabled(model, mode="graph", min_saved_tokens=1):
        returned = run(model, arguments, ON_GPU)[CACHE]
        assert fd.explain(model).last_call.mode == "graph"
        before = [one.clone() for layer in returned.state_layers for one in layer.states.tensors]
        run(model, SAMPLING, ON_GPU)
        after = [one for layer in returned.state_layers for one in layer.states.tensors]
        assert all(map(torch.equal, before, after))


def test_half_precision_errs_as_little_as_stock(each):
    prompt, tokens = PROMPTS["input_ids"][1:2], PROMPTS["input_ids"][1:2, 5:11]
    with torch.no_grad():
        exact = each(torch.cat([prompt, tokens], 1)).logits[:, prompt.shape[1] :]
    model = copy.deepcopy(each).bfloat16().cuda()
    stock = logits_of_steps(model, prompt.cuda(), tokens.cuda(), None)
    with fd.enabled(model):
        shared = logits_of_steps(model, prompt.cuda(), tokens.cuda(), fd.prefill(model, prompt.cuda()))
    stock_error, error = ((one.float().cpu() - exact).pow(2).mean().sqrt() for one in (stock, shared))
    assert error <= 2 * stock_error


def test_the_fast_sampler(each):
    model = copy.deepcopy(each).bfloat16().cuda()
    arguments = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 20}
    with fd.enabled(model, min_saved_tokens=1):
        assert run(model, arguments, ON_GPU).shape == (9, 45 + 20)
        report = fd.explain(model).last_call
        assert (report.path, report.sampler) == ("shared", "fast")
