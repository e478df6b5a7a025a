"""What passes themselves replace on a model is no change of it: caches kept before go on."""

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..architectures.classes import tiny_model_of
from ..tiny_models import seeded, tiny_model

LONG = 720
"""Tokens that need a longer table than tiny models begin with."""


def stock_call(model, ids):
    model.generate(ids[:, :3], do_sample=False, max_new_tokens=3, use_cache=False)


def direct_pass(model, ids):
    with torch.no_grad():
        model(ids)


def longer_call(model, ids):
    model.generate(ids[:, :2].repeat(1, LONG // 2), do_sample=False, max_new_tokens=3)


IN_MODULES = [] if CACHE == "past_key_values" else ["RecurrentGemmaForCausalLM"]  # older configs name no states


@pytest.mark.parametrize("name", [*IN_MODULES, "XGLMForCausalLM", "Kosmos2TextForCausalLM"])
@pytest.mark.parametrize("between", [stock_call, direct_pass, longer_call])
def test_a_call_in_between(name, between):
    model = tiny_model_of(name)
    ids = torch.randint(5, 60, (1, 80))
    prompt = torch.cat([ids, ids[:, :6]], 1)
    call = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4}
    stock = seeded(lambda: model.generate(prompt, **call))
    model = tiny_model_of(name)  # whose table is as it was
    with fd.enabled(model, min_saved_tokens=1, reuse_prefix=True):
        cache = fd.prefill(model, ids)
        model.generate(ids, **call)
        between(model, ids)
        for given in ({CACHE: cache}, {}):
            assert torch.equal(seeded(lambda: model.generate(prompt, **call, **given)), stock)  # noqa: B023
            report = fd.explain(model).last_call
            assert report.path == "shared"
            if name.startswith("XGLM"):  # prompts of the others are computed whole
                assert report.known_tokens == (80,)


@pytest.mark.parametrize("name", ["llama-gqa", "olmo3"])
def test_frequencies_that_a_longer_call_changes(name):
    """Of all layers, or of those of one type."""
    dynamic, default = ({"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} for kind in ("dynamic", "default"))
    rope = dynamic if name == "llama-gqa" else {"full_attention": dynamic, "sliding_attention": default}
    model = tiny_model(name, max_position_embeddings=128, rope_parameters=rope)
    ids, call = torch.randint(5, 60, (1, 80)), {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4}
    with fd.enabled(model, min_saved_tokens=1, reuse_prefix=True):
        cache = fd.prefill(model, ids[:, :70])
        first = seeded(lambda: model.generate(ids, **call))
        direct_pass(model, ids.repeat(1, 2))
        assert torch.equal(seeded(lambda: model.generate(ids, **call)), first)
        assert fd.explain(model).last_call.known_tokens == (80,)
        assert torch.equal(seeded(lambda: model.generate(ids, **call, **{CACHE: cache})), first)


@pytest.mark.parametrize("change", ["begins otherwise", "no longer", "in place"])
def test_a_table_that_was_replaced_otherwise(change):
    model = tiny_model_of("XGLMForCausalLM")
    ids = torch.randint(5, 60, (1, 80))
    with fd.enabled(model):
        cache = fd.prefill(model, ids)
        table = next(one for one in model.modules() if "Sinusoidal" in type(one).__name__)
        if change == "in place":
            table.weights[3:5] += 1
        else:
            longer = torch.cat([table.weights] * (1 if change == "no longer" else 2))
            table.weights = longer if change == "no longer" else longer.flip(0)
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(ids, num_return_sequences=2, do_sample=True, max_new_tokens=2, **{CACHE: cache})
