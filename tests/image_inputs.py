"""Prompts with small random images, for tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Part = int | tuple[int, ...]
"""Part of a prompt: a number of random tokens, or an image: rows and columns of patches, and its seed, if not 0."""


def prompts_with_images(model: PreTrainedModel, *prompts: Sequence[Part], seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts with their images, as the processor of a model of Qwen-VL's kind gives them."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(seed)
    merged = config.vision_config.spatial_merge_size**2
    pixels, grids, rows = list[Tensor](), list[list[int]](), list[Tensor]()
    for parts in prompts:
        tokens = list[Tensor]()
        for part in parts:
            if isinstance(part, int):
                tokens.append(torch.randint(3, 90, (part,), generator=generator))
                continue
            high, wide, *own = part
            grids.append([1, high, wide])
            pixels.append(_patches(config.vision_config, high * wide, *own))
            places = [config.image_token_id] * (high * wide // merged)
            tokens.append(torch.tensor([config.vision_start_token_id, *places, config.vision_end_token_id]))
        rows.append(torch.cat(tokens))
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = tokens, 1
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
    if pixels:
        inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return inputs


def _patches(vision: Any, count: int, seed: int = 0) -> Tensor:
    channels = getattr(vision, "in_channels", 3)
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
