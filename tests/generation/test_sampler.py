"""Who draws the tokens of a call: the choice, its reasons, and what the fast sampler returns beside tokens."""

import importlib.util

import pytest
import torch
from transformers import LogitsProcessor

import hf_fastdecode as fd
from hf_fastdecode.kernels.device import triton_is_installed

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import as_in_stock

pytest.importorskip("triton")
PROMPT = ragged_prompts(80)
SAMPLING = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 8}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the models lie on the CPU: it is interpreted")


class Custom(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@interpreted
@pytest.mark.parametrize(
    "arguments",
    [
        {"top_k": 0},
        {"top_k": 5, "temperature": 0.7},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 0, "min_p": 0.2, "repetition_penalty": 1.3},
        {"do_sample": False, "num_return_sequences": 1, "repetition_penalty": 1.2},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_fast_tokens_are_ones_that_transformers_could_draw(model, arguments):
    arguments = SAMPLING | {"max_new_tokens": 5} | arguments
    output = {"return_dict_in_generate": True}
    prompt = {key: value.repeat(2, 1) for key, value in PROMPT.items()} if not arguments["do_sample"] else PROMPT
    with fd.enabled(model, sampler="fast"):
        out = seeded(lambda: model.generate(**prompt, **arguments, **output))
        assert fd.explain(model).last_call.sampler == "fast"
        again = seeded(lambda: model.generate(**prompt, **arguments))
        other = seeded(lambda: model.generate(**prompt, **arguments), seed=1)
    assert torch.equal(out.sequences, again)
    assert torch.equal(out.sequences, other) == (not arguments["do_sample"])
    if not arguments["do_sample"]:
        assert torch.equal(out.sequences, model.generate(**prompt, **arguments))

    # transformers' own processors on the same text leave every drawn token possible.
    class Check(LogitsProcessor):
        def __call__(self, input_ids, scores):
            chosen = out.sequences[:, input_ids.shape[1]]
            assert scores.gather(1, chosen[:, None]).isfinite().all()
            raw.append(steps[-1].log_softmax(-1).gather(1, chosen[:, None]))
            return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)

    class Raw(LogitsProcessor):
        def __call__(self, input_ids, scores):
            steps.append(scores)
            return scores

    steps, raw = [], []
    processors = model._get_logits_processor

    def with_check(*args, **kwargs):
        built = processors(*args, **kwargs)
        return type(built)([Raw(), *built, Check()])

    model._get_logits_processor = with_check
    try:
        forced = model.generate(**prompt, **arguments)
    finally:
        del model._get_logits_processor
    assert torch.equal(forced, out.sequences)
    torch.testing.assert_close(out.logprobs, torch.cat(raw, 1), atol=1e-4, rtol=0)


@interpreted
def test_draws_do_not_depend_on_rows_that_left(model):
    """A row draws the same tokens beside rows that end early as beside rows that go on."""
    arguments = SAMPLING | {"top_k": 0, "max_new_tokens": 16, "num_return_sequences": 8}
    ends = list(range(3, 12))
    with fd.enabled(model, sampler="fast"):
        whole = seeded(lambda: model.generate(**PROMPT, **arguments))
        cut = seeded(lambda: model.generate(**PROMPT, **arguments, eos_token_id=ends))
        assert fd.explain(model).last_call.compactions >= 1
    ended = torch.isin(whole[:, 80:], torch.tensor(ends)).int().cumsum(1)
    before = (ended.cumsum(1) <= 1)[:, : cut.shape[1] - 80]  # up to the row's end token
    assert torch.equal(cut[:, 80:][before], whole[:, 80 : cut.shape[1]][before])
    assert (cut[:, 80:][~before] == 0).all()


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"logits_processor": [Custom()]}, "Custom is not among"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor is not among"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@interpreted
def test_what_only_transformers_draws(model, extra, reason):
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING, **extra)
        assert fd.explain(model).last_call.sampler == "hf"
        assert reason in fd.explain(model).last_call.sampler_reason
    with fd.enabled(model, sampler="fast"), pytest.raises(ValueError, match=f"sampler='fast' cannot.*{reason}"):
        model.generate(**PROMPT, **SAMPLING, **extra)


@interpreted
def test_auto_draws_stock_tokens_in_float32(model):
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        assert "float32" in fd.explain(model).last_call.sampler_reason


def test_fast_needs_a_gpu(model, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with fd.enabled(model, sampler="fast"), pytest.raises(ValueError, match="runs on CUDA devices, got 'cpu'"):
        model.generate(**PROMPT, **SAMPLING)


@interpreted
def test_without_triton_transformers_draws(monkeypatch):
    """Where only the choice of a sampler would ask for it: bfloat16 on a CPU has no other kernels."""
    model = tiny_model("llama-gqa").bfloat16()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    triton_is_installed.cache_clear()
    try:
        with fd.enabled(model):
            model.generate(**PROMPT, **SAMPLING)
            assert fd.explain(model).last_call.sampler_reason == "triton is not installed"
        with fd.enabled(model, sampler="fast"), pytest.raises(ValueError, match="triton is not installed"):
            model.generate(**PROMPT, **SAMPLING)
    finally:
        triton_is_installed.cache_clear()


def test_float64_is_left_to_transformers():
    model = tiny_model("llama-gqa").double()
    call = ragged_prompts(70) | {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 3}
    assert as_in_stock(model, lambda: model.generate(**call)).sampler == "hf"
    with fd.enabled(model, sampler="fast"), pytest.raises(ValueError, match=r"cannot draw .*; use sampler='auto'"):
        model.generate(**call)
