"""Counted sizes beside those of real models and caches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache

from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.conversion.sizes.model_caches import (
    decoder_caches,
    decoder_matrices,
    encoder_decoder_caches,
    refusal,
)
from hf_fastdecode.conversion.sizes.slim_checkpoint import checkpoint_caches
from hf_fastdecode.conversion.to_slim import to_slim

from ...patches.family_models import family_model
from ...patches.slim_models import TEXT

TOKENS = 7
TABLES = ("embed_tokens.weight", "embed_positions.weight", "wte.weight", "wpe.weight")
"""Weights of embeddings, of which a step reads a row; heads of these models are no embeddings."""


@pytest.mark.parametrize("name", ["phi3", "gpt2", "opt-350m", "gemma", "cohere-norm", "codegen"])
def test_slim_models(name: str) -> None:
    """Bytes of the caches of real slim models, and of the matrices that a step of these reads."""
    model = family_model(name)
    sizes = decoder_caches(model.config, TOKENS, torch.float32, decoder_matrices(model))
    shape = KVSizes.from_config(model.config).same
    width = shape.query_heads * shape.head_dim
    for size, rank in ((sizes[1], 0), (sizes[4], width // 8)):
        assert size.name == ("keys + d/8" if rank else "keys")
        slim = to_slim(model, TEXT, rank=rank)
        cache = DynamicCache(config=slim.config)
        with torch.no_grad():
            slim(TEXT[None, :TOKENS], **{CACHE: cache})
        assert size.stored == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        tensors = {name: one for name, one in slim.state_dict().items() if one.dim() >= 2}
        read = sum(one.nbytes for name, one in tensors.items() if not name.endswith(TABLES))
        assert size.matrices == read


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
    cache = DynamicCache(config=slim.config)
    with torch.no_grad():
        slim(TEXT[None, :TOKENS], **{CACHE: cache})
    assert size.stored == size.read == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    tensors = {name: one for name, one in slim.state_dict().items() if one.dim() >= 2}
    assert size.matrices == sum(one.nbytes for name, one in tensors.items() if not name.endswith(TABLES))


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
