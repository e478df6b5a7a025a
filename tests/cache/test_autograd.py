"""Caches where gradients are wanted, and across inference mode."""

import pytest
import torch
from transformers import DynamicCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.torch_operators.operators import BackendError

from ..tiny_models import ragged_prompts, tiny_model

PROMPTS = ragged_prompts(40, 40, 40, shared=33)["input_ids"]
TOKENS = ragged_prompts(5, 5, 5, seed=3)["input_ids"]
# The kernels are tested interpreted, which takes float32.
BACKENDS = ["auto", pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="float32"))]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa", num_hidden_layers=1)


@pytest.mark.parametrize("select", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_outlives_inference_mode(model, select, backend):
    call = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 2, "return_dict_in_generate": True}
    with fd.enabled(model, backend=backend):
        with torch.inference_mode():
            out = model.generate(PROMPTS, **call)
            if select:
                out[CACHE].batch_select_indices(torch.arange(6))
        with torch.no_grad():
            logits = model(out.sequences[:, -1:], **{CACHE: out[CACHE]}).logits[:, -1]
            expected = model(out.sequences).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt_oss"])
def test_gradients_through_a_cache_are_those_of_stock(name):
    """A loss over completions of one prompt, whose keys and values are given."""
    model = tiny_model(name)

    def gradients(cache):
        model.zero_grad()
        model(TOKENS, **{CACHE: cache}, position_ids=torch.arange(40, 45).expand(3, -1), labels=TOKENS)[
            "loss"
        ].backward()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPTS, **{CACHE: stock})
    expected = gradients(stock)
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPTS)
        found = gradients(cache)
    assert not any("by cpu" in layer.ran["decode"] for layer in cache.layers)
    assert len(found) == len(expected) > 10
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
@pytest.mark.parametrize(
    ("name", "trained"), [("llama-gqa", "layers.1.self_attn.v_proj"), ("gpt_oss", "1.self_attn.sinks")]
)
def test_kernels_are_refused_whatever_gradients_are_wanted(name, trained):
    model = tiny_model(name).requires_grad_(False)
    for weight in (weight for full, weight in model.named_parameters() if trained in full):
        weight.requires_grad_()
    with fd.enabled(model, backend="triton"), pytest.raises(BackendError, match="it computes no gradients"):
        model(TOKENS, **{CACHE: fd.prefill(model, PROMPTS)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_kernels_are_refused_where_stored_values_want_gradients():
    """Those of a first pass, in which the weights were trained that make values alone."""
    model = tiny_model("llama-gqa", num_hidden_layers=1).requires_grad_(False)
    trained = model.model.layers[0].self_attn.v_proj.weight.requires_grad_()
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPTS)
        model(TOKENS, **{CACHE: cache})
        trained.requires_grad_(False)
        cache.state.backend = "triton"
        with pytest.raises(BackendError, match="it computes no gradients"):
            model(TOKENS, **{CACHE: cache})


def test_operators_without_gradients_are_refused_where_these_are_wanted(model):
    with (
        fd.enabled(model, backend="cpu"),
        pytest.raises(BackendError, match=r"torch.no_grad\(\) is off and a gradient is needed"),
    ):
        model(TOKENS, **{CACHE: fd.prefill(model, PROMPTS)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_move_where_gradients_are_wanted(model, backend):
    cache = cache_in_inference_mode(model, backend)
    cache.batch_repeat_interleave(2)
    assert cache.rows == 6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("forked", [False, True])
def test_a_step_outlives_inference_mode(model, backend, forked):
    with torch.inference_mode():
        cache = cache_in_inference_mode(model, backend)
        cache = cache.fork() if forked else cache
    with fd.enabled(model, backend=backend), torch.no_grad():
        assert model(TOKENS[:, :1], **{CACHE: cache}).logits.isfinite().all()


def cache_in_inference_mode(model, backend):
    with fd.enabled(model, backend=backend), torch.inference_mode():
        cache = fd.prefill(model, PROMPTS)
        model(TOKENS, **{CACHE: cache})
    return cache


def test_a_fork_without_gradients_has_none(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPTS)
        model(TOKENS, **{CACHE: cache})
        with torch.no_grad():
            fork = cache.fork()
    assert not any(part.requires_grad for layer in fork.layers for part in layer.storage.tensors())
