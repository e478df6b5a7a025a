"""Slim T5, BART and Whisper against the models they were made of, in transformers' own loops and caches and shared."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache, PreTrainedModel, T5Model

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.calibration import cached_logits, model_inputs, record
from hf_fastdecode.conversion.families import ENCODER_DECODERS, family_of
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.patches.encoder_decoder_configs import SlimT5Config
from hf_fastdecode.patches.layers.slim_attention import InputProjection, InputValues, attention_scores, slim_attention

from ..cases import exhaustive_but
from ..conversion.fit.references import attention_output, inputs_cache_output, layer, text
from ..generation.calls import as_in_stock
from ..test_layout import ROOT
from ..tiny_models import tiny_model
from .encoder_decoder_models import MODELS, PAIRS, cached_bytes, encoder_decoder, encoder_decoder_pair, read_by
from .slim_models import TEXT, relative

EPS = torch.finfo(torch.float32).eps


def generate(model: PreTrainedModel, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **read_by(model)}
    # Random models repeat themselves, and texts that do not depend on the context would prove nothing.
    return model.generate(**{**settings, "no_repeat_ngram_size": 2, **options})


@lru_cache
def greedy_of_stock(name: str, dtype: torch.dtype) -> Any:
    """Greedy tokens of the ordinary model, which all plans of its slim forms are compared with."""
    return generate(encoder_decoder(name).to(dtype))


def condition(slim: PreTrainedModel) -> float:
    """The largest condition number of a key projection of the decoder, or what other rounding may add."""
    keys = [
        one for name, one in slim.get_decoder().state_dict().items() if name.endswith((".k_proj.weight", ".k.weight"))
    ]
    return max(20.0, *(torch.linalg.cond(one.double()).item() for one in keys))


def test_every_family_is_tested_and_listed() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == set(ENCODER_DECODERS)
    page = (ROOT / "docs" / "slim-architectures.md").read_text(encoding="utf-8")
    table = page.partition("| encoder and decoder |")[2]
    assert re.findall(r"^\| `(\w+)`", table.partition("\n\n")[0], re.MULTILINE) == list(ENCODER_DECODERS)


@pytest.mark.parametrize(
    ("name", "plan", "dtype"),
    exhaustive_but(
        [(*one, torch.float32) for one in PAIRS],
        [
            *((*one, torch.float32) for one in PAIRS),
            *((*one, torch.float64) for one in PAIRS if one[1] in ("e", "mixed") or one[0] == "t5-narrow"),
        ],
    ),
    ids=str,
)
def test_greedy_over_padded_rows(name: str, plan: str, dtype: torch.dtype) -> None:
    slim = deepcopy(encoder_decoder_pair(name, plan)[1]).to(dtype)
    expected, found = greedy_of_stock(name, dtype), generate(slim)
    assert type(found[CACHE]) is EncoderDecoderCache
    assert torch.equal(found.sequences, expected.sequences)
    assert expected.sequences.unique().numel() > 8
    (self_kv, cross_kv), (self_slim, cross_slim) = (cached_bytes(one[CACHE]) for one in (expected, found))
    if plan in ("k", "e"):
        assert self_slim * 2 == self_kv
    if plan == "x":
        keys = slim.config.d_kv * slim.config.num_heads if name.startswith("t5") else slim.config.d_model
        assert self_slim * 2 * keys == self_kv * slim.config.d_model
    assert cross_slim == {"k": cross_kv // 2, "x": 0, "e": 0}.get(plan, cross_slim) < cross_kv


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_read_as_the_layers_use_them(name: str) -> None:
    """The reference makes of them, with their scale and biases, what the attentions of both layers do."""
    model = encoder_decoder(name)
    family = family_of(model.config)
    made: list[Tensor] = []
    prefixes = family.attentions(model.config)
    for prefix in prefixes:
        module = model.get_submodule(prefix.rstrip("."))
        module.register_forward_hook(lambda module, args, output: made.append(output[0][0]))
    recorded = record(model, family, model_inputs(family, model.config, TEXT[:40], None))
    for index, prefix in enumerate(prefixes):
        own = {key.removeprefix(prefix): one for key, one in model.state_dict().items() if key.startswith(prefix)}
        cross = index % 2 == 1
        assert (recorded[index].encoded is not None) is cross
        expected = attention_output(
            family.weights(model.config, own, index),
            recorded[index].inputs,
            recorded[index].encoded,
            causal=not cross,
            score_bias=recorded[index].score_bias,
        )
        assert relative(made[index], expected) < 20 * EPS


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "temperature": 1.0, "num_return_sequences": 3}], ids=str
)
@pytest.mark.parametrize(("name", "plan"), [pair for pair in PAIRS if pair[1] in ("k+r", "x")])
def test_beams_and_several_sequences(name: str, plan: str, options: dict[str, Any]) -> None:
    expected, found = (generate(model, max_new_tokens=12, **options) for model in encoder_decoder_pair(name, plan))
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.sequences.unique(dim=0)) == len(found.sequences)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_texts_that_begin_otherwise(name: str) -> None:
    """T5 and BART get their start token before them, and Whisper does not."""
    ids = torch.tensor([[7, 8, 9]] * 2)
    expected, found = (generate(model, decoder_input_ids=ids) for model in encoder_decoder_pair(name, "x"))
    assert torch.equal(found.sequences, expected.sequences)


def test_a_prompt_of_whisper() -> None:
    options = {"prompt_ids": torch.tensor([7, 8, 9]), "max_new_tokens": 8, "return_dict_in_generate": False}
    expected, found = (generate(model, **options) for model in encoder_decoder_pair("whisper", "x"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("plan", ["k+r", "x"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_static_cache(name: str, plan: str) -> None:
    options = {"cache_implementation": "static", "max_new_tokens": 12}
    expected, found = (generate(model, **options) for model in encoder_decoder_pair(name, plan))
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("plan", ["k+r", "x"])
@pytest.mark.parametrize("name", ["t5-wide", "bart", "whisper"])
def test_left_padded_decoder_prompts(name: str, plan: str) -> None:
    """Prompts of several tokens, on an empty cache and after it: keys of padding are not seen."""
    if (name, plan) == ("t5-wide", "k+r"):
        plan = "mixed"
    ids = torch.randint(4, 97, (2, 30), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 0, 0
    found = []
    for model in encoder_decoder_pair(name, plan):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        inputs, outputs = read_by(model), []
        for first, last in ((0, 22), (22, 29), (29, 30)):
            with torch.no_grad():
                outputs.append(
                    model(
                        **inputs,
                        decoder_input_ids=ids[:, first:last],
                        decoder_attention_mask=mask[:, :last],
                        **{CACHE: cache},
                    ).logits
                )
        found.append(torch.cat(outputs, 1)[mask.bool()])
    assert relative(found[1], found[0]) < condition(encoder_decoder_pair(name, plan)[1]) * EPS


def logits(model: PreTrainedModel) -> Tensor:
    family = family_of(AutoConfig.for_model(model.config.model_type.removeprefix("slim_")))
    return cached_logits(model, model_inputs(family, model.config, TEXT[:64], None))


@pytest.mark.parametrize("options", [{}, {"rank": 8}], ids=str)
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_bf16_is_as_accurate_as_the_ordinary_model(name: str, options: dict[str, Any]) -> None:
    """Against the same weights in fp64, with twice the ordinary model's error as the budget, as plans have it."""
    model = encoder_decoder(name).bfloat16()
    slim = to_slim(model, TEXT, **options)
    plans = [one["plan"] for one in slim.config.slim_layers]
    assert plans == (["k+r"] * 4 if options else ["x", "e"] * 2)
    oracle = logits(deepcopy(model).double())
    assert relative(logits(slim), oracle) < 2 * relative(logits(model), oracle)


@pytest.mark.parametrize("plan", ["mixed", "x"])
@pytest.mark.parametrize("name", ["t5-wide", "bart", "whisper"])
def test_gradients_and_attention_weights(name: str, plan: str) -> None:
    """Gradients reach the embeddings through all layers; training, with its dropouts, changes them."""
    gradients, weights = [], []
    for of, training in ((0, False), (1, False), (1, True)):
        model = deepcopy(encoder_decoder_pair(name, plan)[of]).train(training)
        inputs = {**read_by(model), "labels": TEXT[:40].view(2, 20)}
        model(**inputs).loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad)
        if not training:
            model.set_attn_implementation("eager")
            model.get_decoder().set_attn_implementation("eager")  # T5's has a config of its own, left out before 5.20
            with torch.no_grad():
                out = model(**inputs, output_attentions=True)
            weights.append((*out.decoder_attentions, *out.cross_attentions))
    bound = 20 * condition(encoder_decoder_pair(name, plan)[1]) * EPS
    assert relative(gradients[1], gradients[0]) < bound
    assert (relative(gradients[2], gradients[1]) > 0.01) == (name != "whisper")  # whose dropouts are 0
    assert len(weights[0]) == len(weights[1]) == 4
    for expected, found in zip(*weights):
        assert relative(found, expected) < bound


@pytest.mark.parametrize("queries", [3, 40], ids=["few", "many"])
def test_heads_read_the_encoders_output(queries: int) -> None:
    """Projections of inputs need no inverse, and may be narrower than the inputs."""
    weights, seen, encoded = layer(head_dim=10, biases=True), text(queries), text(30, seed=2)
    key, value = (InputProjection(*one.shape[::-1]).double() for one in (weights.key, weights.value))
    with torch.no_grad():
        for projection, own, bias in (
            (key, weights.key, weights.key_bias),
            (value, weights.value, weights.value_bias),
        ):
            projection.weight.copy_(own)
            projection.bias.copy_(bias)
        query = (seen @ weights.W_Q + weights.query_bias).view(1, queries, 4, 10).transpose(1, 2)
        cached = encoded[None, None]
        scored = key(cached[:, 0], with_bias=False).unflatten(-1, (4, -1)).transpose(1, 2)
        absorbed = key(query, 4, to_inputs=True)
        torch.testing.assert_close(attention_scores(absorbed, cached, 1), attention_scores(query, scored, 1))
        out, _ = slim_attention(
            query,
            scored,
            cached,
            cached[..., :0],
            InputValues(value, 4),
            None,
            scaling=10**-0.5,
            dtype=torch.float64,
            causal=False,
        )
    expected = inputs_cache_output(weights, seen, encoded, causal=False)
    assert relative(out[0] @ weights.W_O + weights.output_bias, expected) < EPS


def test_refused() -> None:
    for name, plan, reason in (
        ("t5-narrow", "k", r"layer 0 cannot have plan 'k'.*W_K maps 64 inputs to 32 coordinates"),
        ("t5", (("k", 0), ("e", 0), ("k", 0), ("k", 0)), "in all layers or in none .*got e, k"),
        ("t5", (("e", 0), ("e", 0), ("k", 0), ("e", 0)), "layer 0 cannot have plan 'e', only one of k, k"),
        ("t5", (("k", 0), ("x", 0), ("k", 0), ("k", 0)), "layer 1 cannot have plan 'x'"),
        ("t5", (("k", 0), ("k", 0)), "the plan is for 2 layers, and the model has 4"),
    ):
        with pytest.raises(ValueError, match=reason):
            to_slim(encoder_decoder(name), TEXT, plan=plan)
    with pytest.raises(ValueError, match="layer 0 cannot have plan 'x', only one of k"):
        to_slim(tiny_model("llama-mha"), TEXT, plan="x")
    with pytest.raises(ValueError, match="only models for generation, T5ForConditionalGeneration"):
        to_slim(T5Model(encoder_decoder("t5").config), TEXT)
    with pytest.raises(ValueError, match="without its encoder"):
        family_of(AutoConfig.for_model("whisper", is_encoder_decoder=False))
    with pytest.raises(ValueError, match="has no decoder_start_token_id"):
        to_slim(encoder_decoder("t5", decoder_start_token_id=None), TEXT)
    with pytest.raises(ValueError, match=r"must be of shape \[1, 8, 48\], got \[1, 8, 40\]"):
        to_slim(encoder_decoder("whisper"), TEXT, features=torch.zeros(1, 8, 40))
    with pytest.raises(ValueError, match=r"in all layers or in none .*got e, k"):
        SlimT5Config(num_layers=2, slim_layers=[{"plan": "k"}, {"plan": "e"}, {"plan": "k"}, {"plan": "k"}])
    with pytest.raises(ValueError, match=r"must be one of k, k\+r, kv, x, got 'e'"):
        SlimT5Config(num_layers=1, slim_layers=[{"plan": "e"}, {"plan": "e"}])


def test_auto_goes_on_where_the_encoders_output_leaves_the_range() -> None:
    """The range is that of fp16, with headroom: ``auto`` then takes another plan for cross-attention."""
    model = encoder_decoder("t5")
    with torch.no_grad():
        model.encoder.final_layer_norm.weight.fill_(7000.0)
        for block in model.decoder.block:
            for projection in (block.layer[1].EncDecAttention.k, block.layer[1].EncDecAttention.v):
                projection.weight.mul_(1 / 7000)
    plans = [layer["plan"] for layer in to_slim(model.half(), TEXT).config.slim_layers]
    assert not {"e"} & set(plans[1::2])
    with pytest.raises(ValueError, match=r"plan 'e': inputs reach 2\.\d+e\+04"):
        to_slim(model, TEXT, plan="e")


@pytest.mark.parametrize("plan", ["k", "x"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_8_bits(name: str, plan: str) -> None:
    """Inputs in int8 are as accurate as keys and values in int8, keys alone are not; either generates on."""
    model = encoder_decoder(name)
    slim = to_slim(model, TEXT, plan=plan, cache_dtype="int8", tolerance=1e9)
    entries = slim.config.layer_plans
    assert [entry.cache_dtype for entry in entries] == ["int8", "int8" if plan == "k" else None] * (len(entries) // 2)
    found = generate(slim)
    (self_kv, _), (self_slim, _) = (cached_bytes(one[CACHE]) for one in (generate(model), found))
    heads = getattr(slim.config, "decoder_attention_heads", None) or slim.config.num_heads
    width = slim.config.d_model
    assert self_slim * 2 * width * 4 == self_kv * (width + 2 * heads)
    inputs = model_inputs(family_of(model.config), model.config, TEXT, None)
    expected = cached_logits(deepcopy(model).double(), inputs)
    in_int8 = cached_logits(model, inputs, range(0, len(entries), 1 if plan == "k" else 2))
    error = relative(cached_logits(slim, inputs), expected) / relative(in_int8, expected)
    assert error < 3 if plan == "x" else error > 3


SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3}
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}


def drawn(slim: PreTrainedModel, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return slim.generate(**read_by(slim), **{"max_new_tokens": 8, "no_repeat_ngram_size": 2, **arguments})


def check(slim: PreTrainedModel, **arguments: Any) -> None:
    report = as_in_stock(slim, lambda: drawn(slim, **arguments), min_saved_tokens=1)
    assert report is not None
    assert (report.path, report.inputs) == ("shared", 2), report.reason


# With plan mixed, layers of the ordinary model stand beside slim ones.
@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
@pytest.mark.parametrize(("name", "plan"), [("t5", "mixed"), ("t5", "e"), ("whisper", "k+r"), ("bart", "x")])
def test_tokens_are_those_of_the_slim_model(name: str, plan: str, arguments: dict[str, Any]) -> None:
    slim = encoder_decoder_pair(name, plan)[1]
    check(slim, **arguments)


def test_eight_bits_are_read_as_they_are_cached() -> None:
    slim = to_slim(encoder_decoder("whisper"), TEXT, plan=(("x", 0), ("k+r", 8)) * 2, cache_dtype="int8")
    check(slim, **SAMPLING)


def test_keys_and_values_are_stored_once_for_each_input() -> None:
    slim = encoder_decoder_pair("bart", "k")[1]
    with fd.enabled(slim, min_saved_tokens=1):
        stored = drawn(slim, **SAMPLING, return_dict_in_generate=True)[CACHE].inputs
    shown = int(read_by(slim)["attention_mask"].sum())
    assert {part.shape for segments in stored.segments.values() for part in segments[0]} == {(4, shown, 16)}


def test_small_weights_that_are_skipped_run_stock() -> None:
    slim = to_slim(encoder_decoder("t5"), TEXT, plan="k")
    slim.config.slim_sparsity_threshold = 0.01
    report = as_in_stock(slim, lambda: drawn(slim, **SAMPLING), min_saved_tokens=1)
    assert report is not None
    assert (report.path, "sparsity threshold" in report.reason) == ("stock", True)
