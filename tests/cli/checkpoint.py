"""A tiny random model with the embedded tokenizer, as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_fastdecode.assets import MODEL_PATH

MAX_POSITIONS = 1024


def save_checkpoint(folder: Path) -> Path:
    """Write the checkpoint, with sampling defaults that the commands must not use."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, repetition_penalty=1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def embed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a checkpoint in the place of the embedded model."""
    monkeypatch.setattr("hf_fastdecode.assets.MODEL_PATH", checkpoint)
    monkeypatch.setattr("hf_fastdecode.model_names.MODEL_PATH", checkpoint)
