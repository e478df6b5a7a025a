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
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.launch.dispatch import Choice
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.prompts import first_pass, gain, start
from hf_fastdecode.patches.architectures.decoders import DECODERS

from ..tiny_models import VOCABULARY, ragged_prompts, seeded, tiny_model
from .calls import PROMPT, SAMPLING, both

STOCK = {
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "no-cache": ({"use_cache": False}, "use_cache"),
    "static-cache": (
        {"cache_implementation": "static", "return_dict_in_generate": True},
        "cache_implementation='static' was requested, and return_dict_in_generate returns that cache",
    ),
    "static-cache-of-beams": (
        {"cache_implementation": "static", "do_sample": False, "num_beams": 4},
        "cache_implementation='static' was requested for the loop of generation mode 'beam_search'",
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
    with caplog.at_level(logging.INFO, logger="hf_fastdecode"):
        stock, shared, call = both(model, lambda: SAMPLING | extra)
        told = [record.message for record in caplog.records if record.name == "hf_fastdecode"]
        with fd.enabled(model):
            seeded(lambda: model.generate(**PROMPT, **SAMPLING, **{}))
    assert call.path == "stock"
    assert reason in call.reason
    assert len(told) == 1
    assert call.reason in told[0]
    sequences = [out if isinstance(out, torch.Tensor) else out.sequences for out in (stock, shared)]
    assert torch.equal(*sequences)


def test_a_static_cache_that_nobody_gets_is_a_shared_one(model):
    stock, shared, call = both(model, lambda: SAMPLING | {"cache_implementation": "static"})
    assert call.path == "shared"
    assert torch.equal(shared, stock)


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
    stock, shared, call = both(model, lambda: SAMPLING)
    assert torch.equal(shared, stock)
    assert call.path == "shared"
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
        stock = seeded(lambda prompts=prompts: model.generate(**prompts, **SAMPLING))
        with fd.enabled(model):
            assert torch.equal(seeded(lambda prompts=prompts: model.generate(**prompts, **SAMPLING)), stock)
            assert fd.explain(model).last_call.path == "shared"


def test_processes_that_must_keep_step_run_stock(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        stock, shared, call = both(model, lambda: SAMPLING | {"synced_gpus": True})
    finally:
        torch.distributed.destroy_process_group()
    assert call.path == "stock"
    assert "synced_gpus=True" in call.reason
    assert torch.equal(shared, stock)


@pytest.mark.parametrize(("saved", "stock"), [(0, True), (1_000_000, False)])
def test_plain_decoding_is_a_candidate(model, monkeypatch, saved, stock):
    """Where the cost model predicts plain decoding to be faster, sharing must save more prefill time than it loses."""
    forest = Forest(8, [Node(Span(0, 0, 100 + saved), 0, 8)])
    times = {"kernels": 2e-5, "library": 9e-5, "plain": 1e-5}
    monkeypatch.setattr(gain, "choose", lambda *_: Choice("plain", times))
    monkeypatch.setattr(gain, "prefill_rate", lambda _: 1e14)

    class Gpu:
        device, dtype, config = torch.device("cuda"), torch.bfloat16, model.config
        parameters = model.parameters

    layout = ModelLayout.of(model)
    choice = gain.plain_is_faster(Gpu(), layout, forest, 64)
    assert (choice is not None) == stock
    faster = times | {"kernels": 9e-6}
    monkeypatch.setattr(gain, "choose", lambda *_: Choice("kernels", faster))
    assert gain.plain_is_faster(Gpu(), layout, forest, 64) is None
    assert gain.plain_is_faster(model, layout, forest, 64) is None  # on the CPU there is nothing to choose


def test_a_message_comes_once(model, caplog):
    with fd.enabled(model), caplog.at_level(logging.INFO, logger="hf_fastdecode"):
        for _ in range(3):
            model.generate(**PROMPT, use_cache=False, max_new_tokens=2)
    assert len([record for record in caplog.records if record.name == "hf_fastdecode"]) == 1


@pytest.mark.parametrize("entry", [{}, {"original_max_position_embeddings": 512}], ids=["", "another original length"])
def test_dynamic_rope_runs_stock_beyond_its_limit(entry):
    """Which transformers reads from the config, and not from its entry for RoPE."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0} | entry
    model = tiny_model("llama-gqa", max_position_embeddings=88, rope_parameters=rope)
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert "88" in call.reason
    assert torch.equal(shared, stock)
    stock, shared, call = both(model, lambda: SAMPLING | {"max_new_tokens": 8})
    assert call.path == "shared"
    assert torch.equal(shared, stock)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=["sample", "beams"])
def test_a_given_cache_never_runs_stock(model, arguments):
    """Not even an empty one, found out in the arguments, the prompts or the first pass of another loop."""
    refused = (
        ({"use_cache": False}, f"use_cache=False; leave {CACHE} out"),
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


def test_custom_position_ids_run_stock(model):
    prompt = PROMPT | {"position_ids": torch.arange(80)[None] * 2}
    stock, shared, call = both(model, lambda: SAMPLING, prompt)
    assert call.path == "stock"
    assert "position_ids" in call.reason
    assert torch.equal(shared, stock)


def test_right_padding_runs_stock(model):
    ids, mask = PROMPT["input_ids"].repeat(2, 1), torch.ones(2, 80, dtype=torch.long)
    mask[1, -5:] = 0
    stock, shared, call = both(model, lambda: SAMPLING, {"input_ids": ids, "attention_mask": mask})
    assert call.path == "stock"
    assert "padding_side" in call.reason
    assert torch.equal(shared, stock)


def test_a_stock_cache_runs_stock(model):
    def arguments():
        return SAMPLING | {CACHE: DynamicCache(config=model.config)}

    stock, shared, call = both(model, arguments)
    assert call.path == "stock"
    assert "DynamicCache" in call.reason
    assert torch.equal(shared, stock)


def test_latents_that_other_code_reads_run_stock():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    class Attention(DeepseekV3Attention):
        pass

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    ranks = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 32, "first_k_dense_replace": 2}
    config = DeepseekV3Config(vocab_size=VOCABULARY, **sizes, **ranks, pad_token_id=0, eos_token_id=None)
    model = DeepseekV3ForCausalLM(config).eval()
    model.model.layers[1].self_attn.__class__ = Attention
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert "latent" in call.reason
    assert torch.equal(shared, stock)


def test_attention_over_some_keys_only_runs_stock(model, monkeypatch):
    """As of layers that hand on which keys a query sees."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    plain = LlamaAttention.forward

    def sparse(self, hidden_states, *args, **kwargs):
        return plain(self, hidden_states, *args, **kwargs, block_indices=torch.zeros(1, 1, 8, dtype=torch.long))

    monkeypatch.setattr(LlamaAttention, "forward", sparse)
    monkeypatch.setattr(model, "__class__", type("Sparse", (type(model),), {}))  # whose modules come with it
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert "LlamaAttention passes 'block_indices' (Tensor)" in call.reason
    assert torch.equal(shared, stock)


def test_what_stock_attention_leaves_out_runs_stock():
    """transformers' sdpa function ignores attention sinks, and in some versions soft caps."""
    model = tiny_model("gpt_oss")
    model.config._attn_implementation_internal = "sdpa"
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert "GptOssAttention passes 's_aux', which transformers' sdpa attention leaves out" in call.reason
    assert torch.equal(shared, stock)


def test_attention_that_takes_the_cache_for_a_tensor_runs_stock(monkeypatch):
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    monkeypatch.delitem(DECODERS["diffllama"].stand_ins["DiffLlamaAttention"], "forward")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = DiffLlamaConfig(vocab_size=VOCABULARY, intermediate_size=64, **sizes, pad_token_id=0, eos_token_id=None)
    stock, shared, call = both(DiffLlamaForCausalLM(config).eval(), lambda: SAMPLING)
    assert call.path == "stock"
    assert "are not tensors" in call.reason
    assert torch.equal(shared, stock)


def test_attention_that_scales_with_the_cache_runs_stock():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 16}
    config = Llama4TextConfig(vocab_size=VOCABULARY, **sizes, no_rope_layers=[0, 0], floor_scale=8, pad_token_id=0)
    model = Llama4ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    stock, shared, call = both(model, lambda: SAMPLING, ragged_prompts(60, 75, shared=40))
    assert call.path == "stock"
    assert torch.equal(shared, stock)


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
        stock, shared, call = both(model, lambda: SAMPLING)
    finally:
        model.set_attn_implementation("sdpa")
        del AttentionInterface._global_mapping["halved"]
    assert call.path == "stock"
    assert "its attention is 'halved'" in call.reason
    assert torch.equal(shared, stock)


def test_attention_of_transformers_does_not():
    model = tiny_model("llama-gqa")
    model.set_attn_implementation("eager")
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        assert fd.explain(model).last_call.path == "shared"


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
