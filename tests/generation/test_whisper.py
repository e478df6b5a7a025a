"""Whisper, whose own `generate` calls transformers' for each segment and temperature, and repeats features itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import LogitsProcessor, WhisperConfig, WhisperForConditionalGeneration

import hf_fastdecode as fd

from ..tiny_models import redrawn, seeded

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the model lies on the CPU: kernels are interpreted"
)

_SIZES = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 4}
_SIZES |= {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 16}
_TOKENS = {"decoder_start_token_id": 101, "eos_token_id": 100, "pad_token_id": 100, "prev_sot_token_id": 105}

_TOKENS_OF_CONFIG = {name: one for name, one in _TOKENS.items() if name != "prev_sot_token_id"}

SAMPLES = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 3, "language": "en"}
BEAMS = {"num_beams": 5, "language": "en"}
FALLBACK = {"temperature": (0.0, 0.8), "compression_ratio_threshold": 1.35, "logprob_threshold": -1.0}
CALLS = {
    "samples": SAMPLES,
    "beams": BEAMS,
    "timestamps": SAMPLES | {"return_timestamps": True},
    "prompt": SAMPLES | {"prompt_ids": torch.tensor([105, 11, 22, 33])},
    "language is detected": SAMPLES | {"language": None},
    "scores": SAMPLES | {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=1700,
        max_source_positions=30,
        max_target_positions=64,
        bos_token_id=100,
        **_TOKENS_OF_CONFIG,
        **_SIZES,
    )
    model = redrawn(WhisperForConditionalGeneration(config).eval(), 0.25)
    settings = {"is_multilingual": True, "no_timestamps_token_id": 106, "max_initial_timestamp_index": 10}
    settings |= {"lang_to_id": {"<|en|>": 102, "<|de|>": 103}, "task_to_id": {"transcribe": 104}}
    settings |= {"suppress_tokens": None, "begin_suppress_tokens": None, "forced_decoder_ids": None, "max_length": 20}
    for name, value in (_TOKENS | settings).items():
        setattr(model.generation_config, name, value)
    return model


def recordings(frames, seed=0):
    return torch.randn(2, 16, frames, generator=torch.Generator().manual_seed(seed))


def both(model, sampler="auto", **arguments):
    """Stock's output and ours, with the numbers of rows that the encoder ran and the last report."""
    settings, counted = copy.deepcopy(model.generation_config), []

    def run():
        model.generation_config = copy.deepcopy(settings)  # which Whisper changes
        return seeded(lambda: model.generate(**copy.deepcopy(arguments)))

    try:
        stock, conv = run(), model.model.encoder.conv1
        with fd.enabled(model, min_saved_tokens=1, sampler=sampler), pytest.MonkeyPatch.context() as patch:
            forward = conv._conv_forward
            patch.setattr(conv, "_conv_forward", lambda x, *rest: counted.append(len(x)) or forward(x, *rest))
            output = run()
            report = fd.explain(model).last_call
    finally:
        model.generation_config = settings
    return stock, output, counted, report


@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
def test_short_recordings(model, arguments):
    stock, output, counted, report = both(model, input_features=recordings(60), **arguments)
    assert report.path == "shared", report.reason
    assert report.inputs == 2
    assert set(counted) == {2}  # rows of the encoder's batch, also where stock's has one for each sample
    if not isinstance(stock, torch.Tensor):
        for shared, plain in zip(output["scores"], stock["scores"], strict=True):
            torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-4)
        stock, output = stock["sequences"], output["sequences"]
    assert torch.equal(output, stock)


@pytest.mark.parametrize(
    "arguments", [SAMPLES | FALLBACK | {"temperature": (0.4, 0.8)}, BEAMS | FALLBACK], ids=["samples", "beams"]
)
def test_long_recordings(model, arguments):
    """Segment by segment, with fallback, and conditioned on each sample's own previous tokens."""
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, 150:] = 0
    arguments = arguments | {"return_timestamps": True, "condition_on_prev_tokens": True, "attention_mask": mask}
    stock, output, _, report = both(model, input_features=recordings(200), **arguments)
    assert torch.equal(output, stock)
    paths = [one.path for one in report.inner]
    assert len(paths) > 1
    assert (report.path, paths.count("shared") > 0) == ("shared", True)
    assert report.reason.startswith(f"{paths.count('shared')} of its {len(paths)} inner calls share, the ")
    shared = [one for one in report.inner if one.path == "shared"]
    assert report.rows == max(one.rows for one in shared)
    text = "\n".join(report.lines())
    assert all(f": {path} (" in text for path in set(paths))
    assert "  tokens prefilled: " in text


def test_a_report_is_of_the_whole_call(model):
    """Also where the last of its inner calls has one row left, and runs stock."""
    arguments = FALLBACK | {"return_timestamps": True, "language": "en"}
    features = recordings(200)[:1].expand(3, -1, -1)
    settings = copy.deepcopy(model.generation_config)
    try:
        with fd.enabled(model, min_saved_tokens=20):
            seeded(lambda: model.generate(input_features=features, attention_mask=torch.ones(3, 200), **arguments))
            report = fd.explain(model).last_call
    finally:
        model.generation_config = settings
    assert report.path == "shared"
    assert len(report.inner) > 1
    assert pickle.loads(pickle.dumps(report)) == report


SUPPRESSED = {"suppress_tokens": [100, 7, *range(107, 1700)], "begin_suppress_tokens": [220, *range(20, 90)]}


@pytest.fixture
def suppressing(model):
    settings = copy.deepcopy(model.generation_config)
    for name, value in SUPPRESSED.items():
        setattr(model.generation_config, name, value)
    yield model
    model.generation_config = settings


@interpreted
def test_the_sampling_kernel_suppresses_tokens(suppressing, monkeypatch):
    """It draws what its specification says, from the distribution that stock's processors leave."""
    pytest.importorskip("triton")
    from hf_fastdecode.kernels.sampling import api, reference

    arguments = {"input_features": recordings(60), "max_new_tokens": 4} | SAMPLES | {"top_p": 0.9}
    settings, drawn, left, kernel = copy.deepcopy(suppressing.generation_config), [], [], api.sample

    def compared(logits, row_ids, asked, **given):
        tokens, logprobs = kernel(logits, row_ids, asked, **given)
        if len(row_ids) == 6:  # not the skipped row of the launch that compiles
            columns = api.choose_config(logits.shape[1]).columns
            assert torch.equal(tokens, reference.sample(logits, row_ids, asked, columns=columns)[0])
            drawn.append(tokens)
            left.append(reference.distribution(logits, row_ids, asked))
        return tokens, logprobs

    monkeypatch.setattr(api, "sample", compared)
    with fd.enabled(suppressing, min_saved_tokens=1, sampler="fast"):
        output = seeded(lambda: suppressing.generate(**arguments))
        report = fd.explain(suppressing).last_call
        assert (report.path, report.sampler) == ("shared", "fast"), report.reason
    assert torch.equal(output, torch.stack(drawn, 1))

    class Forced(LogitsProcessor):
        def __call__(self, input_ids, scores):
            step = input_ids.shape[1] - 4
            torch.testing.assert_close(scores.softmax(-1), left[step].float(), rtol=1e-4, atol=1e-6)
            steps.append(step)
            return torch.full_like(scores, -torch.inf).scatter(1, drawn[step][:, None], 0.0)

    steps, suppressing.generation_config, build = [], settings, suppressing._get_logits_processor
    monkeypatch.setattr(
        suppressing,
        "_get_logits_processor",
        lambda *args, **given: type(built := build(*args, **given))([*built, Forced()]),
    )
    assert torch.equal(suppressing.generate(**arguments), output)
    assert steps == [0, 1, 2, 3]


@interpreted
def test_greedy_tokens_of_the_sampling_kernel_are_stocks(suppressing):
    pytest.importorskip("triton")
    arguments = {"input_features": recordings(60)[[0, 0, 1]], "max_new_tokens": 6, "language": "en"}
    stock, output, _, report = both(suppressing, sampler="fast", **arguments)
    assert (report.path, report.sampler) == ("shared", "fast"), report.sampler_reason
    assert torch.equal(output, stock)


@pytest.mark.parametrize("call", [SAMPLES, BEAMS | {"num_return_sequences": 2}], ids=["samples", "beams"])
def test_a_decoders_prompts_that_whisper_does_not_repeat(model, call):
    """Raise what stock raises."""
    prompts = torch.tensor([[101, 102, 104, 106]] * 2)
    arguments = {"input_features": recordings(60), "decoder_input_ids": prompts, **call, "return_timestamps": True}
    model = copy.deepcopy(model)
    with fd.enabled(model, min_saved_tokens=1), pytest.raises(AttributeError):
        model.generate(**arguments)
