"""Log-probabilities of steps are those of the model's own forward passes, to the bit: ``log_probs="invariant"``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from transformers import DynamicCache, OlmoConfig, OlmoForCausalLM, T5Config, T5ForConditionalGeneration

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention import in_order
from hf_fastdecode.generation.fused import invariant
from hf_fastdecode.kernels.invariant.schedule import Config

from ..forward.comparison import checkpoint
from ..kernels.operator_runs import DEVICE
from ..kernels.test_invariant import in_parts_for_many
from ..tiny_models import ragged_prompts, seeded, tiny_model

WIDTH = 22
SHARED, APART = (
    {name: part.to(DEVICE) for name, part in prompts.items()}
    for prompts in (ragged_prompts(WIDTH, 19, shared=14), ragged_prompts(WIDTH, 17))
)
RETURNED = {"return_dict_in_generate": True, "max_new_tokens": 2}
SAMPLED = RETURNED | {"do_sample": True, "eos_token_id": [*range(3, 10)]}


@pytest.fixture(autouse=True)
def _several_splits(monkeypatch):
    monkeypatch.setattr(in_order, "attention_config", lambda *_: Config(32, 16, 16, 1))


def enabled(name="qwen3", dtype=torch.float32, **options):
    model = tiny_model(name).to(DEVICE, dtype)
    return fd.enable(model, log_probs="invariant", **{"min_shared_tokens": 8} | options)


def sampled(model, prompts=SHARED, samples=2, **arguments):
    return seeded(lambda: model.generate(**prompts, **SAMPLED | {"num_return_sequences": samples} | arguments))


def by_trainer(model, output, prompts=SHARED, rows=slice(None)):
    """Log-probabilities ``[rows, steps]`` of a forward pass over these rows, with prompts padded at the left."""
    tokens = output.sequences[:, WIDTH:]
    ends = torch.isin(tokens, torch.tensor(SAMPLED["eos_token_id"], device=DEVICE)).long()
    drawn = (ends.cumsum(1) == ends).long()
    of_prompts = prompts["attention_mask"].repeat_interleave(len(tokens) // 2, 0)
    given = {"input_ids": output.sequences, "attention_mask": torch.cat([of_prompts, drawn], 1)}
    logits = model(**{name: part[rows] for name, part in given.items()}, use_cache=False).logits.float()
    found = logits[:, WIDTH - 1 : -1].log_softmax(-1).gather(2, tokens[rows, :, None])[..., 0]
    return found.where(drawn[rows] > 0, 0.0)


@pytest.mark.parametrize(
    ("name", "dtype", "prompts"),
    [
        ("qwen3", torch.float32, SHARED),
        pytest.param("llama-gqa", torch.bfloat16, SHARED, marks=pytest.mark.exhaustive),
        pytest.param("qwen3-window", torch.float32, SHARED, marks=pytest.mark.exhaustive),
        ("llama-gqa", torch.float32, APART),
        pytest.param("qwen3", torch.bfloat16, APART, marks=pytest.mark.exhaustive),
        pytest.param("llama-mha", torch.float16, SHARED, marks=pytest.mark.exhaustive),
    ],
)
def test_steps_have_the_bits_of_passes_over_whole_rows(name, dtype, prompts):
    """Of all rows, padded or not, with gradients, and of one alone, without."""
    model = enabled(name, dtype)
    output = sampled(model, prompts)
    report = fd.explain(model).last_call
    assert (report.path, report.mode_reason) == ("shared", "log_probs='invariant' was requested")
    assert (output.logprobs < -0.01).float().mean() > 0.2
    assert torch.equal(by_trainer(model, output, prompts).detach(), output.logprobs)
    with torch.no_grad():
        assert torch.equal(by_trainer(model, output, prompts, slice(3, 4)), output.logprobs[3:])


def test_products_whose_parts_depend_on_rows_tell(monkeypatch):
    monkeypatch.setattr(invariant, "linear", in_parts_for_many)
    model = enabled()
    output = sampled(model)
    with torch.no_grad():
        assert not torch.equal(by_trainer(model, output), output.logprobs)


@pytest.mark.exhaustive
def test_half_precision_has_stocks_errors():
    """bf16 is cut off in Triton's interpreter where it is rounded elsewhere, so that fp16 tells."""
    model, exact = (tiny_model("qwen3").to(DEVICE, dtype) for dtype in (torch.float16, torch.float64))
    kept = SHARED["attention_mask"] > 0
    with torch.no_grad():
        stock, expected = model(**SHARED).logits[kept], exact(**SHARED).logits[kept]
        found = fd.enable(model, log_probs="invariant")(**SHARED).logits[kept]
    assert (found - expected).norm() <= 2 * (stock - expected).norm()


def test_tokens_and_gradients_are_stocks():
    """And checkpointed layers, computed again, have the same bits."""
    model = tiny_model("qwen3").to(DEVICE)
    stock = sampled(model)
    expected = gradients_of(model, stock)
    fd.enable(model, log_probs="invariant")
    assert torch.equal(sampled(model).sequences, stock.sequences)
    found = gradients_of(model, stock)
    checkpoint(model, use_reentrant=False)
    again = gradients_of(model.train(), stock)
    for mine, same, theirs in zip(found, again, expected, strict=True):
        assert torch.equal(mine, same)
        assert (mine - theirs).abs().max() <= 1e-4 * (1 + theirs.abs().max())


def gradients_of(model, output):
    model.zero_grad()
    by_trainer(model, output).sum().backward()
    return [part.grad.clone() for part in model.parameters()]


@pytest.mark.exhaustive
def test_waves_and_prefill_in_parts():
    """Two rows at a time, and prompts in passes of ten tokens; compared with a model that does neither."""
    model, recorder = enabled(max_rows=2, max_prefill_tokens=10), fd.TokenLogProbs()
    sequences = sampled(model, logits_processor=[recorder], return_dict_in_generate=False)
    assert fd.explain(model).last_call.rows_at_once == 2
    fd.enable(model, log_probs="invariant", min_shared_tokens=8)
    whole = sampled(model)
    assert torch.equal(sequences, whole.sequences)
    assert torch.equal(recorder.of(sequences[:, WIDTH:]), whole.logprobs)


def test_autocast_and_recorders():
    """fp32 weights, as TRL's trainers have them by default."""
    model, recorder = enabled(), fd.TokenLogProbs()
    with torch.autocast(DEVICE, torch.bfloat16):
        output = sampled(model, logits_processor=[recorder])
        assert torch.equal(by_trainer(model, output).detach(), output.logprobs)
    assert torch.equal(recorder.of(output.sequences[:, WIDTH:]), output.logprobs)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "opt"])
def test_other_models_are_refused(name):
    with pytest.raises(ValueError, match=r"does not serve .* fixed order of sums"):
        enabled(name)


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [("qwen3", {"head_dim": 256}, "up to 128 elements"), ("gemma2", {}, "plain or windowed, with a soft cap")],
)
def test_attention_that_kernels_do_not_compute_raises(name, sizes, reason):
    model = fd.enable(tiny_model(name, **sizes).to(DEVICE), log_probs="invariant")
    with pytest.raises(ValueError, match=reason):
        model(**SHARED)
    with pytest.raises(ValueError, match=reason):
        sampled(model)


def test_encoders_and_devices_without_kernels_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"fp32, fp16 and bf16, got torch.float64"):
        fd.enable(tiny_model("qwen3").to(DEVICE).double(), log_probs="invariant")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 97}
    with pytest.raises(ValueError, match="no decoder of text"):
        fd.enable(T5ForConditionalGeneration(T5Config(**sizes)), log_probs="invariant")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(ValueError, match="OlmoLayerNorm does not compute in"):  # which has no weights
        fd.enable(OlmoForCausalLM(OlmoConfig(vocab_size=97, **sizes)).to(DEVICE), log_probs="invariant")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="kernels run on CUDA devices"):
        fd.enable(tiny_model("qwen3"), log_probs="invariant")


@pytest.mark.parametrize(
    "options", [{"mode": "graph"}, {"backend": "plain"}, {"share_forward": False}, {"sequence_parallel": "auto"}]
)
def test_options_that_ask_for_other_passes_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* asks for others"):
        enabled(**options)


def test_calls_and_passes_that_cannot_hold_raise():
    model = enabled()
    for arguments in ({"use_cache": False}, {"num_beams": 2}):
        with pytest.raises(ValueError, match="invariant"):
            model.generate(**SHARED, **RETURNED | arguments)
    mask = SHARED["attention_mask"].clone()
    mask[0, 5] = 0
    with pytest.raises(ValueError, match="cannot hold for this pass: attention_mask hides tokens"):
        model(SHARED["input_ids"], attention_mask=mask)
    with pytest.raises(ValueError, match=r"given a cache of transformers; .* or use log_probs='trainer'"):
        model(SHARED["input_ids"], **{CACHE: DynamicCache()})
    with pytest.raises(ValueError, match="it is compiled, traced or transformed"):
        torch.func.grad(lambda x: model(inputs_embeds=x, use_cache=False).logits.sum())(torch.ones(1, 3, 64))
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="in TF32"):
            model(**SHARED)
    finally:
        torch.set_float32_matmul_precision("highest")
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Linear has a hook"):
        model(**SHARED)


def test_caches_are_of_passes_in_the_same_order():
    model = fd.enable(tiny_model("qwen3", num_hidden_layers=1).to(DEVICE))
    kept = fd.prefill(model, SHARED["input_ids"][:1])
    fd.enable(model, log_probs="invariant")
    with pytest.raises(ValueError, match="made with other log_probs"):
        model.generate(SHARED["input_ids"][:1], **{CACHE: kept}, max_new_tokens=1)
