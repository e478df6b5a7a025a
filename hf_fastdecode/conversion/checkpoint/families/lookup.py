"""Find the family of a model by its config, or the reason why the model cannot be converted."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from hf_fastdecode.patches import encoder_decoder_configs, slim_configs
from hf_fastdecode.patches.config_base import families_in

from ....patches.layers.encoder_decoder import EncoderDecoder
from ....patches.layers.family import Family, kv_heads, language_config
from .multimodal import MULTIMODAL, multimodal_family

SLIM: Final = "slim_"
"""How model types of slim configs begin, and names of their own fields."""

FAMILIES: Final = families_in(slim_configs)
"""Model types of ordinary configs, each with a file among the slim architectures."""

ENCODER_DECODERS: Final = families_in(encoder_decoder_configs)
"""Model types with an encoder and a decoder, likewise."""

_ARCHITECTURES: Final = "hf_fastdecode.patches.architectures"
_NEVER: Final = {
    "bitnet": "projections of bitnet round their inputs and weights, so that values are no linear function of keys",
}
"""Model types that cannot have a slim form, with the reason."""


class UnconvertibleError(ValueError):
    """A model that has no slim form, with the reason."""


def family_of(config: Any) -> Family | EncoderDecoder:
    """The family of an ordinary model's config.

    Raises:
        UnconvertibleError: Models of this config have no slim form.
    """
    model_type = config.model_type
    if is_slim(config):
        raise UnconvertibleError(
            "the model is slim already; for another slim form convert the ordinary model, which a conversion with "
            '`format="full"` gives back'
        )
    if model_type in _NEVER:
        raise UnconvertibleError(f"{_NEVER[model_type]}; keep it as it is")
    if model_type not in (*FAMILIES, *ENCODER_DECODERS, *MULTIMODAL):
        known = ", ".join((*FAMILIES, *ENCODER_DECODERS, *MULTIMODAL))
        raise UnconvertibleError(
            f"there is no slim form of {model_type} models so far, only of {known}; keep it as it is"
        )
    if getattr(config, "quantization_config", None):
        raise UnconvertibleError(
            "the checkpoint is quantised, and values cannot be solved for from rounded weights; convert the original "
            "in float16 or bfloat16, and quantise the result"
        )
    if model_type in MULTIMODAL:
        language = family_of(language_config(config))
        if not isinstance(language, Family):
            raise UnconvertibleError(
                f"the language model of this {model_type} has an encoder ({config.text_config.model_type}); "
                "only decoders are converted in multimodal models"
            )
        if (rope := _rope_type(language_config(config))) == "longrope":
            raise UnconvertibleError(
                f"RoPE of type {rope!r} changes with the length of the text, and multimodal models then keep keys of "
                "both frequencies in the cache, which a slim one cannot; convert models with fixed frequencies"
            )
        return multimodal_family(config, language)
    if (heads := config.num_attention_heads) != kv_heads(config):
        raise UnconvertibleError(
            "a cache of keys alone needs num_key_value_heads == num_attention_heads, got "
            f"{kv_heads(config)} != {heads}: keys do not determine the values of grouped-query attention; an int8 KV "
            "cache may serve this model better"
        )
    family = _load(model_type)
    rope = _rope_type(config)
    if rope == "dynamic" or (rope == "longrope" and not getattr(family, "longrope", False)):
        raise UnconvertibleError(
            f"RoPE of type {rope!r} changes with the length of the text, and keys cached before it would change with "
            "it; convert models with fixed frequencies (default, linear, llama3, yarn)"
        )
    if reason := family.refusal(config):
        raise UnconvertibleError(reason)
    return family


def _rope_type(config: Any) -> str:
    kind: str = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return kind


def family_of_slim(config: Any) -> tuple[str, Family | EncoderDecoder]:
    """The ordinary model type, of a multimodal model that of its language model, and the family of a slim config.

    Raises:
        UnconvertibleError: The model is not slim.
    """
    if not is_slim(config):
        raise UnconvertibleError(f"the model is not slim but of type {config.model_type}; it is full already")
    name = language_config(config).model_type.removeprefix(SLIM)
    family = _load(name)
    if config.model_type in MULTIMODAL:
        assert isinstance(family, Family)
        family = multimodal_family(config, family)
    return name, family


def is_slim(config: Any) -> bool:
    """Whether a config is of a slim model."""
    kind: str = (language_config(config) if config.model_type in MULTIMODAL else config).model_type
    return kind.startswith(SLIM)


def _load(model_type: str) -> Family | EncoderDecoder:
    family: Family | EncoderDecoder = import_module(f"{_ARCHITECTURES}.{SLIM}{model_type}").FAMILY
    return family
