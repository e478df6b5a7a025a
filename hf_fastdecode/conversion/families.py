"""Families of convertible models, found by config, and the configs of their slim and ordinary models.

Of multimodal models the language model is converted. transformers makes it from a ``text_config`` by the Auto
classes, so a slim multimodal model is of the ordinary class, with a slim config as its ``text_config``.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from hf_fastdecode.patches import encoder_decoder_configs, slim_configs
from hf_fastdecode.patches.config_base import families_in

from ..patches.layers.family import Family, language_config
from .fit.layer_plan import dtype_name
from .fit.value_coordinates import matrix_dtype

SLIM: Final = "slim_"
"""Prefix of slim configs' model types and of their additional fields."""

FAMILIES: Final = families_in(slim_configs)
"""Model types of decoder-only models, each with a file among the slim architectures."""

ENCODER_DECODERS: Final = families_in(encoder_decoder_configs)
"""Model types of encoder-decoder models, each with a file among the slim architectures."""

MULTIMODAL: Final = {
    "llava": "model.language_model.",
    "llava_next": "model.language_model.",
    "llava_next_video": "model.language_model.",
    "idefics3": "model.text_model.",
    "smolvlm": "model.text_model.",
    "qwen2_audio": "model.language_model.",
}
"""Model types of multimodal models, with the prefix of the language model's weights."""

_ARCHITECTURES: Final = "hf_fastdecode.patches.architectures"
_NEVER: Final = {
    "bitnet": "projections of bitnet round their inputs and weights, so that values are no linear function of keys"
}
"""Model types that cannot have a slim form, with the reason."""


def family_of(config: Any) -> Family:
    """The family of an ordinary model's config; ValueError where models of this config have no slim form."""
    if (reason := refusal(config)) is not None:
        raise ValueError(reason)
    family = _load(language_config(config).model_type)
    return multimodal_family(config, family) if config.model_type in MULTIMODAL else family


def refusal(config: Any) -> str | None:
    """Why models of an ordinary config have no slim form, or None."""
    model_type, known = config.model_type, (*FAMILIES, *ENCODER_DECODERS, *MULTIMODAL)
    rope = (getattr(language_config(config), "rope_parameters", None) or {}).get("rope_type", "default")
    if is_slim(config):
        return (
            "the model is slim already; for another slim form convert the ordinary model, which a conversion with "
            '`format="full"` gives back'
        )
    if model_type in _NEVER:
        return f"{_NEVER[model_type]}; keep it as it is"
    if model_type not in known:
        return f"there is no slim form of {model_type} models so far, only of {', '.join(known)}; keep it as it is"
    if getattr(config, "quantization_config", None):
        return (
            "the checkpoint is quantised, and values cannot be solved for from rounded weights; convert the original "
            "in float16 or bfloat16, and quantise the result"
        )
    if model_type in MULTIMODAL:
        if (language := config.text_config.model_type) in ENCODER_DECODERS:
            return (
                f"the language model of this {model_type} has an encoder ({language}); only decoders are converted in "
                "multimodal models"
            )
        if rope == "longrope":
            return (
                f"RoPE of type {rope!r} changes with the length of the text, and multimodal models then keep keys of "
                "both frequencies in the cache, which a slim one cannot; convert models with fixed frequencies"
            )
        return refusal(config.text_config)
    heads = config.num_attention_heads
    if (kv_heads := getattr(config, "num_key_value_heads", None) or heads) != heads:
        return (
            "a cache of keys alone needs num_key_value_heads == num_attention_heads, got "
            f"{kv_heads} != {heads}: keys do not determine the values of grouped-query attention; an int8 KV "
            "cache may serve this model better"
        )
    family = _load(model_type)
    if rope == "dynamic" or (rope == "longrope" and not family.longrope):
        return (
            f"RoPE of type {rope!r} changes with the length of the text, and keys cached before it would change with "
            "it; convert models with fixed frequencies (default, linear, llama3, yarn)"
        )
    if family.has_encoder and not config.is_encoder_decoder:
        return f"{model_type} without its encoder (is_encoder_decoder) has no slim form; convert the whole model"
    return family.refusal(config)


def family_of_slim(config: Any) -> tuple[str, Family]:
    """The ordinary (language) model type and the family of a slim config; ValueError where it is not slim."""
    if not is_slim(config):
        raise ValueError(f"the model is not slim but of type {config.model_type}; it is full already")
    name = language_config(config).model_type.removeprefix(SLIM)
    family = _load(name)
    if config.model_type in MULTIMODAL:
        family = multimodal_family(config, family)
    return name, family


def is_slim(config: Any) -> bool:
    kind: str = (language_config(config) if config.model_type in MULTIMODAL else config).model_type
    return kind.startswith(SLIM)


def _load(model_type: str) -> Family:
    family: Family = import_module(f"{_ARCHITECTURES}.{SLIM}{model_type}").FAMILY
    return family


def multimodal_family(config: Any, language: Family) -> Family:
    """The family of a multimodal model, ordinary or slim, from that of its language model."""
    model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    language_prefix, prefix = f"{language.slim_model.base_model_prefix}.", MULTIMODAL[config.model_type]
    return replace(
        language,
        architecture=model.__name__,
        slim_model=model,
        embedding=prefix + language.embedding.removeprefix(language_prefix),
        layers=prefix + language.layers.removeprefix(language_prefix),
        renamed={},
        auto=AutoModelForMultimodalLM,
    )


def require_rope(family: Family, config: Any, rope: str) -> None:
    """Refuse, before layers are measured, a `slim_rope` that the slim model's config would refuse."""
    family.slim_config(**_ordinary_fields(config), slim_rope=rope)


def slim_config(family: Family, config: Any, entries: list[dict[str, Any]], dtype: torch.dtype, rope: str) -> Any:
    """The config of a slim model: an ordinary one's fields, and what each layer caches."""
    slim = {"slim_layers": entries, "slim_matrix_dtype": dtype_name(matrix_dtype(dtype)), "slim_rope": rope}
    made = family.slim_config(**_ordinary_fields(config), **slim)
    return _complete(config, made, family.slim_model.__name__, dtype)


def full_config(family: Family, config: Any, model_type: str, dtype: torch.dtype) -> Any:
    """The config of an ordinary model, of a slim one's; `model_type` as `family_of_slim` gives it."""
    made = AutoConfig.for_model(model_type, **_ordinary_fields(config))
    return _complete(config, made, family.architecture, dtype)


def ordinary_config(config: Any) -> Any:
    """The config of the ordinary model that a slim one stands for; ValueError where it is not slim."""
    model_type, family = family_of_slim(config)
    return full_config(family, config, model_type, config.dtype)


def untied(config: Any) -> Any:
    """Mark a config as of a model whose tied tensors differ, such as a head that was trained separately.

    T5's stays tied when it is loaded, as transformers ties its embeddings in any case, and its head where it is equal.
    """
    for part in (config, language_config(config)):
        part.tie_word_embeddings = False
    return config


def _complete(config: Any, language: Any, architecture: str, dtype: torch.dtype) -> Any:
    """The config of a whole model, from that of its language model; the two differ in multimodal models only."""
    made = language
    if config.model_type in MULTIMODAL:
        made = deepcopy(config)
        made.text_config = language
        for part in made.sub_configs:
            getattr(made, part).dtype = dtype
    made.architectures = [architecture]
    made.dtype = dtype
    return made


def _ordinary_fields(config: Any) -> dict[str, Any]:
    """Fields of an ordinary language model's config, from a whole model's, ordinary or slim."""
    out = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "_name_or_path")
    fields: dict[str, Any] = language_config(config).to_dict()
    return {name: one for name, one in fields.items() if name not in out and not name.startswith(SLIM)}
