"""Models to measure: named shapes with random weights, which are as fast as trained ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..patches.slim_layers import SlimLayer

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
    "tiny-mha": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}


def random_model(
    shape: str, device: torch.device | str, dtype: torch.dtype, slim: SlimLayer | None = None
) -> PreTrainedModel:
    """A Llama of the named shape with random weights, in eval mode, that never stops by itself.

    Args:
        shape: One of `SHAPES`.
        device: Where its weights are.
        dtype: Of weights.
        slim: What each layer of a slim model caches; None for an ordinary model.

    Raises:
        ValueError: No such shape, or one that has no slim form.
    """
    import torch  # here, since the names of shapes are also read where its seconds would be lost
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..patches.architectures.slim_llama import SlimLlamaForCausalLM
    from ..patches.layers.slim_values import StoredMatrix
    from ..patches.slim_configs import SlimLlamaConfig

    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    fields = SHAPES[shape] | {"max_position_embeddings": MAX_POSITIONS, "pad_token_id": 0, "eos_token_id": None}
    config, model_class = LlamaConfig(**fields), LlamaForCausalLM
    if slim is not None:
        fields["slim_layers"] = [slim.to_dict()] * config.num_hidden_layers
        fields["slim_matrix_dtype"] = "float16" if dtype.itemsize == 2 else "float32"  # as in conversion
        config, model_class = SlimLlamaConfig(**fields), SlimLlamaForCausalLM
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(config)
    finally:
        torch.set_default_dtype(previous)
    for module in model.modules():
        if isinstance(module, StoredMatrix):  # a buffer, which no initialization fills
            module.values.normal_(std=len(module.values) ** -0.5)
    return model.eval()


def parameters(shape: str) -> int:
    """Weights of a named shape; none are made."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
    return sum(parameter.numel() for parameter in model.parameters())
