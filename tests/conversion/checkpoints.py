"""A tiny multi-head checkpoint with the embedded tokenizer, in several shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_fastdecode.assets import MODEL_PATH

from ..tiny_models import redrawn

LAYERS = 3
VOCABULARY = len(AutoTokenizer.from_pretrained(MODEL_PATH))


def save_multi_head(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write it: 3 layers, 4 heads, 32 inputs."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model = redrawn(LlamaForCausalLM(LlamaConfig(**{**fields, **overrides})), 0.2)
    return saved(model.to(dtype), folder, max_shard_size="100KB")


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save a model, beside the embedded tokenizer, and return the folder."""
    model.save_pretrained(folder, **options)
    AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def loaded(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    """Load a model, in eval mode, none of whose tensors are missing, unknown or of another shape."""
    model, found = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()
