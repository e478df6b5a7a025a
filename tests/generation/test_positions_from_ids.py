"""Captured steps of decoders whose positions follow from ids, with a table that some of them let grow."""

from __future__ import annotations

import copy
from weakref import ref

import pytest
import torch
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache, GenerationConfig

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, CACHE_LENGTH
from hf_fastdecode.attention.overrides import RowLengths, active
from hf_fastdecode.cache.layers.cross import ENCODER_OUTPUTS
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.patches.architectures.encoder_decoders import ENCODER_DECODERS

from ..architectures.classes import class_named
from ..cases import exhaustive_but
from ..tiny_models import VOCABULARY, ragged_prompts, seeded
from .calls import as_in_stock
from .uncaptured import on_the_cpu

pytest.importorskip("triton")

TABLE = 12
"""Positions of the decoder's first table, of tokens 0 to 9 where the padding's is 1."""

_LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
_TEXT = {"max_position_embeddings": TABLE - 2}
_SEAMLESS = {"hidden_size": 32, "speech_encoder_layers": 1, **_LAYERS, **_HEADS, **_TEXT}
_SPEECH = {"input_feat_per_channel": 8, "conv_channels": 32, "max_target_positions": 60}
_WAVES = {"conv_dim": (8,) * 7, "max_text_positions": 58}
MODELS = {
    "M2M100ForConditionalGeneration": {"d_model": 32, **_LAYERS, **_HEADS, **_TEXT},
    "SeamlessM4TForTextToText": _SEAMLESS,
    "SeamlessM4Tv2ForTextToText": _SEAMLESS,
    "Speech2TextForConditionalGeneration": {"d_model": 32, **_LAYERS, **_HEADS, **_SPEECH},
    "SpeechT5ForSpeechToText": {"hidden_size": 32, **_LAYERS, **_HEADS, **_WAVES},
}
GROWING = list(MODELS)[:3]
INPUTS = {"input_features": (2, 30, 8), "input_values": (2, 1500)}

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 5}
CALLS = {
    "greedy": {"do_sample": False, "max_new_tokens": 5},
    "samples": SAMPLING,
    "rows-that-end": SAMPLING | {"max_new_tokens": 8, "eos_token_id": list(range(3, 40))},
    "beams": {"do_sample": False, "num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 5},
}


def tiny(name, **fields):
    """A random model, whose padding is token 1, and of which all biases and norms count."""
    torch.manual_seed(0)
    kind = class_named(name)
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    given = {"vocab_size": VOCABULARY, **tokens, **MODELS.get(name, {}), **fields}
    model = kind(AutoConfig.for_model(kind.config_class.model_type, **given)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    model.generation_config = GenerationConfig(**tokens | {"eos_token_id": None})
    return model


def inputs(model, seed=0):
    """Two inputs, texts of unequal lengths."""
    name = model.main_input_name
    if name != "input_ids":
        return {name: torch.randn(INPUTS[name], generator=torch.Generator().manual_seed(seed))}
    given = ragged_prompts(9, 6, seed=seed)
    return given | {"input_ids": given["input_ids"].masked_fill(given["attention_mask"] == 0, 1)}


def decoder_prompts(*lengths, width):
    """Left-padded, so that the first columns may be padding in all rows."""
    given, beside = ragged_prompts(*lengths, seed=3), torch.ones(len(lengths), width - max(lengths), dtype=torch.long)
    mask = torch.cat([0 * beside, given["attention_mask"]], 1)
    ids = torch.cat([beside, given["input_ids"]], 1).masked_fill(mask == 0, 1)
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def table(model):
    decoder = model.get_decoder()
    return getattr(decoder, "prenet", decoder).embed_positions


def check(model, *calls, captures):
    """Compare calls with stock, whose tables grow, and the captures after each."""
    stock = [seeded(lambda call=call: copy.deepcopy(model).generate(**call)) for call in calls]
    before = table(model).weights
    with fd.enabled(model, mode="graph", backend="triton", min_saved_tokens=1):
        for call, expected, count in zip(calls, stock, captures, strict=True):
            found = seeded(lambda call=call: model.generate(**call))
            assert torch.equal(found, expected), (found, expected)
            report = fd.explain(model).last_call
            assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason or report.reason
            assert "ran eagerly" not in report.mode_reason
            assert state_of(model).captures.count == count
    assert table(model).weights is before


@on_the_cpu
@pytest.mark.parametrize("call", exhaustive_but(["rows-that-end", "beams"], CALLS))
@pytest.mark.parametrize("name", exhaustive_but(MODELS.keys() - {"SeamlessM4TForTextToText"}, MODELS))
def test_tokens_are_stocks(name, call, uncaptured):
    """Of several inputs, and of prompts of the decoder, also where all of them have padding."""
    model = tiny(name)
    padded = decoder_prompts(3, 2, width=4)
    check(model, inputs(model) | padded | CALLS[call], inputs(model, 1) | CALLS[call], captures=[1, 1])


@on_the_cpu
@pytest.mark.parametrize("name", MODELS)
def test_padding_among_drawn_tokens(name, uncaptured):
    """A token of padding has no place of its own, wherever it is drawn."""
    model, drawn = tiny(name), [1, 4, 5, 6, 7]
    call = inputs(model) | SAMPLING | {"suppress_tokens": [one for one in range(VOCABULARY) if one not in drawn]}
    call |= {"temperature": 3.0, "max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    stock = seeded(lambda: model.generate(**call))
    assert (stock.sequences[:, 1:-1] == 1).any()
    with fd.enabled(model, mode="graph", backend="triton", min_saved_tokens=1):
        found = seeded(lambda: model.generate(**call))
        assert fd.explain(model).last_call.mode == "graph"
    assert torch.equal(found.sequences, stock.sequences)
    for one, other in zip(found.logits, stock.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@on_the_cpu
@pytest.mark.parametrize("call", ["samples", "beams"])
@pytest.mark.parametrize("name", exhaustive_but(GROWING[:1], GROWING))
def test_rows_longer_than_the_table(name, call, uncaptured):
    """They are captured with a longer table, which serves shorter rows and others too; the model keeps its own."""
    model, by_lengths = tiny(name), []
    for seed, tokens in enumerate((TABLE - 3, TABLE + 3, 3, TABLE)):
        by_lengths.append(inputs(model, seed) | CALLS[call] | {"max_new_tokens": tokens})
    check(model, *by_lengths, captures=[1, 2, 2, 2])


@on_the_cpu
def test_padding_counts_where_the_table_ends(uncaptured):
    """With padding in all prompts, rows of fewer tokens outgrow it."""
    model, call = tiny(GROWING[0]), SAMPLING | {"max_new_tokens": TABLE - 6}
    first, second = (inputs(model) | decoder_prompts(2, 1, width=width) | call for width in (3, 6))
    check(model, first, second, captures=[1, 2])


def fixed_loop(found):
    """A loop of the user's, of several tokens at a time, padding among them: it keeps all logits."""

    def run(model, input_ids, **given):
        generator, more = torch.Generator().manual_seed(5), {name: given[name] for name in (CACHE, ENCODER_OUTPUTS)}
        for tokens in (0, 1, 3, 1, 2, 4, 1):
            drawn = torch.randint(1, 6, (len(input_ids), tokens), generator=generator)
            fed = drawn if tokens else input_ids
            found.append(model(decoder_input_ids=fed, attention_mask=given.get("attention_mask"), **more).logits)
        return input_ids

    return run


@on_the_cpu
@pytest.mark.parametrize("name", [GROWING[0], "Speech2TextForConditionalGeneration"])
def test_several_tokens_at_a_time(name, uncaptured):
    model, stock, found = tiny(name), [], []
    call = {key: value.repeat_interleave(2, 0) for key, value in inputs(model).items()} | {"max_new_tokens": 16}
    own = EncoderDecoderCache(*(DynamicCache(config=model.config) for _ in range(2)))
    copy.deepcopy(model).generate(**call, custom_generate=fixed_loop(stock), **{CACHE: own})
    with fd.enabled(model, mode="graph", backend="triton", min_saved_tokens=1):
        model.generate(**call, custom_generate=fixed_loop(found))
        report = fd.explain(model).last_call
        assert (report.path, report.mode, report.captures) == ("shared", "graph", 2), report.mode_reason
        assert "ran eagerly" not in report.mode_reason
    for one, other in zip(found, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def stand_in(module):
    return ENCODER_DECODERS[type(module).__module__.split(".")[2]].in_captures[type(module).__name__]["forward"]


@pytest.mark.parametrize("name", MODELS)
def test_positions_in_a_captured_step(name):
    """The stand-in finds what the class does, for every length and for tokens of padding; or it refuses."""
    module = table(tiny(name))
    embed, own = stand_in(module), copy.deepcopy(module)
    ids = torch.tensor([[5, 1, 6, 7], [1, 1, 8, 1]])
    for longest in (5, 9, 55):
        with active([], lengths := RowLengths(longest)):
            for length in (0, 1, longest - 4):
                found = embed(module, ids, **{CACHE_LENGTH: torch.tensor([length])})
                assert torch.equal(found, own(ids, **{CACHE_LENGTH: length}))
        assert lengths.same_up_to >= longest
    if name not in GROWING:
        with active([], RowLengths(61)), pytest.raises(Unsupported, match="is for 60 tokens and does not grow"):
            embed(module, ids, **{CACHE_LENGTH: torch.tensor([3])})


@pytest.mark.parametrize("name", GROWING)
def test_a_captured_first_pass_keeps_the_table_that_it_reads(name):
    """Rows of another thread, which run eagerly, may replace it meanwhile."""
    module, ids = table(tiny(name)), torch.tensor([[5, 1, 6, 7]])
    with active([], lengths := RowLengths(5)):
        stand_in(module)(module, ids, **{CACHE_LENGTH: 0})
    read = ref(module.weights)
    module(ids, **{CACHE_LENGTH: 3 * TABLE})
    assert len(module.weights) > TABLE
    assert read() is not None
    del lengths
    assert read() is None


def test_a_forward_of_another_library_on_the_positions():
    """Of a model that accelerate has split, say: nothing is captured, and steps share all the same."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny(GROWING[0])
    hooks.add_hook_to_module(table(model), hooks.ModelHook())
    call = inputs(model) | SAMPLING
    assert as_in_stock(model, lambda: model.generate(**call), "shared", min_saved_tokens=1).mode == "eager"


def test_experts_that_the_host_reads():
    sparse = {**MODELS[GROWING[0]], "decoder_sparse_step": 1, "num_experts": 4}
    model = tiny("NllbMoeForConditionalGeneration", **sparse)
    assert any(type(module).__name__ == "NllbMoeSparseMLP" for module in model.get_decoder().modules())
    call = inputs(model) | SAMPLING
    report = as_in_stock(model, lambda: model.generate(**call), "shared", min_saved_tokens=1)
    assert report.mode_reason == "the host reads which experts a step's tokens take"


@pytest.mark.parametrize("share", [0.25, -1.0])
@pytest.mark.parametrize("arguments", [SAMPLING, CALLS["beams"]], ids=["samples", "beams"])
def test_experts_that_leave_tokens_out(arguments, share):
    """What a row computes depends on the other rows then: these are not run once, nor are their inputs."""
    sparse = {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_experts": 4, "expert_capacity": 4}
    fields = {**MODELS[GROWING[0]], **sparse, "moe_eval_capacity_token_fraction": share}
    model = tiny("NllbMoeForConditionalGeneration", **fields)
    call = inputs(model) | arguments
    report = as_in_stock(model, lambda: model.generate(**call), "stock", min_saved_tokens=1)
    assert "beyond a capacity that all rows of a pass have together" in report.reason


def alike(left, right):
    """The share of equal tokens; steps that round otherwise set few rows apart, other positions all of them."""
    return (left == right).float().mean().item()


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["samples", "beams"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_on_a_gpu(name, call):
    """Of rows within the table and of longer ones, of other inputs and with padding: tokens of eager steps."""
    model = tiny(name).bfloat16().cuda()
    calls = [inputs(model, seed) | CALLS[call] | {"max_new_tokens": tokens} for seed, tokens in ((0, 6), (1, 20))]
    calls.append(calls[0] | decoder_prompts(3, 2, width=4))
    calls = [{key: _on_the_gpu(value, model) for key, value in one.items()} for one in calls]
    with fd.enabled(copy.deepcopy(model), mode="eager", min_saved_tokens=1) as other:  # whose table grows
        eager = [seeded(lambda one=one: other.generate(**one)) for one in calls]
    counts = []
    with fd.enabled(model, mode="graph", min_saved_tokens=1):
        for one, expected in zip(calls, eager, strict=True):
            found = seeded(lambda one=one: model.generate(**one))
            report = fd.explain(model).last_call
            assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason or report.reason
            assert "ran eagerly" not in report.mode_reason
            assert alike(found, expected) > 0.9
            counts.append(state_of(model).captures.count)
    assert counts == ([1, 2, 2] if name in GROWING else [1, 1, 1])


def _on_the_gpu(value, model):
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cuda", model.dtype if value.is_floating_point() else None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in MODELS if name not in GROWING])
def test_tables_that_do_not_grow_are_not_captured(name):
    model = tiny(name).bfloat16().cuda()
    call = {key: _on_the_gpu(value, model) for key, value in inputs(model).items()} | SAMPLING
    with fd.enabled(model, mode="graph", min_saved_tokens=1):
        with pytest.raises(ValueError, match="is for 60 tokens and does not grow; use mode='auto'"):
            model.generate(**call | {"max_new_tokens": 61})
        model.generate(**call)
        assert fd.explain(model).last_call.mode == "graph"
