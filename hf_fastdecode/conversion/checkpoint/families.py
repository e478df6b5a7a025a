"""Architectures that can be converted: what differs between them, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from hf_fastdecode.patches.slim_llama import SlimLlamaForCausalLM
from hf_fastdecode.patches.slim_llama_config import SlimLlamaConfig

from ..rope import Rotation
from ..weights import AttentionWeights


class UnconvertibleError(ValueError):
    """A model that has no slim form, with the reason."""


@dataclass(frozen=True)
class Family:
    """A family of architectures.

    Attributes:
        architecture: Class of the ordinary models, as in ``config.architectures``.
        slim_model: Class of the slim models.
        slim_config: Class of their configs, which takes all fields of the ordinary ones.
        decoder_layer: Makes one layer, of a config and an index.
        rotary: Makes the tables of positions, of a config.
        embedding: Name of the embedding's weight.
        layers: Prefix of the layers' weights, before the index.
        attention: Of a layer, before the projections' names.
    """

    architecture: str
    slim_model: type
    slim_config: type
    decoder_layer: type[nn.Module]
    rotary: type[nn.Module]
    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers."
    attention: str = "self_attn."

    def layer_prefix(self, index: int) -> str:
        """Of all weights of a layer."""
        return f"{self.layers}{index}."


FAMILIES: Final = {
    "llama": Family("LlamaForCausalLM", SlimLlamaForCausalLM, SlimLlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding)
}
"""By the model type of ordinary configs."""

_FROM_SLIM: Final = {family.slim_config.model_type: name for name, family in FAMILIES.items()}  # type: ignore[attr-defined]


def family_of(config: Any) -> Family:
    """The family of an ordinary model's config.

    Raises:
        UnconvertibleError: Models of this config have no slim form.
    """
    model_type = config.model_type
    if model_type in _FROM_SLIM:
        raise UnconvertibleError("the model is slim already; --format full makes an ordinary one of it")
    if (family := FAMILIES.get(model_type)) is None:
        raise UnconvertibleError(
            f"there is no slim form of {model_type} models so far, only of {', '.join(FAMILIES)}; keep it as it is"
        )
    if getattr(config, "quantization_config", None):
        raise UnconvertibleError(
            "the checkpoint is quantised, and values cannot be solved for from rounded weights; convert the original "
            "in float16 or bfloat16, and quantise the result"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads != kv_heads:
        raise UnconvertibleError(
            f"a cache of keys alone needs num_key_value_heads == num_attention_heads, got {kv_heads} != {heads}: keys "
            "do not determine the values of grouped-query attention; an int8 KV cache may serve this model better"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise UnconvertibleError(
            f"RoPE of type {rope!r} changes with the length of the text, and keys cached before it would change with "
            "it; convert models with fixed frequencies (default, linear, llama3, yarn)"
        )
    return family


def family_of_slim(config: Any) -> tuple[str, Family]:
    """The ordinary model type and the family of a slim model's config.

    Raises:
        UnconvertibleError: The model is not slim.
    """
    if config.model_type not in _FROM_SLIM:
        raise UnconvertibleError(f"the model is no slim one but of type {config.model_type}; it is full already")
    name = _FROM_SLIM[config.model_type]
    return name, FAMILIES[name]


def attention_weights(config: Any, tensors: Mapping[str, Tensor]) -> AttentionWeights:
    """The projections of a layer.

    Args:
        config: Of the model.
        tensors: By their names below the layer's attention, such as ``q_proj.weight``.
    """
    return AttentionWeights(
        query=tensors["q_proj.weight"],
        key=tensors["k_proj.weight"],
        value=tensors["v_proj.weight"],
        output=tensors["o_proj.weight"],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        query_bias=tensors.get("q_proj.bias"),
        key_bias=tensors.get("k_proj.bias"),
        value_bias=tensors.get("v_proj.bias"),
        output_bias=tensors.get("o_proj.bias"),
    )


def rotation_of(rotary: nn.Module, tokens: int) -> Rotation:
    """RoPE of tokens 0, 1, ..., in fp32 tables."""
    cos, sin = rotary(torch.empty(0), torch.arange(tokens)[None])
    return Rotation.from_repeated(cos[0], sin[0])


def slim_config(
    family: Family, config: Any, entries: list[dict[str, Any]], dtype: torch.dtype, matrix: torch.dtype
) -> Any:
    """The config of a slim model: an ordinary one's fields, and what each layer caches."""
    fields = config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path"):
        fields.pop(name, None)
    made = family.slim_config(**fields, slim_layers=entries, slim_matrix_dtype=str(matrix).removeprefix("torch."))
    made.architectures = [family.slim_model.__name__]
    made.dtype = dtype
    return made
