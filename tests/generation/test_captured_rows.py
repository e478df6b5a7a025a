"""Captured first passes of decoders with an encoder: on a GPU in graphs; here the same passes, uncaptured."""

from __future__ import annotations

import copy
import gc
from weakref import ref

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.layers.cross import EncodedInputs
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captured_prefill, prefill_passes

from ..patches.encoder_decoder_models import encoder_decoder, encoder_decoder_pair, read_by
from ..tiny_models import redrawn, seeded
from .uncaptured import on_the_cpu

pytest.importorskip("triton")

SAMPLES = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 3}
BEAMS = {"num_beams": 2, "max_new_tokens": 3}
GRAPH = {"mode": "graph", "backend": "triton", "min_saved_tokens": 1}


@pytest.fixture
def at_once(uncaptured, monkeypatch):
    """From the first call on."""
    monkeypatch.setattr(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 1, False: 1})


@pytest.fixture(scope="module")
def whisper():
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 16}
    ends = {"eos_token_id": 90, "pad_token_id": 90, "bos_token_id": 90, "decoder_start_token_id": 91}
    config = WhisperConfig(vocab_size=97, max_source_positions=11, max_target_positions=32, **sizes, **ends)
    model = redrawn(WhisperForConditionalGeneration(config).eval(), 0.25)
    settings = {"is_multilingual": True, "no_timestamps_token_id": 94, "lang_to_id": {"<|en|>": 92}}
    settings |= {"task_to_id": {"transcribe": 93}, "suppress_tokens": [90, 95, 96], "begin_suppress_tokens": None}
    for name, value in (ends | settings).items():
        setattr(model.generation_config, name, value)
    return model


def recordings(count, seed=0):
    features = torch.randn(count, 16, 22, generator=torch.Generator().manual_seed(seed))
    return {"input_features": features, "language": "en", "task": "transcribe"}


def generate(model, **arguments):
    settings = copy.deepcopy(model.generation_config)  # which Whisper changes
    try:
        return seeded(lambda: model.generate(**copy.deepcopy(arguments)))
    finally:
        model.generation_config = settings


@on_the_cpu
@pytest.mark.parametrize("arguments", [SAMPLES, BEAMS], ids=["samples", "beams"])
@pytest.mark.parametrize("count", [1, 3], ids=["one recording", "three"])
def test_tokens_are_stocks(whisper, arguments, count, at_once):
    """Of recordings that differ from call to call, through one captured pass."""
    calls = [recordings(count, seed) | arguments for seed in range(2)]
    stock = [generate(whisper, **call) for call in calls]
    assert not torch.equal(*stock)
    with fd.enabled(whisper, **GRAPH):
        for call, expected in zip(calls, stock, strict=True):
            assert torch.equal(generate(whisper, **call), expected)
            report = fd.explain(whisper).last_call
            assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason
            assert report.captured_prefill_tokens == 4 * count, report.prefill_reason
            assert "causal attention by PyTorch, captured" in str(fd.explain(whisper).last_call.lines())
        assert state_of(whisper).captures.by_rows.count == 1


@on_the_cpu
def test_calls_within_whispers_own_generate(whisper, at_once):
    """Beams, and the samples that follow where these are too unlikely: each takes the captures, and frees them."""
    beams = BEAMS | {"temperature": (0.0, 0.5), "logprob_threshold": 0.0}
    stock = [generate(whisper, **recordings(1, seed), **beams) for seed in range(2)]
    with fd.enabled(whisper, **GRAPH):
        for seed, expected in enumerate(stock):
            assert torch.equal(generate(whisper, **recordings(1, seed), **beams), expected)
            report = fd.explain(whisper).last_call
            assert (report.mode, report.captured_prefill_tokens) == ("graph", 4), report.mode_reason
        assert state_of(whisper).captures.by_rows.count == 1


@on_the_cpu
def test_memory_is_free_again_after_a_call(whisper, at_once, monkeypatch):
    """At once, so that the next call replays, and after `disable`."""
    inputs, make = [], EncodedInputs.__init__
    monkeypatch.setattr(
        EncodedInputs, "__init__", lambda self, *args: (make(self, *args), inputs.append(ref(self)))[0]
    )
    gc.collect()
    gc.disable()
    try:
        with fd.enabled(whisper, **GRAPH):
            for arguments in (SAMPLES, BEAMS):
                generate(whisper, **recordings(1), **arguments)
                assert [one() for one in inputs] == [None] * len(inputs)
            (captured,) = state_of(whisper).captures.by_rows._passes
            buffers = ref(captured._inputs._segments[0].keys)
            del captured
    finally:
        gc.enable()
    gc.collect()
    assert buffers() is None


@pytest.fixture(scope="module")
def bart():
    model = encoder_decoder("bart", decoder_layers=2, decoder_attention_heads=2)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def text(length, seed=0):
    ids = torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(seed))
    prompt = torch.randint(3, 60, (1, 3), generator=torch.Generator().manual_seed(seed + 9))
    return {"input_ids": ids, "decoder_input_ids": prompt}


@on_the_cpu
def test_a_returned_cache_keeps_its_inputs(bart, at_once):
    """While it lives, calls of the same shape run eagerly: it is not overwritten."""
    asked = SAMPLES | {"return_dict_in_generate": True}
    stock = [generate(bart, **text(9, seed), **SAMPLES) for seed in range(3)]
    with fd.enabled(bart, **GRAPH):
        first = generate(bart, **text(9), **asked)
        assert fd.explain(bart).last_call.captured_prefill_tokens == 4
        kept = [part.clone() for part in first[CACHE].inputs.segments[1][0]]
        assert torch.equal(generate(bart, **text(9, 1), **SAMPLES), stock[1])
        assert fd.explain(bart).last_call.captured_prefill_tokens == 0
        cache = first[CACHE]
        for part, before in zip(cache.inputs.segments[1][0], kept, strict=True):
            assert torch.equal(part, before)
        assert state_of(bart).captures.by_rows.count == 1
        del first, cache, part
        assert torch.equal(generate(bart, **text(9, 2), **SAMPLES), stock[2])
        assert fd.explain(bart).last_call.captured_prefill_tokens == 4


EAGER = {
    "a mask over the input": {"attention_mask": torch.ones(1, 9, dtype=torch.long)},
    "a padded prompt": {"decoder_attention_mask": torch.tensor([[0, 1, 1]])},
    "a long prompt": {"decoder_input_ids": torch.arange(200)[None] % 50 + 3},
}


@on_the_cpu
@pytest.mark.parametrize("given", EAGER.values(), ids=EAGER)
def test_passes_that_run_eagerly(bart, given, at_once, monkeypatch):
    monkeypatch.setattr(prefill_passes, "_MOST_TOKENS_BY_ROWS", 100)
    call = text(9) | given | SAMPLES
    stock = generate(bart, **call)
    with fd.enabled(bart, **GRAPH):
        assert torch.equal(generate(bart, **call), stock)
        report = fd.explain(bart).last_call
        assert (report.path, report.mode, report.captured_prefill_tokens) == ("shared", "graph", 0)
        assert not report.prefill_reason
        assert not state_of(bart).captures.by_rows.count


@on_the_cpu
def test_biases_by_distance_are_not_captured(at_once):
    """As is found once; later calls do not try again."""
    t5 = encoder_decoder("t5")
    t5.generation_config.eos_token_id = None
    stock = [generate(t5, **text(9, seed), **SAMPLES) for seed in range(2)]
    with fd.enabled(t5, **GRAPH):
        for seed, reason in enumerate(["attention of its prompts is more than causal", ""]):
            assert torch.equal(generate(t5, **text(9, seed), **SAMPLES), stock[seed])
            report = fd.explain(t5).last_call
            assert (report.path, report.captured_prefill_tokens) == ("shared", 0)
            assert report.prefill_reason == reason


@on_the_cpu
def test_inputs_in_groups_and_prompts_of_one_token(bart, at_once):
    """Two inputs at once, whose memory the third one's group does not wait for: it runs eagerly, or by its own."""
    inputs = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(4))
    call = {"input_ids": inputs} | SAMPLES
    stock = generate(bart, **call)
    with fd.enabled(bart, max_prefill_tokens=18, **GRAPH):
        for _ in range(2):
            assert torch.equal(generate(bart, **call), stock)
            assert fd.explain(bart).last_call.captured_prefill_tokens == 3
        assert state_of(bart).captures.by_rows.count == 2  # of two inputs, and of one


@on_the_cpu
def test_a_returned_cache_of_several_groups_holds_copies(bart, at_once):
    """So that passes are replayed while it lives."""
    inputs = [torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    stock = [generate(bart, input_ids=ids, **SAMPLES) for ids in inputs]
    returned = []
    with fd.enabled(bart, max_prefill_tokens=18, **GRAPH):
        for ids, expected in zip(inputs, stock, strict=True):
            returned.append(generate(bart, input_ids=ids, return_dict_in_generate=True, **SAMPLES))
            assert torch.equal(returned[-1].sequences, expected)
            assert fd.explain(bart).last_call.captured_prefill_tokens == 3
    first, second = (one[CACHE].inputs.segments[1][0].keys for one in returned)
    assert not torch.equal(first, second)


@on_the_cpu
def test_captures_go_with_the_weights(bart, at_once):
    model = copy.deepcopy(bart)
    with fd.enabled(model, **GRAPH):
        generate(model, **text(9), **SAMPLES)
        with torch.no_grad():
            weight = model.model.decoder.layers[0].encoder_attn.v_proj.weight
            model.model.decoder.layers[0].encoder_attn.v_proj.weight = torch.nn.Parameter(-weight)
        found = generate(model, **text(9), **SAMPLES)
        assert fd.explain(model).last_call.captured_prefill_tokens == 4
        assert state_of(model).captures.by_rows.count == 2
    assert torch.equal(found, generate(model, **text(9), **SAMPLES))


@on_the_cpu
def test_a_capture_pays_from_the_second_pass_on(bart, uncaptured):
    """Of one shape, in a forced mode."""
    with fd.enabled(bart, **GRAPH):
        for seed, length, captured in ((0, 9, 0), (1, 8, 0), (2, 9, 4), (3, 9, 4)):
            generate(bart, **text(length, seed), **SAMPLES)
            assert fd.explain(bart).last_call.captured_prefill_tokens == captured


@on_the_cpu
@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_slim_layers(name, at_once):
    """Which cross-attention of rows that share an input reads as keys and values."""
    _, slim = encoder_decoder_pair(name, "mixed")
    call = {key: part[:1] for key, part in read_by(slim).items() if key != "attention_mask"} | SAMPLES
    call |= {} if name == "whisper" else {"decoder_input_ids": torch.tensor([[3, 11, 12]])}
    stock = generate(slim, **call)
    with fd.enabled(slim, **GRAPH):
        for _ in range(2):
            assert torch.equal(generate(slim, **call), stock)
            report = fd.explain(slim).last_call
            assert report.captured_prefill_tokens == (1 if name == "whisper" else 3), report.prefill_reason
