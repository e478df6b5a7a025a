"""A pass that is refused or fails leaves the cache as it was."""

import pytest
import torch
from transformers import DynamicCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache

from ..short_calls import PROMPT, SAMPLING
from ..tiny_models import seeded, tiny_model

IDS = PROMPT["input_ids"]
TOKENS = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")


def state(cache):
    """What a pass changes."""
    lengths = [cache.suffix_length, *(layer.appended for layer in cache.layers)]
    return repr(cache), cache.get_seq_length(), lengths, cache.suffix_tokens().tolist(), cache.nbytes.stored


def assert_usable(model, cache):
    """Calls and direct passes with the cache, which holds the prompt and nothing else, equal stock's."""
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, **{CACHE: stock})
        expected = model(TOKENS, **{CACHE: stock}).logits
    sampled = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})), sampled)
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS, **{CACHE: cache}).logits, expected)


def disabled_generate(model, cache):
    fd.disable(model)
    model.generate(**PROMPT, max_new_tokens=3, **{CACHE: cache})


def disabled_pass(model, cache):
    fd.disable(model)
    model(TOKENS, **{CACHE: cache})


def submodule(model, cache):
    model.model(TOKENS, **{CACHE: cache})


def layer(model, cache):
    hidden = torch.zeros(1, 3, 64)
    positions = model.model.rotary_emb(hidden, torch.arange(80, 83)[None])
    model.model.layers[1](hidden, position_embeddings=positions, **{CACHE: cache})


def disabled_fork(model, cache):
    fd.disable(model)
    model.generate(**PROMPT, max_new_tokens=3, **{CACHE: cache.fork()})


def no_cache(model, cache):
    model.generate(**PROMPT, use_cache=False, max_new_tokens=3, **{CACHE: cache})


def interrupt(model, cache):
    def stop(module, args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    try:
        model(TOKENS, **{CACHE: cache})
    finally:
        hook.remove()


def other_rows(model, cache):
    model(TOKENS.repeat(2, 1), **{CACHE: cache})


def more_layers(model, cache):
    with fd.enabled(tiny_model("llama-gqa", num_hidden_layers=3)) as other:
        other(TOKENS, **{CACHE: cache})


def fewer_layers(model, cache):
    with fd.enabled(tiny_model("llama-gqa", num_hidden_layers=1)) as other:
        other(TOKENS, **{CACHE: cache})


def layer_left_out(model, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", lambda hidden_states, **kwargs: hidden_states)
        model(TOKENS, **{CACHE: cache})


def other_heads(model, cache):
    with fd.enabled(tiny_model("llama-mha")) as other:
        other(TOKENS, **{CACHE: cache})


PASSES = {
    disabled_generate: (ValueError, r"the LlamaForCausalLM that filled it is no longer enabled; call .*enable\(model"),
    disabled_pass: (ValueError, r"the LlamaForCausalLM that filled it is no longer enabled; call .*enable\(model"),
    disabled_fork: (ValueError, r"the LlamaForCausalLM that filled it is no longer enabled; call .*enable\(model"),
    submodule: (AttributeError, r"call the model itself .* after hf_fastdecode.enable"),
    layer: (AttributeError, r"call the model itself .* after hf_fastdecode.enable"),
    no_cache: (ValueError, "cannot use a SharedContextCache"),
    interrupt: (KeyboardInterrupt, None),
    other_rows: (ValueError, "holds 1 rows, got keys for 2"),
    more_layers: (ValueError, "the cache holds 2 layers, the model has 3; make it with"),
    fewer_layers: (ValueError, "the cache holds 2 layers, the model has 1; make it with"),
    layer_left_out: (ValueError, "differ in length, 0 to 3 tokens: the pass left out some of the layers"),
    other_heads: (ValueError, "holds 2 KV heads of 16 numbers, the model has 4 of 16; make it with"),
}


@pytest.mark.parametrize("refused", PASSES, ids=lambda refused: refused.__name__)
def test_a_cache_outlives_a_pass_that_is_refused(model, refused):
    error, message = PASSES[refused]
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, PROMPT)
        before = state(cache)
        for _ in range(2):
            with pytest.raises(error, match=message):
                refused(model, cache)
            assert state(cache) == before
            fd.enable(model)
    assert_usable(model, cache)


@pytest.mark.parametrize(
    "refused", [disabled_pass, submodule, layer, interrupt, fewer_layers], ids=lambda refused: refused.__name__
)
def test_an_empty_cache_stays_empty(model, refused):
    cache = SharedContextCache()
    with fd.enabled(model), torch.no_grad():
        with pytest.raises(BaseException):  # noqa: B017, PT011 - which one is tested above
            refused(model, cache) if refused is not fewer_layers else interrupt(model, cache)
        assert (len(cache.layers), cache.rows, cache.get_seq_length()) == (0, 0, 0)
    with fd.enabled(model), torch.no_grad():
        logits = model(IDS.repeat(2, 1), **{CACHE: cache}).logits
    torch.testing.assert_close(logits, model(IDS.repeat(2, 1)).logits)


def emptied_by_reset(model):
    cache = fd.prefill(model, PROMPT)
    cache.reset()
    return cache


def emptied_by_crop(model):
    cache = fd.prefill(model, PROMPT)
    cache.crop(-90)
    return cache


def fork_of_nothing(model):
    return SharedContextCache().fork()


def selected_from_nothing(model):
    cache = SharedContextCache()
    cache.batch_repeat_interleave(3)
    return cache


def cropped_nothing(model):
    cache = SharedContextCache()
    cache.crop(-3)
    return cache


EMPTY = [emptied_by_reset, emptied_by_crop, fork_of_nothing, selected_from_nothing, cropped_nothing]


@pytest.mark.parametrize("empty", EMPTY, ids=lambda empty: empty.__name__)
def test_a_cache_without_tokens_serves_as_a_new_one(model, empty):
    sampled = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    rows = IDS if empty is emptied_by_crop else IDS.repeat(3, 1)
    with fd.enabled(model), torch.no_grad():
        cache = empty(model)
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})), sampled)
        logits = model(rows, **{CACHE: cache}).logits
    torch.testing.assert_close(logits, model(rows).logits)
