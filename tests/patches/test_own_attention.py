"""Architectures whose attention the interface alone does not reach: stock's tokens in fp32."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import MethodType

import pytest
import torch
import transformers
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, COMPILED_CALL, doge_is_causal
from hf_fastdecode.attention.overrides import OwnCode, overrides_of, register
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.patches.architectures import OWN_ATTENTION, biased_keys
from hf_fastdecode.patches.architectures.biased_keys import (
    MOST_POSITIONS,
    WIDTH,
    with_key_positions,
    with_query_positions,
)

from ..architectures.compare import compared, stock_tokens
from ..generation.uncaptured import SAMPLING, on_the_cpu
from ..tiny_models import ragged_prompts, seeded, tiny_model_of_type

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
_GATED = {**_SIZES, "intermediate_size": 96}
_FALCON = {**_SIZES, "ffn_hidden_size": 96}
_BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4}
_MPT = {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512, "expansion_ratio": 2, "use_cache": True}
_GPT_NEO = {
    **{"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96, "max_position_embeddings": 512},
    **{"attention_types": [[["global", "local"], 1]], "window_size": 24},
    "seed": 1,  # with 0, logits of two greedy tokens differ by 1e-4, and roundings by up to 1e-5
}
_XGLM = {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 512}
_BART = {
    **{"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 3},
    **{"encoder_attention_heads": 2, "encoder_ffn_dim": 96, "max_position_embeddings": 512},
}
_JETMOE = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_key_value_heads": 2},
    **{"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512},
}
_LLAMA4 = {
    **{**_GATED, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2},
    **{"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2, "attn_scale": 2.0, "floor_scale": 128},
}
_DOGE = {**_GATED, "num_key_value_heads": 2, "keep_window_size": 90}
_GEMMA3N = {
    **{**_GATED, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    **{"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "laurel_rank": 8, "hidden_size_per_layer_input": 8},
    **{"vocab_size_per_layer_input": 97},
}

MODELS = {
    "bart": ("bart", _BART),
    "bloom": ("bloom", {**_BLOOM, "hidden_size": 96, "n_head": 6}),
    "diffllama": ("diffllama", {**_GATED, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}),
    "doge": ("doge", _DOGE),
    "falcon": ("falcon", _FALCON),
    "falcon-40b": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-rw": ("falcon", {**_FALCON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),
    "gemma3n": ("gemma3n_text", _GEMMA3N),
    "gpt_neo": ("gpt_neo", _GPT_NEO),
    "gpt_neox_japanese": ("gpt_neox_japanese", {**_SIZES, "intermediate_multiple_size": 2}),
    "jetmoe": ("jetmoe", _JETMOE),
    "llama4": ("llama4_text", _LLAMA4),
    "mpt": ("mpt", {**_MPT, "d_model": 96, "n_heads": 6, "attn_config": {"clip_qkv": 1.0}}),
    "mvp": ("mvp", _BART),
    "rembert": ("rembert", {**_GATED, "input_embedding_size": 32, "output_embedding_size": 32, "is_decoder": True}),
    "roformer": ("roformer", {**_GATED, "embedding_size": 32, "is_decoder": True, "rotary_value": True}),
    "stablelm": ("stablelm", {**_GATED, "num_key_value_heads": 2}),
    "xglm": ("xglm", _XGLM),
}
_ATTEND = GPTNeoSelfAttention._attn
LOGITS = {"do_sample": False, "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
TWO = ragged_prompts(40, 40, shared=40)
MASKS_PROMPTS = doge_is_causal(transformers.models.doge.modeling_doge)
of_causal_doge = pytest.mark.skipif(
    not MASKS_PROMPTS, reason="this transformers lets Doge's prompts attend to later tokens"
)
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}


def report_of(model, call, **options):
    """How a call ran whose tokens are stock's."""
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, **{"min_saved_tokens": 1, **options}):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        return fd.explain(model).last_call


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_stock(name):
    """Greedy and sampled, left-padded prompts that begin alike, also over a kept cache; and beams."""
    model_type, fields = MODELS[name]
    model, prompts = tiny_model_of_type(model_type, **fields), ragged_prompts(57, 71, 64, shared=40)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".A"):  # of Doge, whose gates are else all the same
                parameter.copy_(torch.tensor([-1.0, 1.0]))
    verdict = compared(model, prompts, stock_tokens(model, prompts))
    if name in ("rembert", "roformer") and verdict == ("stock", "the model's mask is not plain causal attention"):
        pytest.skip(f"transformers {transformers.__version__} lets prompts attend to later tokens")
    if name == "doge" and not MASKS_PROMPTS:
        assert verdict[0] == "stock" and "attend to later tokens" in verdict[1]
        return
    assert verdict == ("shared", "")
    assert report_of(model, prompts | BEAMS).path == "shared"


@pytest.mark.parametrize("name", ["bloom", "falcon-rw", "mpt"])
def test_alibi_at_positions_that_half_precision_rounds(name):
    model_type, fields = MODELS[name]
    model, call = tiny_model_of_type(model_type, **fields), {**LOGITS, **ragged_prompts(300, 290, shared=280)}
    stock = torch.stack(model.generate(**call).logits)
    with fd.enabled(model, min_saved_tokens=1):
        shared = torch.stack(model.generate(**call).logits)
        assert fd.explain(model).last_call.path == "shared"
    assert torch.allclose(shared, stock, rtol=0, atol=1e-5 * float(stock.abs().max()))


@pytest.mark.parametrize("name", ["bloom", "diffllama", pytest.param("doge", marks=of_causal_doge), "falcon-40b"])
def test_reports_know_what_transformers_caches(name):
    model_type, fields = MODELS[name]
    model = tiny_model_of_type(model_type, **fields)
    call = ragged_prompts(40, 40, shared=40) | {"max_new_tokens": 3, "return_dict_in_generate": True}
    stock = sum(layer.keys.nbytes + layer.values.nbytes for layer in model.generate(**call)[CACHE].layers)
    with fd.enabled(model, min_saved_tokens=1):
        assert model.generate(**call)[CACHE].nbytes.stock == stock
        assert fd.explain(model).last_call.nbytes.stock == stock


SMALL = {
    "bart": {**_BART, "decoder_layers": 1, "decoder_attention_heads": 2, "d_model": 32},
    "diffllama": {**_GATED, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16},
    "bloom": {**_BLOOM, "n_layer": 1, "n_head": 2, "hidden_size": 32},
    "gemma3n_text": {
        **{**_GEMMA3N, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"layer_types": ["sliding_attention"] * 2, "num_kv_shared_layers": 1},
        "activation_sparsity_pattern": [0.95, 0.0],
    },
}


@on_the_cpu
@pytest.mark.parametrize("model_type", SMALL)
def test_captured_steps(model_type, monkeypatch):
    """Positions, and layers that read other layers' keys, in the kernels that captured steps call."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    model, call = tiny_model_of_type(model_type, **SMALL[model_type]), ragged_prompts(41, 36, shared=33) | SAMPLING
    assert report_of(model, call, mode="graph", backend="triton").mode == "graph"


STAND_INS = {
    "gpt_neo": (OWN_ATTENTION["gpt_neo"], "GPTNeoSelfAttention", "_attn", "_attn"),
    "falcon": (OWN_ATTENTION["falcon"], "FalconAttention", "forward", COMPILED_CALL),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_modules_are_restored_after_an_error_and_stock_passes_run_meanwhile(name, monkeypatch):
    code, kind, method, attribute = STAND_INS[name]
    model = tiny_model_of_type(name, **MODELS[name][1])
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    prompts = ragged_prompts(40, 40, shared=40)
    logits = model(**prompts).logits

    class FailingError(Exception):
        pass

    def fail(module, *args, **kwargs):
        assert attribute in vars(module)
        with ThreadPoolExecutor(1) as pool:
            assert torch.allclose(pool.submit(lambda: model(**prompts).logits).result(), logits, atol=1e-5)
        raise FailingError

    monkeypatch.setitem(code.overrides[kind], method, fail)
    with fd.enabled(model, min_saved_tokens=1), pytest.raises(FailingError):
        model.generate(**prompts, max_new_tokens=2)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_kernels_take_no_module_that_has_a_stand_in():
    model = fd.enable(tiny_model_of_type("falcon", **_FALCON).bfloat16())
    assert "FalconAttention" not in {type(module).__name__ for module in FusedModules(model).modules}


def test_a_forward_of_another_library_on_an_attention_layer_runs_stock():
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model_of_type("xglm", **_XGLM)
    hooks.add_hook_to_module(model.model.layers[1].self_attn, hooks.ModelHook())
    report = report_of(model, TWO | {"max_new_tokens": 2})
    assert "XGLMAttention has a hook or a forward of its own" in report.reason


def _scaled(module, *args):
    return 1.5 * _ATTEND(module, *args)[0], None


class Derived(GPTNeoSelfAttention):
    """An attention layer of a user's."""


REPLACED = {
    "derived": (
        "gpt_neo",
        lambda module, patch: patch.setattr(module, "__class__", Derived),
        "Derived derives from GPTNeoSelfAttention, whose attention has code of its own here",
    ),
    "class": (
        "gpt_neo",
        lambda module, patch: patch.setattr(type(module), "_attn", _scaled),
        "GPTNeoSelfAttention._attn is not transformers' own",
    ),
    "instance": (
        "gpt_neo",
        lambda module, patch: patch.setattr(module, "_attn", MethodType(_scaled, module)),
        "GPTNeoSelfAttention has a _attn of its own",
    ),
    "compiled": (
        "falcon",
        lambda module, patch: module.compile(backend="eager"),
        "FalconAttention has a compiled call",
    ),
}


@pytest.mark.parametrize("name", REPLACED)
def test_calls_that_the_user_replaced_run_stock(name, monkeypatch):
    model_type, replace, reason = REPLACED[name]
    model = tiny_model_of_type(model_type, **MODELS[model_type][1])
    replace(next(module for module in model.modules() if overrides_of(type(module))), monkeypatch)
    assert reason in report_of(model, TWO | {"max_new_tokens": 2}).reason


def test_distances_that_count_hidden_tokens_run_stock():
    prompts = ragged_prompts(40, 40, shared=40)
    prompts["attention_mask"][:, 20] = 0
    for model_type, fields, path in (("bloom", _BLOOM, "shared"), ("mpt", _MPT, "stock")):
        model = tiny_model_of_type(model_type, **fields)
        assert report_of(model, prompts | {"max_new_tokens": 6}).path == path


REFUSED = {
    "bloom": ({**_BLOOM, "pretraining_tp": 2, "slow_but_exact": True}, "leaves the bias of its output projection out"),
    "doge": ({**_DOGE, "is_moe": True, "num_experts": 4, "num_experts_per_tok": 2}, "router mixes the tokens"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_options_that_run_stock(model_type):
    fields, reason = REFUSED[model_type]
    try:
        report = report_of(tiny_model_of_type(model_type, **fields), TWO | {"max_new_tokens": 4})
    except TypeError as error:
        pytest.skip(f"this transformers does not run it: {error}")
    assert (reason if model_type != "doge" or MASKS_PROMPTS else "attend to later tokens") in report.reason


def test_rows_beyond_exact_biases_run_stock(monkeypatch):
    monkeypatch.setattr(biased_keys, "MOST_POSITIONS", 43)
    model = tiny_model_of_type("bloom", **_BLOOM)
    for new_tokens, path in ((3, "shared"), (4, "stock")):
        assert report_of(model, TWO | {"max_new_tokens": new_tokens}).path == path


@pytest.mark.parametrize("prompts", [1, 2])
def test_hidden_states_of_several_streams_run_stock(prompts):
    model, inputs = tiny_model_of_type("gemma3n_text", **_GEMMA3N), ragged_prompts(*[43] * prompts, shared=40)
    call = {**inputs, **SAMPLING, "max_new_tokens": 2, "return_dict_in_generate": True, "output_hidden_states": True}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, min_saved_tokens=1):
        given = seeded(lambda: model.generate(**call))
        assert "its hidden states have more dimensions" in fd.explain(model).last_call.reason
    assert torch.equal(given.sequences, stock.sequences)
    assert all(map(torch.equal, given.hidden_states[0], stock.hidden_states[0]))


@of_causal_doge
def test_rows_of_which_doge_drops_tokens_run_stock():
    model, prompts = tiny_model_of_type("doge", **_DOGE), ragged_prompts(80, 80, shared=40)
    assert "keeps the 90 tokens of the largest gates" in report_of(model, prompts | {"max_new_tokens": 12}).reason
    assert report_of(model, prompts | {"max_new_tokens": 10}).path == "shared"


def test_llama4_scales_with_the_padding_of_prompts():
    """Stock counts it, beyond `floor_scale` tokens: prompts of one length share, others run stock."""
    model = tiny_model_of_type("llama4_text", **{**_LLAMA4, "floor_scale": 16})
    for lengths, reason in (((64, 64), ""), ((64, 60), "scales with the padding of prompts")):
        report = report_of(model, ragged_prompts(*lengths, shared=40) | {"max_new_tokens": 6})
        assert report.path == ("stock" if reason else "shared")
        assert reason in report.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_position_bias_is_exact_in_any_dtype(dtype):
    slopes, scale = (0.84089642, 2.0**-8), 128**-0.5
    positions = torch.tensor([[0, 1, 255, 256, 4095, 50_001, MOST_POSITIONS - 1]])
    key = with_key_positions(torch.zeros(1, 2, positions.shape[1], 128, dtype=dtype), positions, slopes, scale)
    for at in (50_001, MOST_POSITIONS - 1):
        query = with_query_positions(torch.zeros(1, 2, 1, 128, dtype=dtype), torch.tensor([[at]]), slopes, scale)
        assert key.shape[-1] == query.shape[-1] == 128 + WIDTH
        bias = (query.double() @ key.double().mT)[0, :, 0] * scale
        exact = torch.tensor(slopes, dtype=torch.float64)[:, None] * (positions - at)
        assert torch.allclose(bias, exact, rtol=2.0**-20, atol=0)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="bloom is registered already"):
        register("bloom", OwnCode())
