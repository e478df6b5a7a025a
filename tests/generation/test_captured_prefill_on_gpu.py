"""Captured prefill passes in CUDA graphs, against fp64."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captured_prefill
from hf_fastdecode.generation.steps.graph_capture import has_projections

from ..tiny_models import ragged_prompts, tiny_model

pytestmark = pytest.mark.gpu
FIRST_TOKEN = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 1, "return_dict_in_generate": True}


@pytest.fixture(params=["llama-gqa", "llama-mha", "gpt2", "gemma2"])
def on_a_gpu(request, monkeypatch):
    monkeypatch.setattr(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 1})
    size = {"n_embd": 256} if request.param == "gpt2" else {"hidden_size": 256}
    windows = {"sliding_window": 400} if request.param == "gemma2" else {}
    return tiny_model(request.param, **size, **windows).bfloat16().cuda()


def prompts_of(*lengths, **options):
    return {key: value.cuda() for key, value in ragged_prompts(*lengths, **options).items()}


def logits_of(model, prompt):
    """Logits after each distinct prompt, fp64."""
    found = model.generate(**prompt, **FIRST_TOKEN, output_logits=True).logits[0]
    return found[::2].double()


class Errors:
    """Mean square errors of logits against fp64, of captured passes and of stock ones."""

    def __init__(self, model):
        self.model, self.exact = model, copy.deepcopy(model).double()
        if hasattr(self.exact, "set_experts_implementation"):
            self.exact.set_experts_implementation("eager")  # PyTorch 2.11 has no grouped product in fp64
        self.stock = copy.deepcopy(model)
        self.captured, self.of_stock = [], []

    def add(self, prompt, tokens=None):
        """Compare a call, of which captured passes are to prefill all tokens, or so many."""
        rows = zip(prompt["input_ids"], prompt["attention_mask"].bool(), strict=True)
        alone = [ids[mask][None] for ids, mask in rows]  # padding makes NaN in fp64 with eager attention
        exact, stock = (
            torch.cat([model(ids).logits[:, -1].double() for ids in alone]) for model in (self.exact, self.stock)
        )
        self.captured.append((logits_of(self.model, prompt) - exact).square().mean().item())
        self.of_stock.append((stock - exact).square().mean().item())
        prefilled = fd.explain(self.model).last_call
        assert prefilled.captured_prefill_tokens == (prefilled.prefilled_tokens if tokens is None else tokens)

    def check(self):
        captured, stock = (sum(errors) ** 0.5 for errors in (self.captured, self.of_stock))
        assert captured <= 2 * stock
        assert all(mine**0.5 <= 4 * stock for mine in self.captured)


@torch.no_grad()
def test_replays_serve_other_prompts(on_a_gpu):
    """Other lengths of one bucket, several prompts, and steps of other rows in between."""
    model = on_a_gpu
    with fd.enabled(model, mode="graph", min_shared_tokens=16):
        errors = Errors(model)
        for length in (60, 33, 64, 41, 300, 257, 10):
            errors.add(prompts_of(length, seed=length))
            model.generate(**prompts_of(20, 31), num_return_sequences=3, do_sample=True, max_new_tokens=4)
        for lengths in ((60, 33, 20), (50, 50, 4), (100, 130)):
            errors.add(prompts_of(*lengths, seed=lengths[0]))
        for lengths in ((60, 70), (80, 62)):
            errors.add(prompts_of(*lengths, shared=48, seed=lengths[0]))
    errors.check()


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gpt_oss"])
def test_windows_hide_part_of_a_prompt(name, monkeypatch):
    """One prompt, and several side by side."""
    monkeypatch.setattr(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 1})
    model = tiny_model(name, hidden_size=256, sliding_window=40).bfloat16().cuda()
    with fd.enabled(model, mode="graph", min_shared_tokens=16):
        errors = Errors(model)
        for lengths in ((60,), (300,), (257,), (41, 70, 20)):
            errors.add(prompts_of(*lengths, seed=lengths[0]))
        assert "by triton, merged with its context, captured" in str(fd.explain(model).last_call.lines())
    errors.check()


@torch.no_grad()
def test_replays_over_kept_prompts(on_a_gpu):
    model, whole = on_a_gpu, prompts_of(390)
    with fd.enabled(model, mode="graph", reuse_prefix=True, min_shared_tokens=16):
        errors = Errors(model)
        for length, new in ((200, 200), (221, 21), (240, 19), (270, 30), (270, 0), (390, 120)):
            errors.add({key: part[:, :length] for key, part in whole.items()}, new)
    errors.check()


@torch.no_grad()
def test_weights_that_changed_in_place_are_read(on_a_gpu):
    model, prompt = on_a_gpu, prompts_of(60)
    with fd.enabled(model, mode="graph"):
        Errors(model).add(prompt)
        for parameter in model.parameters():
            parameter.mul_(1.25)
        errors = Errors(model)
        errors.add(prompt)
        assert state_of(model).captures.prefills.count == 1
    errors.check()


@torch.no_grad()
def test_projections_are_branches_of_a_pass(on_a_gpu):
    model, prompt = on_a_gpu, prompts_of(300)
    found = []
    for fuse in (has_projections(model) or "auto", False):
        with fd.enabled(model, mode="graph", fuse_projections=fuse):
            found.append(logits_of(model, prompt))
    assert torch.equal(*found)
