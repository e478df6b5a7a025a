"""Captured steps of decoders with an encoder: cross-attention reads tables of its inputs, as self-attention does."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.generation.model_state import state_of

from ..architectures.classes import tiny_model_of
from ..patches.encoder_decoder_models import encoder_decoder
from ..patches.slim_models import TEXT
from ..tiny_models import ragged_prompts, redrawn, seeded
from .calls import as_in_stock
from .uncaptured import on_the_cpu

pytest.importorskip("triton")

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 4}
BEAMS = {"do_sample": False, "num_beams": 2, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **heads)
    model = redrawn(BartForConditionalGeneration(config).eval(), 0.3)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


@pytest.fixture(scope="module")
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = T5Config(
        vocab_size=97,
        decoder_start_token_id=0,
        relative_attention_max_distance=8,
        relative_attention_num_buckets=6,
        **sizes,
    )
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2.0 if "relative_attention_bias" in name else 0.3)
    model.generation_config.eos_token_id = None
    return model


@on_the_cpu
@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
def test_biases_by_distance(t5, arguments, uncaptured):
    """Over a prompt, which is a node, and over suffixes, up to more tokens than have a bias of their own."""
    inputs, prompt = ragged_prompts(12, 7), torch.randint(3, 97, (2, 6))
    arguments = arguments | {"decoder_input_ids": prompt, "max_new_tokens": 5}
    report = as_in_stock(t5, lambda: t5.generate(**inputs, **arguments), mode="graph", backend="triton")
    assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason


@on_the_cpu
@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
def test_positions_that_start_at_the_length_of_the_cache(arguments, uncaptured):
    """LED makes them of a number on the host; one capture serves prompts of all lengths."""
    led = tiny_model_of("LEDForConditionalGeneration")
    led.generation_config.eos_token_id = led.generation_config.forced_eos_token_id = None
    with torch.no_grad():
        led.get_decoder().embed_positions.weight.normal_(std=0.5)
    calls = [ragged_prompts(9) | arguments | {"decoder_input_ids": torch.full((1, width), 7)} for width in (2, 5)]
    stock = [seeded(lambda call=call: led.generate(**call)) for call in calls]
    with fd.enabled(led, mode="graph", backend="triton", min_saved_tokens=1):
        for call, expected in zip(calls, stock, strict=True):
            assert torch.equal(seeded(lambda call=call: led.generate(**call)), expected)
            report = fd.explain(led).last_call
            assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason
            assert "ran eagerly" not in report.mode_reason
        assert state_of(led).captures.count == 1


@on_the_cpu
@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
def test_slim_layers(arguments, uncaptured):
    slim = to_slim(encoder_decoder("t5", num_layers=1, num_decoder_layers=1, num_heads=2, d_kv=32), TEXT, plan="k")
    arguments, inputs = arguments | {"max_new_tokens": 3}, ragged_prompts(9, 7)
    report = as_in_stock(slim, lambda: slim.generate(**inputs, **arguments), mode="graph", backend="triton")
    assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason


@on_the_cpu
@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
def test_tokens_are_stocks_in_every_call(bart, arguments, uncaptured):
    """Of other inputs, of other lengths and in other groups, through the tables of one captured step."""
    decoder = ragged_prompts(3, 3, 2, seed=3)
    calls = [
        ragged_prompts(21, 13, 17) | {"decoder_input_ids": decoder["input_ids"]},
        ragged_prompts(9, 9, 9, seed=2) | {f"decoder_{name}": one for name, one in decoder.items()},
    ]
    stock = [seeded(lambda call=call: bart.generate(**call, **arguments)) for call in calls]
    with fd.enabled(bart, mode="graph", backend="triton", max_prefill_tokens=2 * 21):
        for call, expected in zip(calls, stock, strict=True):
            assert torch.equal(seeded(lambda call=call: bart.generate(**call, **arguments)), expected)
            report = fd.explain(bart).last_call
            assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason
        assert state_of(bart).captures.count == 1
