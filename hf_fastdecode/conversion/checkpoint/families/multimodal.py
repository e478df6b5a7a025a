"""Multimodal models: their language models are converted, and all else stays as it is.

transformers makes the language model of a ``text_config`` by the Auto classes. So a slim multimodal model is of the
ordinary class, and its ``text_config`` is that of a slim language model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from transformers import AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from ....patches.layers.family import Family

MULTIMODAL: Final = {
    "llava": "model.language_model.",
    "llava_next": "model.language_model.",
    "llava_next_video": "model.language_model.",
    "idefics3": "model.text_model.",
    "smolvlm": "model.text_model.",
    "qwen2_audio": "model.language_model.",
}
"""Model types, and prefixes of the language model's weights."""


def multimodal_family(config: Any, language: Family) -> Family:
    """The family of a multimodal model.

    Args:
        config: Of the model, ordinary or slim.
        language: Family of its language model.
    """
    model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    own, prefix = f"{language.slim_model.base_model_prefix}.", MULTIMODAL[config.model_type]
    return replace(
        language,
        architecture=model.__name__,
        slim_model=model,
        embedding=prefix + language.embedding.removeprefix(own),
        layers=prefix + language.layers.removeprefix(own),
        renamed={},
        auto=AutoModelForMultimodalLM,
    )
