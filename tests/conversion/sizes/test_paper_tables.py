"""The tables of the Slim attention paper, from configs; its numbers are in activations and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, WhisperConfig

from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.conversion.sizes.model_caches import (
    CacheSize,
    decoder_caches,
    decoder_matrices,
    empty_model,
    encoder_decoder_caches,
    refusal,
)

from ...test_layout import ROOT

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
    self_kv = KVSizes.of_decoder(config).kv_bytes(1, 448, 0, NUMBER).stock
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


def sized(hidden_size: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Fields of a multi-head decoder's config, Llama's unless a model type is given."""
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "llama", **sizes, "num_key_value_heads": heads, **more}


def whole(model_type: str, language: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": model_type, "text_config": language}


def t5(d_model: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": d_model, "num_layers": layers, "num_heads": heads, "d_kv": 64}
    return {"model_type": "t5", **sizes, **more}


def whisper(name: str) -> dict[str, Any]:
    layers, d, heads = WHISPER[name]
    return {"model_type": "whisper", "d_model": d, "decoder_layers": layers, "decoder_attention_heads": heads}


CHRONOS = {"chronos_config": {"input_patch_size": 16}}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}

# Table 1: config, context (of encoder-decoders the encoder's too), activations of the KV cache, and why there is no
# slim form. The paper counts self-attention alone for T5.
TABLE_1: dict[str, tuple[dict[str, Any], tuple[int, ...], str, str | None]] = {
    "CodeLlama-7B": (sized(4096, 32, 32), (16384,), "4.3B", None),
    "CodeLlama-13B": (sized(5120, 40, 40), (16384,), "6.7B", None),
    "CodeGemma-7B": (sized(3072, 28, 16, head_dim=256, model_type="gemma"), (8192,), "1.9B", None),
    "aya-23-35B": (sized(8192, 40, 64, model_type="cohere"), (8192,), "5.4B", None),
    "SmolLM2-1.7B": (sized(2048, 24, 32), (8192,), "0.8B", None),
    "SmolVLM": (whole("idefics3", sized(2048, 24, 32)), (16384,), "1.6B", None),
    "Phi-3-mini-128k": (
        sized(3072, 32, 32, model_type="phi3", pad_token_id=0, rope_parameters=LONGROPE),
        (131072,),
        "25.8B",
        None,
    ),
    "bitnet_b1_58-3B": (sized(3200, 26, 32, model_type="bitnet"), (2048,), "0.3B", "round their inputs and weights"),
    "OLMo-1B": (sized(2048, 16, 16, model_type="olmo"), (4096,), "0.3B", None),
    "OLMo-2-1124-7B": (sized(4096, 32, 32, model_type="olmo2"), (4096,), "1.1B", None),
    "OLMo-2-1124-13B": (sized(5120, 40, 40, model_type="olmo2"), (4096,), "1.7B", None),
    "Chronos-Bolt-tiny": (t5(256, 4, 4, **CHRONOS), (512, 0), "1M", "one pass for each forecast"),
    "Chronos-Bolt-base": (t5(768, 12, 12, **CHRONOS), (512, 0), "9.4M", "one pass for each forecast"),
    "Qwen2-Audio-7B": (whole("qwen2_audio", sized(4096, 32, 32, model_type="qwen2")), (8192,), "2.1B", None),
    "llava-NeXT-video-7B": (whole("llava_next_video", sized(4096, 32, 32)), (4096,), "1.1B", None),
    "llava-v1.6-vicuna-13B": (whole("llava_next", sized(5120, 40, 40)), (4096,), "1.7B", None),
    "Vicuna-7B-v1.5-16k": (sized(4096, 32, 32), (16384,), "4.3B", None),
    "Vicuna-13B-v1.5-16k": (sized(5120, 40, 40), (16384,), "6.7B", None),
    "Flan-T5-base": (t5(768, 12, 12), (512, 0), "9.4M", None),
    "Flan-T5-XXL": (t5(4096, 24, 64), (512, 0), "101M", None),
    "Whisper-tiny": (whisper("tiny"), (448, 1500), "6M", None),
    "Whisper-small": (whisper("small"), (448, 1500), "36M", None),
    "Whisper-large-v3": (whisper("large"), (448, 1500), "160M", None),
    "GPT-2 XL": ({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}, (1024,), "157M", None),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1(name: str) -> None:
    """Every model's KV cache, and its slim form or the reason why there is none; the page names those without."""
    fields, contexts, expected, reason = TABLE_1[name]
    config = AutoConfig.for_model(**fields)
    if len(contexts) == 2:
        ordinary = encoder_decoder_caches(config, *contexts, torch.float16, None)[0]
    else:
        ordinary = decoder_caches(config, *contexts, torch.float16, None)[0]
    numbers, unit = ordinary.stored / NUMBER / {"B": 1e9, "M": 1e6}[expected[-1]], expected[-1]
    assert f"{numbers:.{1 if '.' in expected else 0}f}{unit}" == expected
    found = refusal(config)
    assert (found is None) == (reason is None)
    if found is not None and reason is not None:
        assert reason in found
        page = (ROOT / "docs" / "slim-architectures.md").read_text(encoding="utf-8")
        assert name.removesuffix("-tiny").removesuffix("-base") in page


@pytest.mark.parametrize(("d_kv", "heads", "aspect"), [(128, 32, 4), (128, 128, 16)], ids=["T5-3B", "T5-11B"])
def test_inputs_are_twice_the_aspect_ratio_smaller(d_kv: int, heads: int, aspect: int) -> None:
    """Section 6: for e = r d, a cache of inputs is 2 r times smaller than keys and values, and W_KV is r times W_V."""
    config = AutoConfig.for_model("t5", d_model=1024, d_kv=d_kv, num_heads=heads, d_ff=2048, num_layers=2)
    found = encoder_decoder_caches(config, 512, 512, torch.float16, decoder_matrices(empty_model(config)))
    sizes = by_name(found)
    self_kv = KVSizes.of_decoder(config).kv_bytes(1, 512, 0, NUMBER).stock
    assert self_kv / sizes["E on chip, inputs"].read == 2 * aspect
    ordinary, keys = sizes["keys and values"].matrices, sizes["keys (option 1)"].matrices
    assert ordinary is not None and keys is not None
    W_V = 1024 * heads * d_kv * NUMBER
    assert keys - ordinary == 2 * ((aspect - 1) * W_V + aspect * W_V)  # self-attention's, then cross-attention's
