"""Convertible architectures, one file each, and the models that are refused."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import torch

from ..encoder_decoder.architecture import EncoderDecoder
from ..family import Family, kv_heads

FAMILIES: Final = ("llama", "phi3", "olmo", "olmo2", "gpt_neox", "gpt2", "opt", "qwen2", "gemma", "cohere", "codegen")
"""Model types of ordinary configs, and files of this folder."""

ENCODER_DECODERS: Final = ("t5", "bart", "whisper")
"""Model types with an encoder and a decoder, likewise files of this folder."""

_SLIM: Final = "slim_"


class UnconvertibleError(ValueError):
    """A model that has no slim form, with the reason."""


def family_of(config: Any) -> Family | EncoderDecoder:
    """The family of an ordinary model's config.

    Raises:
        UnconvertibleError: Models of this config have no slim form.
    """
    model_type = config.model_type
    if model_type.removeprefix(_SLIM) != model_type:
        raise UnconvertibleError("the model is slim already; --format full makes an ordinary one of it")
    if model_type not in (*FAMILIES, *ENCODER_DECODERS):
        known = ", ".join((*FAMILIES, *ENCODER_DECODERS))
        raise UnconvertibleError(
            f"there is no slim form of {model_type} models so far, only of {known}; keep it as it is"
        )
    if getattr(config, "quantization_config", None):
        raise UnconvertibleError(
            "the checkpoint is quantised, and values cannot be solved for from rounded weights; convert the original "
            "in float16 or bfloat16, and quantise the result"
        )
    if (heads := config.num_attention_heads) != kv_heads(config):
        raise UnconvertibleError(
            "a cache of keys alone needs num_key_value_heads == num_attention_heads, got "
            f"{kv_heads(config)} != {heads}: keys do not determine the values of grouped-query attention; an int8 KV "
            "cache may serve this model better"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise UnconvertibleError(
            f"RoPE of type {rope!r} changes with the length of the text, and keys cached before it would change with "
            "it; convert models with fixed frequencies (default, linear, llama3, yarn)"
        )
    family = _load(model_type)
    if reason := family.refusal(config):
        raise UnconvertibleError(reason)
    return family


def require_rope(family: Family | EncoderDecoder, rope: str) -> None:
    """Refuse to cache keys after RoPE where there is none.

    Args:
        family: Of the model.
        rope: ``raw`` or ``unrotate``.

    Raises:
        UnconvertibleError: It is ``unrotate``, and the family has no RoPE.
    """
    if rope == "unrotate" and (isinstance(family, EncoderDecoder) or family.rotary is None):
        raise UnconvertibleError(
            f"rope 'unrotate' caches keys after RoPE, and {family.architecture} has none; leave it out"
        )


def family_of_slim(config: Any) -> tuple[str, Family | EncoderDecoder]:
    """The ordinary model type and the family of a slim model's config.

    Raises:
        UnconvertibleError: The model is not slim.
    """
    name = config.model_type.removeprefix(_SLIM)
    if name == config.model_type:
        raise UnconvertibleError(f"the model is no slim one but of type {config.model_type}; it is full already")
    return name, _load(name)


def _load(model_type: str) -> Family | EncoderDecoder:
    family: Family | EncoderDecoder = import_module(f".{model_type}", __name__).FAMILY
    return family


def slim_config(
    family: Family | EncoderDecoder,
    config: Any,
    entries: list[dict[str, Any]],
    dtype: torch.dtype,
    matrix: torch.dtype,
    rope: str,
) -> Any:
    """The config of a slim model: an ordinary one's fields, and what each layer caches."""
    slim = {"slim_layers": entries, "slim_matrix_dtype": str(matrix).removeprefix("torch."), "slim_rope": rope}
    made = family.slim_config(**full_fields(config), **slim)
    made.architectures = [family.slim_model.__name__]
    made.dtype = dtype
    return made


def full_fields(config: Any) -> dict[str, Any]:
    """Fields of an ordinary model's config, of its own one or of a slim model's."""
    own = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "_name_or_path")
    fields: dict[str, Any] = config.to_dict()
    return {name: one for name, one in fields.items() if name not in own and not name.startswith(_SLIM)}
