"""Models to measure: named shapes with random weights, which are as fast as trained ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MAX_POSITIONS = 131072
"""Of every named shape."""

SHAPES: dict[str, dict[str, Any]] = {
    # CodeLlama-7B's
    "7b-mha": {
        "vocab_size": 32016,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    # Mistral-7B's
    "7b-gqa": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    # Llama-3.1-8B's
    "8b-gqa": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    # CodeLlama-13B's
    "13b-mha": {
        "vocab_size": 32016,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    # Llama-3.2-1B's
    "1b-gqa": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def random_model(shape: str, device: torch.device | str, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama of the named shape with random weights, in eval mode, that never stops by itself.

    Raises:
        ValueError: No such shape.
    """
    import torch  # here, since the names of shapes are also read where its seconds would be lost
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=MAX_POSITIONS, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    return model.eval()


def parameters(shape: str) -> int:
    """Weights of a named shape; none are made."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
    return sum(parameter.numel() for parameter in model.parameters())
