"""Models whose layers differ in KV heads, head_dim, query heads, values and windows: none stands for the others."""

from __future__ import annotations

import copy
from itertools import groupby

import pytest
import torch
from transformers import DynamicCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.layout import EmptyLayer
from hf_fastdecode.cache.shared import SharedContextCache, cache_bytes
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import modes

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .test_capture_on_gpu import drawn_alike

NAMES = ["gemma4_text", "mimo_v2_flash", "laguna"]
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 4, "max_new_tokens": 8}
PROMPT = ragged_prompts(90)


@pytest.fixture(params=NAMES)
def differing(request):
    four = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return tiny_model(request.param, **({} if request.param == "laguna" else four))


def logits_of(model, ids, cache=None):
    with torch.no_grad():
        return model(ids, **({} if cache is None else {CACHE: cache})).logits


def test_kept_caches_forks_and_crops(differing):
    ids, more = PROMPT["input_ids"], ragged_prompts(7, seed=3)["input_ids"]
    with fd.enabled(differing):
        kept = fd.prefill(differing, ids[:, :60])
        stock = seeded(lambda: differing.generate(ids, **SAMPLING, **{CACHE: DynamicCache(config=differing.config)}))
        for _ in range(2):
            assert torch.equal(seeded(lambda: differing.generate(ids, **SAMPLING, **{CACHE: kept})), stock)
            assert fd.explain(differing).last_call.prefilled_tokens == 30
        fork = kept.fork()
        first = logits_of(differing, more, fork)
        fork.crop(-3)
        again = logits_of(differing, more[:, -3:], fork)
        twice = logits_of(differing, more, fork.fork())
    whole = logits_of(differing, torch.cat([ids[:, :60], more, more], 1))[:, 60:]
    torch.testing.assert_close(first, whole[:, :7])
    torch.testing.assert_close(again, whole[:, 4:7])
    torch.testing.assert_close(twice, whole[:, 7:])


def test_reused_prefixes_and_beams(differing):
    prompts = [{"input_ids": row[None]} for row in ragged_prompts(90, 90, 90, shared=70)["input_ids"]]
    beams = {"num_beams": 3, "do_sample": False, "num_return_sequences": 3}
    expected = [seeded(lambda prompt=prompt: differing.generate(**prompt, **SAMPLING)) for prompt in prompts]
    searched = differing.generate(**prompts[0], **SAMPLING | beams)
    with fd.enabled(differing, reuse_prefix=True):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert torch.equal(seeded(lambda prompt=prompt: differing.generate(**prompt, **SAMPLING)), tokens)
        assert fd.explain(differing).last_call.prefilled_tokens == 20
        assert torch.equal(differing.generate(**prompts[0], **SAMPLING | beams), searched)


def test_bytes_are_those_of_each_layer(differing):
    call = PROMPT | SAMPLING | {"return_dict_in_generate": True}
    stock = differing.generate(**call)[CACHE]
    with fd.enabled(differing):
        cache = differing.generate(**call)[CACHE]
        report = fd.explain(differing).last_call
    per_token = [layer.keys.shape[1] * (layer.keys.shape[-1] + layer.values.shape[-1]) * 4 for layer in stock.layers]
    assert cache.nbytes.stored == sum(per_token) * (90 + 4 * 7)
    # A window's layer holds its last tokens but one, to which a step adds the next.
    assert cache.nbytes.stock == cache_bytes(stock) + sum(
        4 * size for size, layer in zip(per_token, stock.layers, strict=True) if layer.is_sliding
    )
    assert report.nbytes.stored == cache.nbytes.stored


def test_the_report_has_a_line_for_each_kind_of_layer(differing):
    with fd.enabled(differing):
        differing.generate(**PROMPT, **SAMPLING)
        lines = [line for line in fd.explain(differing).last_call.lines() if line.startswith("  layer")]
    kinds = list(dict.fromkeys(differing.config.layer_types))
    assert ["within a window of 40 tokens" in line for line in lines] == [
        name == "sliding_attention" for name in kinds
    ]
    for line, kind in zip(lines, kinds, strict=True):
        told = line.split(":")[0].split(None, 1)[1]
        assert told == folded([index for index, name in enumerate(differing.config.layer_types) if name == kind])


def folded(indices):
    """Numbers of layers as reports have them."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there these steps are captured")
@pytest.mark.parametrize("name", ["gemma4_text", "laguna"])
def test_steps_have_tables_for_each_kind_of_layer(name, monkeypatch):
    """Uncaptured and interpreted: layers with a window, and those of other heads, have schedules of their own."""
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    model = tiny_model(name)
    prompts = [ragged_prompts(30), ragged_prompts(57, 40, shared=33)]
    call = SAMPLING | {"num_return_sequences": 2, "max_new_tokens": 4}
    stock = [seeded(lambda prompt=prompt: model.generate(**prompt, **call)) for prompt in prompts]
    with fd.enabled(model, mode="graph", backend="triton", min_saved_tokens=1):
        for prompt, tokens in zip(prompts, stock, strict=True):
            assert torch.equal(seeded(lambda prompt=prompt: model.generate(**prompt, **call)), tokens)
        (*_, step) = state_of(model).captures._steps
    shapes = [alike.shape for alike in step.tables.layers.values()]
    assert len(set(shapes)) == 2
    assert [shape.windowed for shape in shapes] == [True, False]


def test_layers_that_store_nothing_keep_their_places():
    """Layers of a feed-forward network alone, between those of attention."""
    sizes = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    model = tiny_model("gemma3_text", **sizes)
    skipped = copy.deepcopy(model)
    skipped.config.per_layer_config = {1: {"skip": ["attention"]}}
    for one in (model, skipped):
        one.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (torch.zeros_like(hidden_states), None)
    ids = PROMPT["input_ids"]
    cache = SharedContextCache()
    with fd.enabled(skipped), torch.no_grad():
        logits = [skipped(part, **{CACHE: cache}).logits for part in (ids[:, :80], ids[:, 80:])]
        fork = cache.fork()
        fork.crop(-4)
        assert [type(layer) is EmptyLayer for layer in fork.layers] == [False, True, False]
        again = skipped(ids[:, -4:], **{CACHE: fork}).logits
    expected = logits_of(model, ids)
    torch.testing.assert_close(torch.cat(logits, 1), expected)
    torch.testing.assert_close(again, expected[:, -4:])
    assert cache.nbytes.stored == 2 * 2 * 2 * 32 * 4 * 90  # layers, keys and values, KV heads, head_dim, bytes
    assert cache.nbytes.stock == cache.nbytes.stored


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma4_text", "laguna"])
def test_captured_on_a_gpu(name):
    """Kernels of experts round otherwise than the eager steps', whatever both err."""
    least = 0.9 if name != "laguna" else 0.2
    model = tiny_model(name, hidden_size=256).bfloat16().cuda()
    calls = [ragged_prompts(300, 200, shared=150), ragged_prompts(30), ragged_prompts(77, 513, shared=33)]
    calls = [{key: value.cuda() for key, value in one.items()} | SAMPLING | {"max_new_tokens": 20} for one in calls]
    with fd.enabled(model, mode="eager"):
        eager = [seeded(lambda call=call: model.generate(**call)) for call in calls]
    with fd.enabled(model, mode="graph"):
        for call, expected in zip(calls, eager, strict=True):
            tokens = seeded(lambda call=call: model.generate(**call))
            assert fd.explain(model).last_call.mode == "graph", fd.explain(model).last_call.mode_reason
            assert drawn_alike(expected, tokens, call) > least
