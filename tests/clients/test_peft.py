"""PEFT: adapters of an enabled base model, switched, merged and chosen for each row, give stock's tokens."""

from __future__ import annotations

import peft
import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import ragged_prompts, seeded, tiny_model

PROMPTS = ragged_prompts(80, 73, shared=50)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 9}


@pytest.fixture
def model():
    """A model with two adapters that change its tokens; the first is active."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama-gqa"), config, adapter_name="first")
    adapted.add_adapter("second", config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return adapted.eval()


def generate(model, **arguments):
    return seeded(lambda: model.generate(**PROMPTS, **{**SAMPLING, **arguments}))


def shared(model) -> bool:
    return fd.explain(model).last_call.path == "shared"


def states(model):
    """The tokens of each state of the adapters, and whether each call was shared."""
    found, paths = {}, {}

    def note(name):
        found[name] = generate(model)
        report = fd.explain(model)
        paths[name] = report.last_call.path if report.last_call else "not enabled"

    note("first")
    model.set_adapter("second")
    note("second")
    with model.disable_adapter():
        note("none")
    model.set_adapter("first")
    note("first again")
    model.merge_adapter()
    note("merged")
    model.unmerge_adapter()
    note("unmerged")
    return found, paths


def test_tokens_follow_the_adapters(model):
    expected, _ = states(model)
    assert len({tuple(expected[name].flatten().tolist()) for name in ("first", "second", "none")}) == 3
    fd.enable(model)
    found, paths = states(model)
    assert set(paths.values()) == {"shared"}
    for name, tokens in expected.items():
        assert torch.equal(tokens, found[name]), name


def test_the_base_model_is_what_is_enabled(model):
    expected = generate(model)
    fd.enable(model.get_base_model())
    assert torch.equal(generate(model), expected)
    assert shared(model)
    fd.disable(model)
    assert not fd.explain(model.get_base_model()).enabled


def test_a_model_enabled_before_its_adapter_shares_with_it():
    base = fd.enable(tiny_model("llama-gqa"))
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    found = generate(adapted)
    assert shared(adapted)
    fd.disable(adapted)
    assert torch.equal(found, generate(adapted))


def test_an_adapter_for_each_row_runs_stock(model):
    prompts = {name: value.repeat_interleave(2, 0) for name, value in PROMPTS.items()}
    arguments = {"adapter_names": ["first", "second", "__base__", "first"], "max_new_tokens": 9, "do_sample": False}
    expected = model.generate(**prompts, **arguments)
    fd.enable(model)
    found = model.generate(**prompts, **arguments)
    assert torch.equal(found, expected)
    assert fd.explain(model).last_call.path == "stock"
    generate(model)  # the hooks have left with that call
    assert shared(model)


@pytest.mark.parametrize("change", ["set_adapter", "disable", "merge"])
def test_a_kept_cache_is_of_the_adapter_that_made_it(model, change):
    fd.enable(model)
    cache = fd.prefill(model, {name: value[:1] for name, value in PROMPTS.items()})
    prompt = {name: value[:1] for name, value in PROMPTS.items()}
    before = seeded(lambda: model.generate(**prompt, **SAMPLING, **{CACHE: cache}))
    if change == "set_adapter":
        model.set_adapter("second")
    elif change == "disable":
        model.base_model.disable_adapter_layers()
    else:
        model.merge_adapter()
    with pytest.raises(ValueError, match="prefill"):
        model.generate(**prompt, **SAMPLING, **{CACHE: cache})
    if change == "disable":
        model.base_model.enable_adapter_layers()
        assert torch.equal(before, seeded(lambda: model.generate(**prompt, **SAMPLING, **{CACHE: cache})))
