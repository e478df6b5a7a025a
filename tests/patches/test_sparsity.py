"""Attention weights below a threshold count as 0: against a reference in fp64, in every way to generate, measured."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.calibration import model_inputs
from hf_fastdecode.conversion.families import family_of, family_of_slim
from hf_fastdecode.conversion.fit.attention import (
    attention_weights,
    bias_or_zero,
    key_heads,
    query_heads,
    weighted_values,
)
from hf_fastdecode.patches.layers import slim_attention
from hf_fastdecode.patches.layers.family import attention_inputs

from ..cli.command_line import needs_weights
from ..conversion.fit.references import fold_into_output_bias
from ..test_layout import ROOT
from ..tiny_models import VOCABULARY
from .encoder_decoder_models import encoder_decoder_pair, read_by
from .family_models import family_condition, family_pair
from .slim_models import ROWS, TEXT, generate, pair, relative

EPS = torch.finfo(torch.float32).eps
THRESHOLD = 0.02


def sparse(model: PreTrainedModel, threshold: float = THRESHOLD, **fields: Any) -> PreTrainedModel:
    copy = deepcopy(model)
    copy.config.slim_sparsity_threshold = threshold
    for name, value in fields.items():
        setattr(copy.config, name, value)
    return copy


def attention_passes(model: PreTrainedModel, prefix: str, passes: list[int]) -> tuple[Tensor, Tensor]:
    """Inputs and outputs of an attention, ``[tokens, d]``, on a text in passes."""
    seen, given = [], []

    def keep(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append(attention_inputs(args, kwargs))
        given.append(output[0][0])

    cache = DynamicCache(config=model.config)
    hook = model.get_submodule(prefix.rstrip(".")).register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        for part in TEXT[: sum(passes)].split(passes):
            model(part[None], **{CACHE: cache})
    hook.remove()
    return torch.cat(seen), torch.cat(given)


@pytest.mark.parametrize("at_once", [256, 7])
@pytest.mark.parametrize(
    ("name", "plan"),
    [("qwen2", "k"), ("qwen2", "k+r"), ("cohere-norm", "k+r"), ("codegen", "k"), ("gpt2", "k+r"), ("gpt2", "x")],
)
def test_small_weights_are_skipped(monkeypatch: pytest.MonkeyPatch, name: str, plan: str, at_once: int) -> None:
    """In fp64, with the reference's weights and values; biases of the values are skipped with their tokens."""
    monkeypatch.setattr(slim_attention, "QUERIES_AT_ONCE", at_once)
    model, slim = family_pair(name, plan)
    family = family_of(model.config)
    prefix = family.attentions(model.config)[1]
    state = {key.removeprefix(prefix): one for key, one in model.state_dict().items() if key.startswith(prefix)}
    weights = family.weights(model.config, family.plain(model.config, state), 1)
    ropes = ["raw", "unrotate"] if family.rotary else ["raw"]
    for rope in ropes:
        inputs, found = attention_passes(sparse(slim.double(), slim_rope=rope), prefix, [40, 1, 5, 18, 1])
        keys, values = (
            inputs @ matrix + bias_or_zero(bias, matrix)
            for matrix, bias in ((weights.W_K, weights.key_bias), (weights.W_V, weights.value_bias))
        )
        rotation = family.rotation(model.config, len(inputs))
        query = query_heads(weights, inputs, rotation)
        probabilities = attention_weights(query, key_heads(weights, keys, rotation), weights.score_scale)
        kept = probabilities * (probabilities >= THRESHOLD)
        assert 0.1 < 1 - kept.count_nonzero() / probabilities.count_nonzero() < 0.9
        out = weighted_values(kept, values) @ weights.W_O
        out = out + fold_into_output_bias(weights, torch.zeros(values.shape[1]))
        assert relative(found, out) < family_condition(slim) * EPS
        dense = weighted_values(probabilities, values) @ weights.W_O
        assert relative(found, dense) > 100 * family_condition(slim) * EPS  # else this shows nothing
    slim.float()


def test_without_small_weights_nothing_changes() -> None:
    model, slim = pair("k+r")
    assert torch.equal(generate(sparse(slim, 1e-30)).sequences, generate(model).sequences)


@pytest.mark.parametrize(
    "options",
    [{"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 7}],
    ids=lambda options: next(iter(options)),
)
def test_the_threshold_holds_in_every_pass(options: dict[str, Any]) -> None:
    """However a text is cut into passes, so that tokens do not depend on it."""
    slim = sparse(pair("k+r")[1])
    expected, found = generate(slim), generate(slim, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert relative(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-4
    dense = torch.stack(generate(pair("k+r")[1]).logits)
    assert relative(torch.stack(found.logits), dense) > 1e-2


def test_padding_and_beams() -> None:
    slim = sparse(pair("k")[1])
    for options in ({}, {"num_beams": 3}):
        rows = generate(slim, **options).sequences[:, -10:]
        for row, (ids, mask) in enumerate(zip(ROWS["input_ids"], ROWS["attention_mask"])):
            alone = generate(slim, input_ids=ids[mask.bool()][None], attention_mask=None, **options).sequences
            assert torch.equal(rows[row], alone[0, -10:])


def test_calls_with_enable_run_stock() -> None:
    """A suffix alone does not know the weights of its tokens among all."""
    slim = sparse(pair("k+r")[1])
    options = {"do_sample": True, "num_return_sequences": 2}
    expected = generate(slim, **options).sequences
    with fd.enabled(slim):
        assert torch.equal(generate(slim, **options).sequences, expected)
        report = fd.explain(slim).last_call
        assert report.path == "stock"
        assert "sparsity threshold (0.02)" in report.reason


def below(weights: Tensor, causal: bool) -> float:
    """Share of small weights among those of tokens that queries see, ``[1, heads, queries, tokens]``."""
    visible = torch.ones_like(weights, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    return ((weights < THRESHOLD) & visible).sum().item() / visible.sum().item()


@pytest.mark.parametrize("plan", ["k+r", "mixed"])
def test_measured(plan: str) -> None:
    """The text goes through dense layers, and each is judged on the inputs that it has there."""
    slim = pair(plan)[1]
    state, hooks = deepcopy(slim.config.to_dict()), dict(slim.model.layers[1].self_attn._forward_hooks)
    report = fd.measure_sparsity(slim, THRESHOLD, TEXT)
    assert dict(slim.model.layers[1].self_attn._forward_hooks) == hooks
    eager = deepcopy(slim)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(TEXT[None], output_attentions=True).attentions
        dense, found = (one(TEXT[None]).logits for one in (slim, sparse(slim)))
    places = [at for at, layer in enumerate(slim.config.layer_plans) if layer.plan != "kv"]
    assert [layer.name for layer in report.layers] == [f"model.layers.{at}.self_attn" for at in places]
    assert [layer.skipped for layer in report.layers] == [below(weights[at], True) for at in places]
    assert report.skipped == pytest.approx(sum(layer.skipped for layer in report.layers) / len(places))
    assert report.logits_error == pytest.approx(relative(found, dense), rel=1e-4)
    assert all(0 < layer.output_error < 1 for layer in report.layers)
    assert 0 < report.same_tokens <= 1
    assert slim.config.to_dict() == state
    assert f"Threshold 0.02: {report.skipped:.1%} of the weights skipped on 256 tokens" in str(report)
    assert report.to_dict()["layers"][0]["name"] == report.layers[0].name
    errors = [fd.measure_sparsity(slim, threshold, TEXT).logits_error for threshold in (0, 1e-3, 1e-2, 1e-1)]
    assert errors == sorted(errors)
    assert errors[0] == 0


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_decoder(name: str) -> None:
    _, slim = encoder_decoder_pair(name, "k+r")
    report = fd.measure_sparsity(slim, THRESHOLD, TEXT[:64])
    eager = deepcopy(slim)
    eager.set_attn_implementation("eager")
    _, family = family_of_slim(slim.config)
    with torch.no_grad():
        out = eager(**model_inputs(family, slim.config, TEXT[:64], None), output_attentions=True)
    expected = [
        below(weights, causal)
        for both in zip(out.decoder_attentions, out.cross_attentions)
        for weights, causal in zip(both, (True, False))
    ]
    assert [layer.skipped for layer in report.layers] == pytest.approx(expected, abs=1e-4)
    assert report.skipped > 0.1
    options = {"max_new_tokens": 8, "do_sample": False}
    found = [sparse(slim).generate(**read_by(slim), **options, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*found)


@needs_weights
def test_the_page_shows_what_is_measured() -> None:
    model, tokenizer = fd.load_embedded()
    slim = fd.to_slim(model, tokenizer=tokenizer)
    page = (ROOT / "docs" / "slim-measurements.md").read_text(encoding="utf-8")
    lines = page.partition("| threshold |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(lines) == 3
    for line in lines:
        threshold, *shown = (float(cell.strip(" %")) for cell in line.strip("|").split("|"))
        report = fd.measure_sparsity(slim, threshold, tokenizer=tokenizer)
        least = min(layer.skipped for layer in report.layers)
        measured = [report.skipped, least, report.logits_error, report.same_tokens]
        assert shown == pytest.approx([100 * one for one in measured], abs=0.5)


def test_set_and_saved(tmp_path: Path) -> None:
    slim = fd.to_slim(pair("k")[0], TEXT, plan="k", sparsity_threshold=THRESHOLD)
    slim.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.slim_sparsity_threshold == THRESHOLD
    with torch.no_grad():
        assert torch.equal(loaded(TEXT[None]).logits, sparse(pair("k")[1])(TEXT[None]).logits)


def test_refusals() -> None:
    model, slim = pair("k")
    for threshold in (-0.1, 1.0, float("nan"), None):
        with pytest.raises(ValueError, match=r"at least 0 \(off\) and below 1, got"):
            fd.to_slim(model, TEXT, sparsity_threshold=threshold)
        with pytest.raises(ValueError, match=r"at least 0 \(off\) and below 1, got"):
            AutoConfig.for_model("slim_llama", slim_sparsity_threshold=threshold)
        with pytest.raises(ValueError, match=r"at least 0 \(off\) and below 1, got"):
            sparse(slim, threshold)(TEXT[None])
    with pytest.raises(ValueError, match="this LlamaForCausalLM has none"):
        fd.measure_sparsity(model, THRESHOLD, TEXT)
    with pytest.raises(ValueError, match="this SlimLlamaModel has no head"):
        fd.measure_sparsity(slim.model, THRESHOLD, TEXT)
    with pytest.raises(ValueError, match="or the model's `tokenizer`"):
        fd.measure_sparsity(slim, THRESHOLD)
    for wrong in (-1, VOCABULARY):
        ids = torch.cat([TEXT[:40], torch.tensor([wrong])])
        with pytest.raises(ValueError, match=rf"has id {wrong}, and the model has {VOCABULARY} tokens"):
            fd.measure_sparsity(slim, THRESHOLD, ids)
        with pytest.raises(ValueError, match=rf"has id {wrong}, and the model has {VOCABULARY} tokens"):
            fd.to_slim(model, ids)
