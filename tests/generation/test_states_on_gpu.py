"""Models with a state per row, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..architectures.classes import tiny_model_of
from .test_states import CLASSES, PROMPTS, ending_early, run

pytestmark = pytest.mark.gpu
ON_GPU = {name: one.cuda() for name, one in PROMPTS.items()} if torch.cuda.is_available() else {}


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
    arguments = ending_early(model, ON_GPU)
    stock = run(model, arguments, ON_GPU)
    with fd.enabled(model, min_saved_tokens=1):
        assert torch.equal(run(model, arguments, ON_GPU), stock)
        report = fd.explain(model).last_call
        assert (report.path, report.mode_reason) == ("shared", "steps that update states are not captured yet")
        assert report.compactions >= 1


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
