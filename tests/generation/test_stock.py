"""Calls that run stock transformers, and the reasons they report."""

import functools
import gc
import logging
import weakref

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.prompts import first_pass, start
from hf_fastdecode.patches.architectures.decoders import DECODERS

from ..architectures.classes import tiny_model_of
from ..tiny_models import VOCABULARY, ragged_prompts, tiny_model
from .calls import PROMPT, SAMPLING, as_in_stock

STOCK = {
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "attention lacks; leave it out"),
    "no-cache": ({"use_cache": False}, "use_cache=False; pass use_cache=True"),
    "static-cache": (
        {"cache_implementation": "static", "return_dict_in_generate": True},
        "cache_implementation='static' was requested, and return_dict_in_generate returns that cache; leave it out",
    ),
    "static-cache-of-beams": (
        {"cache_implementation": "static", "do_sample": False, "num_beams": 4},
        "cache_implementation='static' was requested for the loop of generation mode 'beam_search'; leave it out",
    ),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 3, "num_return_sequences": 1}, "save 0 tokens"),
    "one-row": ({"num_return_sequences": 1}, "save 0 tokens"),
}


@pytest.mark.parametrize("name", STOCK)
def test_what_cannot_share_runs_stock_and_says_so(name, caplog):
    extra, reason = STOCK[name]
    model = tiny_model("llama-gqa")
    if name == "attentions":
        model.set_attn_implementation("eager")
    with caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        call = drawn(model, "stock", extra)
    (told,) = [record.message for record in caplog.records if record.name == "hf_fastdecode"]
    assert reason in call.reason
    assert call.reason in told


def drawn(model, path, extra=None, prompt=PROMPT):
    """The report of samples that are stock's, and took this path."""
    return as_in_stock(model, lambda: model.generate(**prompt, **SAMPLING | (extra or {})), path)


def test_a_cache_of_transformers_runs_stock(model):
    call = as_in_stock(model, lambda: model.generate(**PROMPT, **SAMPLING, **{CACHE: DynamicCache()}), "stock")
    assert "DynamicCache, not a SharedContextCache; leave it out, or pass what hf_fastdecode.prefill" in call.reason


def test_a_static_cache_that_nobody_gets_is_a_shared_one(model):
    drawn(model, "shared", {"cache_implementation": "static"})


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_model_with_its_own_inputs_keeps_its_loop(where):
    """This package's loop would not call the overridden method; transformers' runs over the shared prompts."""
    model = tiny_model("llama-gqa")
    plain = type(model).prepare_inputs_for_generation

    def shifted(self, input_ids, **kwargs):
        inputs = plain(self, input_ids, **kwargs)
        return inputs | {"input_ids": (inputs["input_ids"] + 1) % VOCABULARY}

    if where == "class":
        model.__class__ = type("Shifted", (type(model),), {"prepare_inputs_for_generation": shifted})
    else:
        model.prepare_inputs_for_generation = shifted.__get__(model)
    call = drawn(model, "shared")
    whose = "Shifted." if where == "class" else "the model's own "
    assert call.sampler_reason == f"{whose}prepare_inputs_for_generation uses another decoding loop"


def test_prompts_without_positions_share_as_models_count_them():
    """Models then count padding, which is not stored: padded prompts run by rows."""
    model = tiny_model("llama-gqa")
    plain = model.prepare_inputs_for_generation

    def without_positions(*args, **kwargs):
        return plain(*args, **kwargs) | {"position_ids": None}

    model.prepare_inputs_for_generation = without_positions
    padded, even = ragged_prompts(41, 36, shared=33), ragged_prompts(41, 41, shared=33)
    for prompts in (padded, even):
        drawn(model, "shared", prompt=prompts)


def test_processes_that_must_keep_step_run_stock(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert "; use synced_gpus=False" in drawn(model, "stock", {"synced_gpus": True}).reason
    finally:
        torch.distributed.destroy_process_group()


def test_a_message_comes_once(model, caplog):
    with fd.enabled(model), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        for _ in range(3):
            model.generate(**PROMPT, use_cache=False, max_new_tokens=2)
    assert len([record for record in caplog.records if record.name == "hf_fastdecode"]) == 1


@pytest.mark.parametrize("entry", [{}, {"original_max_position_embeddings": 512}], ids=["", "another original length"])
def test_dynamic_rope_runs_stock_beyond_its_limit(entry):
    """Which transformers reads from the config, and not from its entry for RoPE."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0} | entry
    model = tiny_model("llama-gqa", max_position_embeddings=88, rope_parameters=rope)
    assert "89; lower max_new_tokens" in drawn(model, "stock", {"max_new_tokens": 9}).reason
    drawn(model, "shared", {"max_new_tokens": 8})


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=["sample", "beams"])
def test_a_given_cache_never_runs_stock(model, arguments):
    """Not even an empty one, found out in the arguments, the prompts or the first pass of another loop."""
    refused = (
        ({"use_cache": False}, "use_cache=False; pass use_cache=True"),
        ({"attention_mask": torch.tensor([[1] * 79 + [0]])}, "a prompt ends in padding; set padding_side='left'"),
    )
    for given, message in refused:
        call = PROMPT | given | {CACHE: fd.SharedContextCache(), "max_new_tokens": 2}
        with fd.enabled(model), pytest.raises(ValueError, match=f"cannot use a SharedContextCache: {message}"):
            model.generate(**call, **arguments)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_stock_call_holds_no_memory_of_the_shared_attempt(model, monkeypatch, beams):
    """An exception that were kept would keep its frames' tensors, without a garbage collection even in a cycle."""
    left = []

    def refused(call, plan, *arguments, **options):
        left.append(weakref.ref(plan.cache))
        raise Unsupported("it was refused")

    def held(ids, scores):
        left.append(left[0]())
        return False

    for module in (start, first_pass):
        monkeypatch.setattr(module, "require_gain", refused)
    gc.disable()
    try:
        with fd.enabled(model):
            model.generate(**PROMPT, num_beams=beams, max_new_tokens=2, stopping_criteria=StoppingCriteriaList([held]))
            assert fd.explain(model).last_call.reason == "it was refused"
    finally:
        gc.enable()
    assert left[1:] == [None, None]


OTHERS = {
    "position_ids": ({"position_ids": torch.arange(80)[None] * 2}, "position_ids"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 75 + [0] * 5])}, "padding_side"),
    "stock cache": (lambda model: {CACHE: DynamicCache(config=model.config)}, "DynamicCache"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_shared_cache_does_not_follow_runs_stock(model, name):
    given, reason = OTHERS[name]

    def call():
        more = given(model) if callable(given) else given
        return model.generate(**PROMPT | SAMPLING | more)

    assert reason in as_in_stock(model, call, "stock").reason


def test_latents_that_other_code_reads_run_stock():
    model = tiny_model_of("DeepseekV3ForCausalLM")
    attention = model.model.layers[-1].self_attn
    attention.__class__ = type("Attention", (type(attention),), {})
    assert "latent" in drawn(model, "stock").reason


def test_attention_over_some_keys_only_runs_stock(model, monkeypatch):
    """As of layers that hand on which keys a query sees."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    plain = LlamaAttention.forward

    def sparse(self, hidden_states, *args, **kwargs):
        return plain(self, hidden_states, *args, **kwargs, block_indices=torch.zeros(1, 1, 8, dtype=torch.long))

    monkeypatch.setattr(LlamaAttention, "forward", sparse)
    monkeypatch.setattr(model, "__class__", type("Sparse", (type(model),), {}))  # whose modules come with it
    assert "LlamaAttention passes 'block_indices' (Tensor)" in drawn(model, "stock").reason


def test_what_stock_attention_leaves_out_runs_stock():
    """transformers' sdpa function ignores attention sinks, and in some versions soft caps."""
    model = tiny_model("gpt_oss")
    model.config._attn_implementation_internal = "sdpa"
    reason = drawn(model, "stock").reason
    assert "GptOssAttention passes 's_aux', which transformers' sdpa attention leaves out" in reason


def test_attention_that_takes_the_cache_for_a_tensor_runs_stock(monkeypatch):
    monkeypatch.delitem(DECODERS["diffllama"].overrides["DiffLlamaAttention"], "forward")
    assert "are not tensors" in drawn(tiny_model_of("DiffLlamaForCausalLM"), "stock").reason


def test_attention_that_scales_with_the_cache_runs_stock():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 16}
    config = Llama4TextConfig(vocab_size=VOCABULARY, **sizes, no_rope_layers=[0, 0], floor_scale=8, pad_token_id=0)
    model = Llama4ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    drawn(model, "stock", prompt=ragged_prompts(60, 75, shared=40))


@pytest.mark.parametrize("named", ["plainly", "like what it wraps", "not at all"])
def test_attention_of_the_users_own_runs_stock(model, named):
    def halved(module, query, key, value, mask, **kwargs):
        return sdpa_attention_forward(module, query * 0.5, key, value, mask, **kwargs)

    if named == "like what it wraps":
        halved = functools.wraps(sdpa_attention_forward)(halved)
    elif named == "not at all":
        halved.__module__ = None
    AttentionInterface.register("halved", halved)
    try:
        model.set_attn_implementation("halved")
        assert "its attention is 'halved'" in drawn(model, "stock").reason
    finally:
        model.set_attn_implementation("sdpa")
        del AttentionInterface._global_mapping["halved"]


def test_attention_of_transformers_does_not():
    model = tiny_model("llama-gqa")
    model.set_attn_implementation("eager")
    drawn(model, "shared")


def test_a_cache_of_another_model_is_an_error(model):
    other = tiny_model("llama-mqa")
    with fd.enabled(other), fd.enabled(model):
        cache = fd.prefill(other, PROMPT)
        with pytest.raises(ValueError, match="the cache holds 1 KV heads of 16 numbers, the model has 2 of 16"):
            model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})


@pytest.mark.parametrize(
    ("prompt", "arguments", "remedy"),
    [
        (ragged_prompts(90), {}, "(num_return_sequences), or enable(model, reuse_prefix=True) for prompts that begin"),
        (ragged_prompts(90, 90), {}, "put prompts that begin alike next to each other"),
        (ragged_prompts(20), {"num_return_sequences": 3}, "draw more samples, or of longer prompts"),
    ],
)
def test_who_saves_too_little_is_told_once_and_what_would_help(prompt, arguments, remedy, caplog):
    model = tiny_model()
    with fd.enabled(model):
        for _ in range(2):
            model.generate(**prompt, do_sample=True, max_new_tokens=2, **arguments)
        assert fd.explain(model).last_call.path == "stock"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "sharing would save" in record.getMessage()
    assert remedy in record.getMessage()
