"""Slim models against the models they were made of, in transformers' own loops and caches."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.to_slim import to_slim

from ..tiny_models import tiny_model
from .slim_models import ROWS, TEXT, condition, generate, logits, pair, relative

EPS = torch.finfo(torch.float32).eps


ROPES = pytest.mark.parametrize("rope", ["raw", "unrotate"])


def same_tokens(plan: str, rope: str = "raw", **options: Any) -> None:
    expected, found = (generate(model, **options).sequences for model in pair(plan, "plain", rope))
    assert torch.equal(found, expected)


@ROPES
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 4, "do_sample": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"input_ids": ROWS["input_ids"][:1], "attention_mask": None},
        {"input_ids": ROWS["input_ids"][:1, :1], "attention_mask": None},
        {"input_ids": ROWS["input_ids"][:1], "attention_mask": None, "prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 7},
    ],
    ids=lambda options: "-".join(map(str, (key for key in options if "mask" not in key))),
)
def test_other_ways_to_generate(options: dict[str, Any], rope: str) -> None:
    same_tokens("k+r", rope, **options)
    if "num_beams" in options:
        same_tokens("k", rope, **options)  # values of width 0 are reordered too


@ROPES
def test_assisted_generation_crops_the_cache(rope: str) -> None:
    """The assistant is another random model, so that most of its tokens are taken back."""
    options = {"input_ids": ROWS["input_ids"][:1], "attention_mask": None}
    for plan in ("k", "k+r"):
        same_tokens(plan, rope, assistant_model=tiny_model("llama-mha", seed=1), **options)
    slim = pair("k")[1]
    expected = generate(pair("k")[0], **options)
    assert torch.equal(generate(pair("k")[0], assistant_model=slim, **options).sequences, expected.sequences)


def test_continued_from_a_cache() -> None:
    """Prompt, completion, then more tokens and a further completion."""
    results = []
    for model in pair("k+r"):
        first = generate(model, max_new_tokens=10)
        more = torch.randint(3, 97, (3, 5), generator=torch.Generator().manual_seed(1))
        ids = torch.cat([first.sequences, more], 1)
        mask = torch.cat([ROWS["attention_mask"], torch.ones(3, 15, dtype=torch.long)], 1)
        again = generate(model, input_ids=ids, attention_mask=mask, **{CACHE: first[CACHE]})
        results.append(again.sequences)
    assert torch.equal(*results)


def test_repeated_and_selected_rows_of_a_cache() -> None:
    oracle, slim = pair("k")
    found = []
    with torch.no_grad():
        for model in (oracle, slim):
            cache = DynamicCache(config=model.config)
            model(TEXT[None, :20].view(2, 10), **{CACHE: cache})
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0]))
            cache.crop(-2)
            found.append(model(TEXT[20:24].view(2, 2), **{CACHE: cache}).logits)
            assert cache.get_seq_length() == 10
    assert relative(found[1], found[0]) < condition(oracle) * EPS


def eager(model: PreTrainedModel) -> PreTrainedModel:
    copy = deepcopy(model)
    copy.set_attn_implementation("eager")
    return copy


def test_eager_attention_generates_the_same() -> None:
    expected, found = (generate(eager(model)).sequences for model in pair("k+r"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_accurate_as_the_ordinary_model(dtype: torch.dtype) -> None:
    """Against the same weights in fp64, with twice the ordinary model's error as the budget, as plans have it."""
    model = tiny_model("llama-mha").to(dtype)
    slim = to_slim(model, TEXT)
    oracle = logits(deepcopy(model).double())
    assert relative(logits(slim), oracle) < 2 * relative(logits(model), oracle)
    cache = generate(slim, max_new_tokens=2)[CACHE]
    assert {layer.keys.dtype for layer in cache.layers} == {torch.float16}
    assert slim.config.slim_matrix_dtype == "float16"
    assert slim.model.layers[0].self_attn.slim.from_keys.values.dtype == torch.float16


def test_casting_a_slim_model_leaves_the_matrices() -> None:
    slim = deepcopy(pair("k+r")[1])
    before = slim.model.layers[0].self_attn.slim.state_dict()
    for cast in (slim.half, slim.bfloat16, lambda: slim.to(torch.bfloat16), slim.float):
        cast()
        after = slim.model.layers[0].self_attn.slim.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert slim.model.embed_tokens.weight.dtype == slim.dtype
        assert logits(slim).dtype == slim.dtype
        assert bool(logits(slim).isfinite().all())


@ROPES
def test_autocast_leaves_keys_and_their_averages(rope: str) -> None:
    """Within autocast the projections of queries are in bf16; keys in bf16 would spoil the values."""
    model, slim = pair("k+r", "plain", rope)
    with torch.autocast("cpu", torch.bfloat16):
        found, stock = logits(slim), logits(model)
    oracle = logits(model)
    assert relative(found, oracle) < 2 * relative(stock, oracle)


def test_random_weights_of_keys_are_drawn_as_those_of_queries() -> None:
    slim = pair("k")[1]
    attention = type(slim)(slim.config).model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        assert projection.weight.std().item() == pytest.approx(slim.config.initializer_range, rel=0.1)
    assert not isinstance(attention.k_proj, torch.nn.Linear)  # which quantizers and adapters replace


def test_positions_that_cannot_be_counted_are_refused() -> None:
    slim = pair("k")[1]
    packed = torch.cat([torch.arange(20), torch.arange(20)])[None]
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"must rise by 1 .* use_cache=False"):
            slim(TEXT[None, :40], position_ids=packed, use_cache=True)
        slim(TEXT[None, :40], position_ids=packed, use_cache=False)


def test_the_source_is_left_as_it_was() -> None:
    model = tiny_model("llama-mha")
    before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    slim = to_slim(model, TEXT)
    for name, tensor in model.named_parameters():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert slim.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not any("v_proj" in name for name in slim.state_dict())


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("llama-gqa", {}, r"got 2 != 4"),
        ("mistral", {}, "no slim form of mistral"),
        ("llama-mha", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
    ],
)
def test_models_without_a_slim_form(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_slim(tiny_model(name, **overrides), TEXT)


def test_bad_plans_and_texts() -> None:
    model = tiny_model("llama-mha")
    for options, message in (
        ({"plan": "v"}, "must be auto, k, x, e, kv"),
        ({"plan": "x"}, r"layer 0 cannot have plan .x., only one of k, k\+r, kv"),
        ({"plan": "k", "rank": 3}, "leave one out"),
        ({"plan": (("k", 0),)}, "for 1 layers, and the model has 2"),
        ({"rank": 65}, "between 0 and 64"),
        ({"tolerance": 0.5}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            to_slim(model, TEXT, **options)
    with pytest.raises(ValueError, match="needs 32 tokens, got 8"):
        to_slim(model, TEXT[:8])
    with pytest.raises(ValueError, match="or the model's `tokenizer`"):
        to_slim(model)
    singular = tiny_model("llama-mha")
    singular.model.layers[1].self_attn.k_proj.weight.data[5] = 0
    with pytest.raises(ValueError, match="layer 1 cannot have plan 'k': the smallest singular value"):
        to_slim(singular, TEXT, plan="k")
    assert [layer["plan"] for layer in to_slim(singular, TEXT, tolerance=1e6).config.slim_layers] == ["k", "kv"]


def test_models_that_are_no_ordinary_ones() -> None:
    model = pair()[0]
    adapted, offloaded = deepcopy(model), deepcopy(model).to("meta")
    adapted.model.layers[0].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[0].mlp.up_proj)
    for other, message in (
        (adapted, r"has model.layers.0.mlp.up_proj.0.weight; .* \(merge_and_unload\)"),
        (model.model, "this LlamaModel has embed_tokens.weight"),
        (offloaded, "embed_tokens.weight is not in memory"),
    ):
        with pytest.raises(ValueError, match=message):
            to_slim(other, TEXT)
    wrapped = to_slim(torch.nn.DataParallel(model), TEXT, plan="k")
    assert torch.equal(logits(wrapped), logits(pair("k")[1]))


def test_continuous_batching_is_refused() -> None:
    """Before any token is drawn: what requests fail with otherwise is a mismatch of shapes."""
    with pytest.raises(ValueError, match="does not run in transformers' continuous batching"):
        pair()[1].generate_batch([[5, 6, 7]], max_new_tokens=2)
