"""The tables of the Slim attention paper, from configs; its numbers are in activations and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, WhisperConfig

from hf_fastdecode.cache.accounting import KVShape
from hf_fastdecode.conversion.sizes.cache_size import CacheSize
from hf_fastdecode.conversion.sizes.decoder import decoder_caches
from hf_fastdecode.conversion.sizes.encoder_decoder import encoder_decoder_caches
from hf_fastdecode.conversion.sizes.matrices import decoder_matrices, empty_model

WHISPER = {
    "tiny": (4, 384, 6),
    "base": (6, 512, 8),
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (32, 1280, 20),
}
"""Layers, d, heads."""

# The last table of section 7: for each row, the five sizes in this order.
SECTION_7 = {
    "params": ("38M", "73M", "242M", "764M", "1.5B"),
    "encoder E-cache": ("0.6", "0.8", "1.2", "1.5", "1.9"),
    "cross KV-cache": ("4.6", "9.2", "27.6", "73.7", "122.9"),
    "self KV-cache": ("1.4", "2.8", "8.3", "22.0", "36.7"),
    "baseline cache": ("6.0", "12.0", "35.9", "95.7", "159.6"),
    "option 1 cache": ("3.0", "6.0", "18.0", "47.9", "79.8"),
    "option 2 cache": ("0.7", "1.4", "4.1", "11.0", "18.4"),
    "option 2 savings": ("8.7x", "8.7x", "8.7x", "8.7x", "8.7x"),
    "baseline params": ("28.2", "48.6", "138.9", "405.4", "800.4"),
    "option 1 params": ("28.8", "50.1", "146.0", "430.6", "852.8"),
    "option 2 params": ("29.4", "51.7", "153.1", "455.8", "905.2"),
    "batch 1, baseline": ("34.2", "60.5", "174.8", "501.2", "960.0"),
    "batch 1, option 1": ("31.8", "56.1", "164.0", "478.5", "932.6"),
    "batch 1, option 2": ("30.0", "53.1", "157.2", "466.8", "923.6"),
    "batch 1, option 1 speedup": ("1.08x", "1.08x", "1.07x", "1.05x", "1.03x"),
    "batch 1, option 2 speedup": ("1.14x", "1.14x", "1.11x", "1.07x", "1.04x"),
    "batch 64, baseline": ("6.4", "12.7", "38.1", "102.1", "172.1"),
    "batch 64, option 1": ("3.4", "6.8", "20.2", "54.6", "93.1"),
    "batch 64, option 2": ("1.1", "2.2", "6.5", "18.1", "32.5"),
    "batch 64, option 1 speedup": ("1.9x", "1.9x", "1.9x", "1.9x", "1.8x"),
    "batch 64, option 2 speedup": ("5.6x", "5.8x", "5.8x", "5.6x", "5.3x"),
}
NUMBER = 2  # bytes, in fp16


def by_name(sizes: list[CacheSize]) -> dict[str, CacheSize]:
    return {size.name: size for size in sizes}


def millions(count: float) -> str:
    return f"{count / NUMBER / 1e6:.1f}"


@pytest.mark.parametrize("name", WHISPER)
def test_whisper(name: str) -> None:
    layers, d, heads = WHISPER[name]
    sizes: dict[str, Any] = {"d_model": d, "vocab_size": 51865}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": layers, f"{part}_attention_heads": heads, f"{part}_ffn_dim": 4 * d}
    config = WhisperConfig(**sizes)
    model = empty_model(config)
    found = encoder_decoder_caches(config, 448, 1500, torch.float16, decoder_matrices(model))
    ordinary, first, second, _, _ = found
    assert [one.name for one in found[:3]] == ["keys and values", "keys (option 1)", "E on chip, keys"]
    self_kv = KVShape.of_decoder(config).kv_bytes(1, 448, 0, NUMBER).stock
    parameters = model.num_parameters() / 1e6
    table = {
        "params": f"{parameters:.0f}M" if parameters < 1000 else f"{parameters / 1000:.1f}B",
        "encoder E-cache": millions(second.stored - second.read),
        "cross KV-cache": millions(ordinary.stored - self_kv),
        "self KV-cache": millions(self_kv),
        "option 2 savings": f"{ordinary.read / second.read:.1f}x",
    }
    for row, one in (("baseline", ordinary), ("option 1", first), ("option 2", second)):
        table[f"{row} cache"] = millions(one.read)
        table[f"{row} params"] = millions(one.matrices or 0)
        for batch, digits in ((1, 2), (64, 1)):
            reads, base = one.reads(batch), ordinary.reads(batch)
            assert reads is not None and base is not None
            table[f"batch {batch}, {row}"] = millions(reads)
            if one is not ordinary:
                table[f"batch {batch}, {row} speedup"] = f"{base / reads:.{digits}f}x"
    assert table == {row: cells[list(WHISPER).index(name)] for row, cells in SECTION_7.items()}


def llama(hidden_size: int, layers: int, heads: int, **more: Any) -> tuple[str, dict[str, Any]]:
    more |= {"hidden_size": hidden_size, "num_hidden_layers": layers, "num_attention_heads": heads}
    return more.pop("model_type", "llama"), more


# Table 1: config, context, activations of the KV cache.
TABLE_1 = {
    "CodeLlama-7B": (llama(4096, 32, 32), 16384, "4.3B"),
    "CodeLlama-13B": (llama(5120, 40, 40), 16384, "6.7B"),
    "CodeGemma-7B": (llama(3072, 28, 16, head_dim=256, model_type="gemma", num_key_value_heads=16), 8192, "1.9B"),
    "aya-23-35B": (llama(8192, 40, 64, model_type="cohere"), 8192, "5.4B"),
    "SmolLM2-1.7B": (llama(2048, 24, 32), 8192, "0.8B"),
    "Phi-3-mini-128k": (llama(3072, 32, 32, model_type="phi3", pad_token_id=0), 131072, "25.8B"),
    "OLMo-2-1124-13B": (llama(5120, 40, 40, model_type="olmo2"), 4096, "1.7B"),
    "Vicuna-13B-v1.5-16k": (llama(5120, 40, 40), 16384, "6.7B"),
    "GPT-2 XL": (("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}), 1024, "157M"),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_kv_caches_of_table_1(name: str) -> None:
    (model_type, fields), context, expected = TABLE_1[name]
    ordinary = decoder_caches(AutoConfig.for_model(model_type, **fields), context, torch.float16, None)[0]
    numbers = ordinary.stored / NUMBER
    assert (f"{numbers / 1e9:.1f}B" if expected.endswith("B") else f"{numbers / 1e6:.0f}M") == expected


@pytest.mark.parametrize(("d_kv", "heads", "aspect"), [(128, 32, 4), (128, 128, 16)], ids=["T5-3B", "T5-11B"])
def test_inputs_are_twice_the_aspect_ratio_smaller(d_kv: int, heads: int, aspect: int) -> None:
    """Section 6: for e = r d, a cache of inputs is 2 r times smaller than keys and values, and W_KV is r times W_V."""
    config = AutoConfig.for_model("t5", d_model=1024, d_kv=d_kv, num_heads=heads, d_ff=2048, num_layers=2)
    found = encoder_decoder_caches(config, 512, 512, torch.float16, decoder_matrices(empty_model(config)))
    sizes = by_name(found)
    self_kv = KVShape.of_decoder(config).kv_bytes(1, 512, 0, NUMBER).stock
    assert self_kv / sizes["E on chip, inputs"].read == 2 * aspect
    ordinary, keys = sizes["keys and values"].matrices, sizes["keys (option 1)"].matrices
    assert ordinary is not None and keys is not None
    W_V = 1024 * heads * d_kv * NUMBER
    assert keys - ordinary == 2 * ((aspect - 1) * W_V + aspect * W_V)  # self-attention's, then cross-attention's
