"""A tiny model of every multimodal architecture whose language model has a slim form, and what it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from ..tiny_models import VOCABULARY
from .family_models import with_all_redrawn

LANGUAGE = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 28, "patch_size": 14},
}
_CLIP = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32}
_SOUND = {
    **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"num_mel_bins": 8, "max_source_positions": 24},
}
_GRID = {"image_grid_pinpoints": [[28, 28]]}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "llava": {"vision_config": _CLIP},
    "llava_next": {"vision_config": _CLIP, **_GRID},
    "llava_next_video": {"vision_config": _CLIP, **_GRID},
    "idefics3": {"vision_config": _VISION},
    "smolvlm": {"vision_config": _VISION},
    "qwen2_audio": {"audio_config": _SOUND},
}
"""Model type -> config arguments; configs that name no type of the language model have Llama, or Qwen2 for sounds."""


_SPECIAL = ("video_token_id", "image_token_id", "audio_token_id")


def multimodal_model(model_type: str, language: dict[str, Any] | None = None) -> PreTrainedModel:
    """A random fp32 model in eval mode; the last id of the vocabulary stands for a token of an image, video or sound.

    Args:
        model_type: Of the whole model.
        language: Fields of the language model's config.
    """
    torch.manual_seed(0)
    text = {**LANGUAGE, "vocab_size": VOCABULARY, **(language or {})}
    text.setdefault("model_type", "qwen2" if model_type == "qwen2_audio" else "llama")
    config = AutoConfig.for_model(model_type, text_config=text, **MULTIMODAL[model_type])
    for place, name in enumerate(name for name in _SPECIAL if hasattr(config, name)):
        setattr(config, name, text["vocab_size"] - 1 - place)
    model = with_all_redrawn(AutoModelForMultimodalLM.from_config(config).eval())
    model.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=None)
    return model


def inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Two rows, each of an image, a video or a sound within text; the first is padded."""
    kind, generator = model.config.model_type, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    given: dict[str, Tensor]
    tokens = 4  # of an image of 2 * 2 patches
    if kind == "qwen2_audio":
        given = {"input_features": random(2, 8, 48), "feature_attention_mask": torch.ones(2, 48, dtype=torch.long)}
        tokens = 12
    elif kind in ("idefics3", "smolvlm"):
        given, tokens = {"pixel_values": random(2, 1, 3, 28, 28)}, 1  # 2 * 2 patches are joined
    elif kind == "llava":
        given = {"pixel_values": random(2, 3, 28, 28)}
    elif kind == "llava_next_video":
        given, tokens = {"pixel_values_videos": random(2, 3, 3, 28, 28)}, 3  # of each frame 2 * 2 patches are joined
    else:
        given = {"pixel_values": random(2, 2, 3, 28, 28), "image_sizes": torch.tensor([[28, 28]] * 2)}
        tokens = 4 + 4 + 2  # the whole image, its one tile, and the ends of the tile's lines
    special = model.config.text_config.vocab_size - 1
    ids = torch.randint(3, special - 1, (2, 9 + tokens), generator=generator)
    ids[:, 4 : 4 + tokens] = special
    mask = torch.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, **given}
