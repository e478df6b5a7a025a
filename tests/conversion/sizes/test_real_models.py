"""Counted sizes beside those of real models and caches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache

from hf_fastdecode.cache.accounting import KVShape
from hf_fastdecode.conversion.checkpoint.in_memory import to_slim
from hf_fastdecode.conversion.sizes.decoder import decoder_caches, refusal
from hf_fastdecode.conversion.sizes.encoder_decoder import encoder_decoder_caches
from hf_fastdecode.conversion.sizes.matrices import decoder_matrices

from ...patches.family_models import family_model
from ...patches.slim_models import TEXT

TOKENS = 7


@pytest.mark.parametrize("name", ["phi3", "gpt2", "opt-350m", "gemma", "cohere-norm", "codegen"])
def test_slim_models(name: str) -> None:
    """Bytes of the caches of real slim models, and of the matrices that a step of these reads."""
    model = family_model(name)
    sizes = decoder_caches(model.config, TOKENS, torch.float32, decoder_matrices(model))
    shape = KVShape.from_config(model.config)
    width = shape.query_heads * shape.head_dim
    for size, rank in ((sizes[1], 0), (sizes[4], width // 8)):
        assert size.name == ("keys + d/8" if rank else "keys")
        slim = to_slim(model, TEXT, rank=rank)
        cache = DynamicCache(config=slim.config)
        with torch.no_grad():
            slim(TEXT[None, :TOKENS], past_key_values=cache)
        assert size.stored == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        tensors = {name: one for name, one in slim.state_dict().items() if one.dim() >= 2}
        tables = ("embed_tokens.weight", "embed_positions.weight", "wte.weight", "wpe.weight")
        read = sum(one.nbytes for name, one in tensors.items() if not name.endswith(tables))
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
    parts = (out.past_key_values.self_attention_cache, out.past_key_values.cross_attention_cache)
    real = sum(layer.keys.nbytes + layer.values.nbytes for part in parts for layer in part.layers)
    ordinary, keys, on_chip, read, int8 = encoder_decoder_caches(config, TOKENS, 11, torch.float32, None)
    encoder = out.encoder_last_hidden_state
    assert (ordinary.stored, keys.stored) == (real, real // 2)
    assert on_chip.stored - on_chip.read == encoder.nbytes
    assert read.read == on_chip.read + 2 * encoder.nbytes, "both layers read it"
    assert real // 4 < int8.stored < real // 4 * 1.04
    assert ordinary.reads(1) is None, "without the number of weights"


def test_grouped_cross_attention_has_no_option_1() -> None:
    """The encoder's output serves grouped heads too (section 7), beside keys and values of self-attention."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    module = {**heads, "hidden_size": 32, "intermediate_size": 48, "layer_types": ["full_attention"] * 2}
    config = AutoConfig.for_model("t5gemma", encoder=module, decoder=module | {"cross_attention_hidden_size": 32})
    sizes = {one.name: one for one in encoder_decoder_caches(config, TOKENS, 11, torch.float16, None)}
    assert list(sizes) == ["keys and values", "E on chip, keys and values", "E read, keys and values", "int8"]
    assert sizes["E on chip, keys and values"].read == TOKENS * 2 * 2 * 2 * 8 * 2
    assert sizes["keys and values"].stored == (TOKENS + 11) * 2 * 2 * 2 * 8 * 2


def test_refused_models_have_no_slim_caches() -> None:
    config = AutoConfig.for_model("llama", num_key_value_heads=8)
    assert "got 8 != 32" in (refusal(config) or "")
    assert [one.name for one in decoder_caches(config, 100, torch.float16, None)] == ["keys and values", "int8"]
