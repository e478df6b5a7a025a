"""accelerate: `accelerator.prepare(model)` wraps `forward` in autocast; calls share and give stock's tokens."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

import hf_fastdecode as fd

from ..tiny_models import ARCHITECTURES, ragged_prompts, seeded, tiny_model

PROMPTS = ragged_prompts(75, 63, shared=40)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 7}


def generate(model):
    return seeded(lambda: model.generate(**PROMPTS, **SAMPLING, return_dict_in_generate=True, output_logits=True))


@pytest.mark.parametrize("first", ["enable", "prepare"])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_prepared_model_shares_under_autocast(name, first):
    exact = generate(tiny_model(name)).logits[0]
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    stock = accelerator.prepare(tiny_model(name))
    expected = generate(stock)
    model = tiny_model(name)
    if first == "enable":
        fd.enable(model)
    model = accelerator.prepare(model)
    fd.enable(model)
    found = generate(model)
    last = fd.explain(model).last_call
    assert last.path == "shared", last.reason
    assert last.prefilled_tokens < 75 + 63
    # bfloat16 it is, and no farther from float32 than twice what stock is there.
    theirs, ours = ((one.logits[0] - exact).norm() for one in (expected, found))
    assert theirs > 0
    assert ours <= 2 * theirs


def test_a_prepared_model_is_restored():
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(tiny_model())
    before = dict(vars(model))
    expected = generate(model).sequences
    with fd.enabled(model):
        assert torch.equal(generate(model).sequences, expected)
    assert {name: value for name, value in vars(model).items() if name in before} == before
    assert torch.equal(generate(model).sequences, expected)
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with fd.enabled(unwrapped):
        generate(unwrapped)
        assert fd.explain(unwrapped).last_call.path == "shared"
