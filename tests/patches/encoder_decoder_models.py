"""Tiny encoder-decoder models, what they read, and their slim forms."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.to_slim import to_slim

from ..tiny_models import VOCABULARY, ragged_prompts
from .slim_models import TEXT

_T5 = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 2}
_LAYERS = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5),
    # 128 coordinates of keys for 48 inputs, as in T5-3B and T5-11B, in the form of T5 v1.1
    "t5-wide": ("t5", {**_T5, "d_model": 48, "num_heads": 8, "feed_forward_proj": "gated-gelu"}),
    # 32 for 64, as in Flan-T5-small: keys do not determine values
    "t5-narrow": ("t5", {**_T5, "num_heads": 2, "tie_word_embeddings": False}),
    "bart": (
        "bart",
        {**_LAYERS, "encoder_attention_heads": 2, "decoder_attention_heads": 4, "max_position_embeddings": 256},
    ),
    "whisper": (
        "whisper",
        {
            **_LAYERS,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_mel_bins": 8,
            "max_source_positions": 24,
            "max_target_positions": 256,
        },
    ),
}
"""Name -> model type and config arguments."""

PLANS: dict[str, Any] = {
    "k": "k",
    "k+r": (("k+r", 4), ("k+r", 9), ("k+r", 1), ("k+r", 2)),
    "x": "x",
    "e": "e",
    "mixed": (("x", 0), ("k", 0), ("kv", 0), ("k+r", 3)),
}
"""Plans of two layers' self-attention and cross-attention, in turns."""

PAIRS = [(name, plan) for name in MODELS for plan in PLANS if name != "t5-narrow" or plan == "x"]


def encoder_decoder(name: str, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode, none of whose biases and norms could be left out unnoticed."""
    model_type, arguments = MODELS[name]
    torch.manual_seed(0)
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fields = {**special, "decoder_start_token_id": 3, **arguments, **overrides}
    config = AutoConfig.for_model(model_type, **fields)
    model: PreTrainedModel = family_of(config).auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
        for buffer in model.buffers():  # BART's bias of the logits
            buffer.normal_(std=0.5)
    for field in ("eos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "suppress_tokens", "max_length"):
        setattr(model.generation_config, field, None)
        if hasattr(model.config, field):  # Whisper's `generate` reads its config too
            setattr(model.config, field, None)
    return model


@lru_cache
def encoder_decoder_pair(name: str, plan: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """An ordinary model in fp32 and its slim form; not to be changed."""
    model = encoder_decoder(name)
    return model, to_slim(model, TEXT, plan=PLANS[plan])


def read_by(model: PreTrainedModel, rows: int = 2) -> dict[str, Tensor]:
    """Padded texts of different lengths, or features."""
    if model.main_input_name == "input_features":
        config, generator = model.config, torch.Generator().manual_seed(1)
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator).to(model.dtype)}
    return ragged_prompts(*range(9, 9 + 11 * rows, 11))


def cached_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of self-attention's and of cross-attention's cache."""
    parts = (cache.self_attention_cache, cache.cross_attention_cache)
    self_bytes, cross_bytes = (
        sum(layer.keys.nbytes + layer.values.nbytes for layer in part.layers if layer.keys is not None)
        for part in parts
    )
    return self_bytes, cross_bytes
