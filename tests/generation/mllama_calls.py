"""A tiny Mllama, prompts with images for it, and calls of them."""

from __future__ import annotations

import torch

SAMPLES = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 6}
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
IMAGE = 118


def mllama():
    """A tiny Mllama, whose gates let what its layers see of images through."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    text = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 64, **heads}
    text |= {"cross_attention_layers": [1], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "num_attention_heads": 4}
    vision |= {"intermediate_size": 32, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96}
    vision |= {"image_size": 28, "patch_size": 14, "max_num_tiles": 2}
    vision["supported_aspect_ratios"] = [[1, 1], [1, 2], [2, 1]]
    config = MllamaConfig(
        vision_config=MllamaVisionConfig(**vision), text_config=MllamaTextConfig(**text), image_token_index=IMAGE
    )
    model = MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:  # the gates of layers that attend to images too, which begin at 0
                parameter.uniform_(0.5, 1.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def prompts(*padding, images=1):
    """Prompts whose images have one tile and two by turns, each behind its padding."""
    draw, rows, width = torch.Generator().manual_seed(1), len(padding), 20
    ids, shown = torch.randint(3, 110, (rows, width), generator=draw), torch.ones(rows, width, dtype=torch.long)
    sees = torch.zeros(rows, width, images, 2, dtype=torch.long)
    for row, hidden in enumerate(padding):
        ids[row, :hidden], shown[row, :hidden], ids[row, hidden + 2] = 0, 0, IMAGE
        sees[row, hidden + 2 :, :, : 1 + row % 2] = 1
    tiles = torch.arange(rows)[:, None].expand(-1, images) % 2
    return {
        "input_ids": ids,
        "attention_mask": shown,
        "pixel_values": torch.randn(rows, images, 2, 3, 28, 28, generator=draw),
        "aspect_ratio_ids": tiles + 1,
        "aspect_ratio_mask": torch.stack((torch.ones_like(tiles), tiles), -1),
        "cross_attention_mask": sees,
    }
