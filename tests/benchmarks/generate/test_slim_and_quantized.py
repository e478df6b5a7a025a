"""Ways with other caches: slim models, and transformers' quantized ones."""

import math
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from transformers import cache_utils

from benchmarks.generate import ways as generate_ways
from benchmarks.generate.calls import caller, load
from benchmarks.generate.measure import GenerateBench
from benchmarks.generate.ways import find_way
from hf_fastdecode._compat import CACHE

from .tiny_case import CASE, CPU, PER_TOKEN

SLIM_CASE = replace(CASE, shape="tiny-mha")


@pytest.mark.parametrize(("plan", "width"), [("k", 128), ("k+r", 128 + 128 // 8)])
def test_slim_ways(bench, plan, width):
    stock, shared = (bench.measure(SLIM_CASE, way) for way in (f"stock-slim-{plan}", f"slim-{plan}"))
    assert stock["status"] == shared["status"] == "ok"
    assert math.isfinite(stock["ms_per_step"] + shared["ms_per_step"])
    assert shared["ran"] == "eager, sampler hf"
    assert stock["kv_bytes"] == 4 * (120 + 7) * 2 * width * 4  # rows, tokens, layers, numbers, bytes
    assert shared["kv_bytes"] == 120 * 2 * PER_TOKEN + 4 * 8 * 2 * width * 4  # the prompt as keys and values
    assert stock["floor_kv_bytes"] == shared["floor_kv_bytes"] == (120 + 4 * 8) * 2 * PER_TOKEN


def test_slim_models_are_as_converted_ones():
    model = load("tiny-mha", CPU, torch.bfloat16, "k+r")
    assert {(layer.plan, layer.rank, layer.float16) for layer in model.config.layer_plans} == {("k+r", 16, True)}
    with torch.no_grad():
        cache = model(torch.arange(3, 10)[None])[CACHE]
    assert [cache.layers[0].keys.dtype, cache.layers[0].values.shape[-1]] == [torch.float16, 16]


def test_wrong_slim_steps_are_not_measured(monkeypatch):
    monkeypatch.setattr("hf_fastdecode.patches.layers.attention_layer.merge", lambda suffix, nodes: nodes)
    row = GenerateBench(CPU, repeats=1).measure(SLIM_CASE, "slim-k")
    assert row["status"] == "wrong: other tokens than stock in fp32 on cpu"


@pytest.mark.parametrize("shape", ["tiny", "embedded"])
def test_slim_ways_need_a_named_multi_head_shape(shape):
    row = GenerateBench(CPU, check=False).measure(replace(CASE, shape=shape), "slim-k")
    assert row["status"].startswith("not run: slim ways need a named shape with as many KV heads as query heads")
    assert row["status"].endswith(f"got {shape}; choose 7b-mha, 13b-mha or tiny-mha")


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="transformers 5.23 brings it")
def test_quantized_caches(bench, model):
    row = bench.measure(CASE, "quantized-fp8")
    assert row["status"] == "ok"
    assert math.isfinite(row["ms_per_step"])
    assert row["kv_bytes"] is None  # transformers counts what is not quantized
    cache = caller(model, CASE, find_way("quantized-fp8"))(2, return_dict=True)[CACHE]
    assert type(cache).__name__ == "QuantizedCache"


def test_transformers_without_a_cache_in_fp8(bench, monkeypatch):
    monkeypatch.delattr(cache_utils, "Fp8QuantizedLayer", raising=False)
    row = bench.measure(CASE, "quantized-fp8")
    assert row["status"] == f"not run: transformers {version('transformers')} has no quantized cache in fp8; 5.23 has"


def test_calls_do_not_change_later_ones(model, monkeypatch):
    """transformers 5.17 takes the backend out of the configuration that it is given."""
    backends = []
    monkeypatch.setattr(model, "generate", lambda *_, cache_config, **__: backends.append(cache_config.pop("backend")))
    for _ in range(2):
        call = caller(model, CASE, find_way("quantized-hqq"))
        call(1), call(2)
    assert backends == ["hqq"] * 4


def test_packages_that_are_not_installed(bench, monkeypatch):
    def absent(name):
        assert name == "hqq"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(generate_ways, "version", absent)
    row = bench.measure(CASE, "quantized-hqq")
    assert row["status"] == "not run: hqq is not installed; pip install hqq"
