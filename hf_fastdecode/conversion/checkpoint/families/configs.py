"""Configs of slim models from those of ordinary ones, and vice versa."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig

from ....patches.layers.encoder_decoder import EncoderDecoder
from ....patches.layers.family import Family, language_config
from ...fit.cache_errors import dtype_name
from .lookup import SLIM, UnconvertibleError, family_of_slim
from .multimodal import MULTIMODAL


def require_rope(family: Family | EncoderDecoder, config: Any, rope: str) -> None:
    """Refuse a `slim_rope` that the slim model's config will refuse, before its layers are measured.

    Args:
        family: Of the model.
        config: Of the ordinary model.
        rope: ``raw`` or ``unrotate``.

    Raises:
        UnconvertibleError: It is ``unrotate``, and the model has no RoPE of fixed frequencies.
    """
    try:
        family.slim_config(**_full_fields(language_config(config)), slim_rope=rope)
    except ValueError as error:
        raise UnconvertibleError(str(error)) from error


def slim_config(
    family: Family | EncoderDecoder,
    config: Any,
    entries: list[dict[str, Any]],
    dtype: torch.dtype,
    matrix: torch.dtype,
    rope: str,
) -> Any:
    """The config of a slim model: an ordinary one's fields, and what each layer caches."""
    slim = {"slim_layers": entries, "slim_matrix_dtype": dtype_name(matrix), "slim_rope": rope}
    made = family.slim_config(**_full_fields(language_config(config)), **slim)
    return _complete(config, made, family.slim_model.__name__, dtype)


def full_config(family: Family | EncoderDecoder, config: Any, model_type: str, dtype: torch.dtype) -> Any:
    """The config of an ordinary model, of a slim one's.

    Args:
        family: Of both.
        config: Of the slim model.
        model_type: From `family_of_slim`.
        dtype: Of the ordinary model.
    """
    made = AutoConfig.for_model(model_type, **_full_fields(language_config(config)))
    return _complete(config, made, family.architecture, dtype)


def ordinary_config(config: Any) -> Any:
    """The config of the ordinary model that a slim one stands for.

    Raises:
        UnconvertibleError: The config is not of a slim model.
    """
    model_type, family = family_of_slim(config)
    return full_config(family, config, model_type, config.dtype)


def untied(config: Any) -> Any:
    """The same config, of a model in which nothing is tied, as after a head was trained apart from the embeddings.

    T5's stays tied when it is loaded, as transformers ties its embeddings in any case, and its head where it is equal.
    """
    for part in (config, language_config(config)):
        part.tie_word_embeddings = False
    return config


def _complete(config: Any, language: Any, architecture: str, dtype: torch.dtype) -> Any:
    """The config of a whole model, from that of its language model; which is the same but for multimodal models."""
    made = language
    if config.model_type in MULTIMODAL:
        made = deepcopy(config)
        made.text_config = language
        for part in made.sub_configs:
            getattr(made, part).dtype = dtype
    made.architectures = [architecture]
    made.dtype = dtype
    return made


def _full_fields(config: Any) -> dict[str, Any]:
    """Fields of an ordinary model's config, of its own one or of a slim model's."""
    own = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "_name_or_path")
    fields: dict[str, Any] = config.to_dict()
    return {name: one for name, one in fields.items() if name not in own and not name.startswith(SLIM)}
