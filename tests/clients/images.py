"""A tiny Qwen3-VL, a processor for it and prompts with images, for TRL's trainers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    BatchFeature,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import hf_fastdecode as fd

_IMAGE = "<|image_pad|>"
_FRAMED = "<|vision_start|>", _IMAGE, "<|vision_end|>"
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + "".join(_FRAMED) + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}\n{% endfor %}"
)


class ImageProcessor(ProcessorMixin):
    """As Qwen-VL's, which needs torchvision for videos."""

    attributes = ("image_processor", "tokenizer")
    image_processor_class = "Qwen2VLImageProcessorPil"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any):
        self.image_token = _IMAGE
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **options: Any) -> BatchFeature:
        texts, data = [text] if isinstance(text, str) else list(text), dict[str, Any]()
        if images is not None:
            seen = self.image_processor(images=list(_flat(images)), return_tensors="pt")
            data = {name: seen[name] for name in ("pixel_values", "image_grid_thw")}
            counts = iter((data["image_grid_thw"].prod(1) // self.image_processor.merge_size**2).tolist())
            for row, one in enumerate(texts):
                first, *others = one.split(_IMAGE)
                texts[row] = first + "".join(_IMAGE * next(counts) + part for part in others)
        kept = ("padding", "padding_side", "return_tensors", "add_special_tokens", "max_length", "truncation")
        encoded = self.tokenizer(texts, **{name: options[name] for name in kept if name in options})
        data |= {name: encoded[name] for name in ("input_ids", "attention_mask")}
        place = self.tokenizer.convert_tokens_to_ids(_IMAGE)
        rows = [[int(token == place) for token in row] for row in data["input_ids"]]
        data["mm_token_type_ids"] = torch.tensor(rows) if isinstance(data["input_ids"], torch.Tensor) else rows
        return BatchFeature(data=data)

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"]


def _flat(images: Any) -> Iterator[Any]:
    if isinstance(images, Sequence):
        for part in images:
            yield from _flat(part)
    elif images is not None:
        yield images


def tokenizer_with_images() -> PreTrainedTokenizerBase:
    """The embedded model's tokenizer, with tokens for images."""
    _, tokenizer = fd.load_embedded()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_FRAMED)})
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def processor(tokenizer: PreTrainedTokenizerBase) -> ImageProcessor:
    """The processor of `model_with_images`."""
    size = {"shortest_edge": 2 * 28**2, "longest_edge": 16 * 28**2}
    return ImageProcessor(Qwen2VLImageProcessorPil(patch_size=14, size=size), tokenizer, chat_template=_TEMPLATE)


def model_with_images(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLForConditionalGeneration:
    """A random model in fp32."""
    torch.manual_seed(0)
    start, place, end = (tokenizer.convert_tokens_to_ids(token) for token in _FRAMED)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    text = {"vocab_size": len(tokenizer), "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {"depth": 2, "num_heads": 4, "patch_size": 14, "out_hidden_size": 64, "num_position_embeddings": 256}
    config = Qwen3VLConfig(
        text_config={**sizes, **text, **ids, "head_dim": 32, "rope_parameters": rope},
        vision_config={**sizes, **vision, "deepstack_visual_indexes": [0, 1]},
        image_token_id=place,
        vision_start_token_id=start,
        vision_end_token_id=end,
        video_token_id=len(tokenizer) - 1,
    )
    return Qwen3VLForConditionalGeneration(config)


def prompts_with_images() -> Dataset:
    """Three prompts with an image each, of different sizes."""
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 255, (56, 28 * wide, 3), dtype=np.uint8)) for wide in (2, 3, 4)]
    texts = ("def add(a, b):\n    return a\n" * 3, "x = [1, 2, 3]\n" * 4, "print(7)\n" * 8)
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts], "image": images})
