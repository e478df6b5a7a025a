"""Bytes of keys and values, against hand-computed numbers and against transformers' own caches."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.accounting import KVSizes, memory_io
from hf_fastdecode.cache.stores import Kind, Store

from ..tiny_models import ARCHITECTURES, VOCABULARY, tiny_model

LLAMA = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 96}


def shape(model_type: str, **arguments: object) -> KVSizes:
    return KVSizes.from_config(AutoConfig.for_model(model_type, **arguments))


def test_equations_5_and_6_by_hand():
    io = memory_io(kv_heads=4, head_dim=64, rows=16, context=2000, decoded=10)
    assert io.stock == 4 * 64 * 16 * 2010 == 8_232_960
    assert io.shared == 4 * 64 * (2000 + 160) == 552_960
    assert io.ratio == 2010 * 16 / 2160


def test_one_row_gains_nothing_and_b_rows_at_most_b():
    assert memory_io(2, 8, rows=1, context=100, decoded=7).ratio == 1
    assert memory_io(2, 8, rows=32, context=100, decoded=0).ratio == 32
    assert memory_io(2, 8, rows=32, context=0, decoded=7).ratio == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "group_size", "head_dim", "bytes_per_token"),
    [
        ({"num_key_value_heads": 8}, "MHA", 1, 64, 2 * 6 * 8 * 64 * 2),
        ({"num_key_value_heads": 2}, "GQA", 4, 64, 2 * 6 * 2 * 64 * 2),
        ({"num_key_value_heads": 1}, "MQA", 8, 64, 2 * 6 * 1 * 64 * 2),
        ({"num_key_value_heads": 2, "head_dim": 96}, "GQA", 4, 96, 2 * 6 * 2 * 96 * 2),
    ],
    ids=["mha", "gqa", "mqa", "head-dim"],
)
def test_shape_of_a_llama_config(arguments, kind, group_size, head_dim, bytes_per_token):
    found = shape("llama", **LLAMA, **arguments)
    heads = found.same
    assert (found.layers, heads.query_heads, heads.attention, heads.group_size) == (6, 8, kind, group_size)
    assert heads.head_dim == head_dim
    assert found.bytes_per_token(2) == bytes_per_token


def test_kv_bytes_by_hand():
    found = shape("llama", **LLAMA, num_key_value_heads=2)  # 3,072 bytes per token at 2 bytes a number
    kv = found.kv_bytes(rows=16, context=2048, decoded=256, element_bytes=2)
    assert kv.stock == 16 * 2304 * 3072 == 113_246_208
    assert kv.shared == (2048 + 16 * 256) * 3072 == 18_874_368
    assert kv.ratio == 6


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bytes_per_token_are_those_of_a_real_cache(name):
    model = tiny_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.randint(3, VOCABULARY, (3, 7)), **{CACHE: cache}, use_cache=True)
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    found = KVSizes.from_config(model.config)
    assert found.bytes_per_token(4) * 3 * 7 == real
    assert found.kv_bytes(rows=3, context=5, decoded=2, element_bytes=4).stock == real


def test_a_window_bounds_what_stock_reads():
    model = tiny_model("mistral", sliding_window=8)
    found = KVSizes.from_config(model.config)
    assert (found.local_layers, found.window) == (2, 8)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.randint(3, VOCABULARY, (3, 20)), **{CACHE: cache}, use_cache=True)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)  # a step adds one token to these
    assert kept == found.kv_bytes(rows=3, context=7, decoded=0, element_bytes=4).stock
    read = found.kv_bytes(rows=3, context=18, decoded=2, element_bytes=4).stock
    assert read == found.kv_bytes(rows=3, context=8, decoded=0, element_bytes=4).stock


WIDE = Store(Kind.FULL, 8, 8, 64, 64)
MIXED = KVSizes((replace(WIDE, kind=Kind.SLIDING, window=100), WIDE) * 3)


def test_layers_that_differ_in_heads_are_counted_one_by_one():
    small = replace(WIDE, query_heads=4, kv_heads=2, head_dim=32, value_dim=16)
    both = KVSizes((WIDE, small))
    assert both.alike is None
    with pytest.raises(ValueError, match="its layers differ in heads"):
        _ = both.same
    assert both.bytes_per_token(2) == 2 * (8 * 128 + 2 * 48)
    assert both.kv_bytes(3, 10, 4, 2) == (3 * 14 * both.bytes_per_token(2), (10 + 3 * 4) * both.bytes_per_token(2))


def test_local_and_wide_layers_are_counted_apart():
    types = ["sliding_attention", "full_attention"] * 3
    found = shape("llama", **LLAMA, num_key_value_heads=8)
    mixed = MIXED
    assert shape("gemma2", **LLAMA, head_dim=64, num_key_value_heads=8, sliding_window=100, layer_types=types) == mixed
    wide, both = found.kv_bytes(4, 1000, 10, 2), mixed.kv_bytes(4, 1000, 10, 2)
    assert both.stock == wide.stock // 2 + wide.stock // 2 * 100 // 1010


def test_a_step_reads_what_the_window_shows_of_the_context():
    mixed = MIXED
    layer = 2 * 8 * 64 * 2 * 3  # bytes of a token in half of the layers
    stored, read = mixed.kv_bytes(4, 1000, 10, 2), mixed.step_bytes(4, 1000, 10, 2)
    assert stored.shared == 2 * layer * (1000 + 4 * 10)
    assert read.shared == layer * (1000 + 4 * 10) + layer * (90 + 4 * 10)
    assert read.stock == stored.stock == layer * 4 * (1010 + 100)
    assert mixed.step_bytes(4, 1000, 200, 2).shared == layer * (1000 + 4 * 200) + layer * 4 * 100


@pytest.mark.parametrize("size", [0, -1])
def test_a_window_of_no_tokens_is_none(size):
    found = shape("mistral", **LLAMA, num_key_value_heads=8, sliding_window=size)
    assert (found.local_layers, found.window) == (0, None)


def test_a_window_not_in_use_does_not_count():
    found = shape("qwen2", **LLAMA, use_sliding_window=False, sliding_window=64)
    assert (found.local_layers, found.window) == (0, None)


def test_layouts_of_their_own_are_not_counted():
    with pytest.raises(ValueError, match=r"layer 1 of slim_llama \(full_attention\) stores a layout of its own"):
        shape("slim_llama", num_hidden_layers=2, slim_layers=[{"plan": "kv"}, {"plan": "k"}])


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("t5", "t5 is an encoder-decoder"),
        ("mamba2", "layer 0 of mamba2 .* stores a state"),
        ("qwen3_next", "layer 0 of qwen3_next .linear_attention. stores a state; only keys and values are counted"),
    ],
)
def test_what_is_not_counted_is_refused(model_type, message):
    with pytest.raises(ValueError, match=message):
        shape(model_type)
