"""Sizes of caches: the tables of the Slim attention paper, and counts beside real models and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, PreTrainedModel, WhisperConfig

from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.conversion.families import refusal
from hf_fastdecode.conversion.sizes import (
    CacheSize,
    checkpoint_caches,
    decoder_caches,
    decoder_matrices,
    empty_model,
    encoder_decoder_caches,
)
from hf_fastdecode.conversion.to_slim import to_slim

from ..patches.family_models import family_model
from ..patches.slim_models import TEXT
from ..test_layout import ROOT

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


TOKENS = 7
TABLES = ("embed_tokens.weight", "embed_positions.weight", "wte.weight", "wpe.weight")
"""Weights of embeddings, of which a step reads a row; heads of these models are no embeddings."""


@torch.no_grad()
def real_bytes(slim: PreTrainedModel) -> tuple[int, int]:
    """Bytes of the caches of `TOKENS` tokens, and of the matrices that a step reads."""
    cache = DynamicCache(config=slim.config)
    slim(TEXT[None, :TOKENS], **{CACHE: cache})
    matrices = (one for name, one in slim.state_dict().items() if one.dim() >= 2 and not name.endswith(TABLES))
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), sum(one.nbytes for one in matrices)


@pytest.mark.parametrize("name", ["phi3", "gpt2", "opt-350m", "gemma", "cohere-norm", "codegen"])
def test_slim_models(name: str) -> None:
    """Bytes of the caches of real slim models, and of the matrices that a step of these reads."""
    model = family_model(name)
    sizes = decoder_caches(model.config, TOKENS, torch.float32, decoder_matrices(model))
    shape = KVSizes.from_config(model.config).same
    width = shape.query_heads * shape.head_dim
    for size, rank in ((sizes[1], 0), (sizes[4], width // 8)):
        assert size.name == ("keys + d/8" if rank else "keys")
        assert (size.stored, size.matrices) == real_bytes(to_slim(model, TEXT, rank=rank))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}),
        ("t5", {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 24, "d_ff": 48}),
    ],
)
def test_encoder_decoders(model_type: str, fields: dict[str, int]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields, vocab_size=99)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        out = model(torch.arange(3, 14)[None], decoder_input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=True)
    parts = (out[CACHE].self_attention_cache, out[CACHE].cross_attention_cache)
    real = sum(layer.keys.nbytes + layer.values.nbytes for part in parts for layer in part.layers)
    ordinary, keys, on_chip, read, int8 = encoder_decoder_caches(config, TOKENS, 11, torch.float32, None)
    encoder = out.encoder_last_hidden_state
    assert (ordinary.stored, keys.stored) == (real, real // 2)
    assert on_chip.stored - on_chip.read == encoder.nbytes
    assert read.read == on_chip.read + 2 * encoder.nbytes, "both layers read it"
    assert real // 4 < int8.stored < real // 4 * 1.04
    assert ordinary.reads(1) is None, "without the number of weights"


@pytest.mark.parametrize("name", ["phi3", "gemma", "gpt2", "codegen"])
def test_slim_checkpoints(name: str) -> None:
    model = family_model(name)
    slim = to_slim(model, TEXT, plan=(("kv", 0), ("k+r", 5)) if name != "gpt2" else (("x", 0), ("k+r", 5)))
    kv = decoder_caches(model.config, TOKENS, torch.float32, decoder_matrices(model))[0]
    (size,) = checkpoint_caches(slim.config, TOKENS, None, torch.float32, kv)
    assert (size.stored, size.matrices) == real_bytes(slim)
    assert size.read == size.stored


CROSS = {"kv": ("k", "v"), "k": ("k",), "k+r": ("k", "slim.from_inputs"), "e": ()}
"""Projections that cross-attention reads once, for the encoder's output, and in no step."""


@pytest.mark.parametrize("plans", [("x", "k", "kv", "k+r"), ("k+r", "e", "x", "e"), ("k", "kv", "kv", "kv")], ids=str)
def test_slim_encoder_decoders(plans: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes, vocab_size=99)).eval()
    model.config.decoder_start_token_id = 0
    slim = to_slim(model, TEXT, plan=tuple((plan, 5 if plan == "k+r" else 0) for plan in plans))
    kv = encoder_decoder_caches(model.config, TOKENS, 11, torch.float32, decoder_matrices(model))[0]
    with torch.no_grad():
        out = slim(torch.arange(3, 14)[None], decoder_input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=True)
    parts = (out[CACHE].self_attention_cache, out[CACHE].cross_attention_cache)
    cached = sum(layer.keys.nbytes + layer.values.nbytes for part in parts for layer in part.layers)
    encoder = out.encoder_last_hidden_state.nbytes if "e" in plans else 0
    tensors = {f"decoder.{name}": one for name, one in slim.decoder.state_dict().items()}
    tensors["lm_head"] = slim.lm_head.weight
    once = tuple(
        f"decoder.block.{index}.layer.1.EncDecAttention.{name}."
        for index, plan in enumerate(plans[1::2])
        for name in CROSS[plan]
    )
    read = sum(
        one.nbytes
        for name, one in tensors.items()
        if one.dim() >= 2 and not name.startswith(once) and not name.endswith(("embed_tokens.weight", "bias.weight"))
    )
    found = checkpoint_caches(slim.config, TOKENS, 11, torch.float32, kv)
    assert {size.matrices for size in found} == {read}
    assert [(size.stored, size.read) for size in found] == (
        [(cached + encoder, cached), (cached + encoder, cached + 2 * encoder)] if encoder else [(cached, cached)]
    )


def test_grouped_cross_attention_has_no_option_1() -> None:
    """The encoder's output serves grouped heads too (section 7), beside keys and values of self-attention."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    module = {**heads, "hidden_size": 32, "intermediate_size": 48, "layer_types": ["full_attention"] * 2}
    config = AutoConfig.for_model("t5gemma", encoder=module, decoder=module | {"cross_attention_hidden_size": 32})
    sizes = {one.name: one for one in encoder_decoder_caches(config, TOKENS, 11, torch.float16, None)}
    assert list(sizes) == [
        "keys and values",
        "E on chip, keys and values",
        "E read, keys and values",
        "int8 keys and values",
    ]
    assert sizes["E on chip, keys and values"].read == TOKENS * 2 * 2 * 2 * 8 * 2
    assert sizes["keys and values"].stored == (TOKENS + 11) * 2 * 2 * 2 * 8 * 2


def test_refused_models_have_no_slim_caches() -> None:
    config = AutoConfig.for_model("llama", num_key_value_heads=8)
    assert "got 8 != 32" in (refusal(config) or "")
    assert [one.name for one in decoder_caches(config, 100, torch.float16, None)] == [
        "keys and values",
        "int8 keys and values",
    ]
