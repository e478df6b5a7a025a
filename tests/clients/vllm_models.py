"""Models that vLLM makes of the named shapes, with random weights, and prompts for them."""

from __future__ import annotations

import json
from math import isqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from benchmarks.generate.cases import GenerateCase
from benchmarks.generate.inputs import BEFORE_IMAGE, FIRST_ID, GemmaImage, OneImage
from benchmarks.generate.shapes import INPUT_SHAPES
from hf_fastdecode.measurement.shapes import MAX_POSITIONS, SHAPES

STAND_INS: Final[dict[str, dict[str, Any]]] = {"qwen3_5_text": {"model_type": "qwen3_next", "num_experts": 0}}
"""For model types that vLLM has no model of text of: fields of another type with the same layers."""

VLLM_SHAPES: Final = (*SHAPES, *(name for name, shape in INPUT_SHAPES.items() if isinstance(shape.given, OneImage)))


class VllmModel:
    """One of `VLLM_SHAPES`: its config, with the class that vLLM finds its own model by, and its images, if any."""

    def __init__(self, shape: str):
        given, auto_class = INPUT_SHAPES.get(shape), "AutoModelForCausalLM"
        if given is None:
            own = SHAPES[shape]
            self.stand_in = STAND_INS.get(own["model_type"], {})
            self._fields = own | self.stand_in | {"max_position_embeddings": MAX_POSITIONS}
        else:
            self.stand_in, auto_class = {}, given.auto_class
            self._fields = {"model_type": given.model_type, **given.fields}
        self.config: Any = AutoConfig.for_model(**self._fields)
        self.config.architectures = [getattr(transformers, auto_class)._model_mapping[type(self.config)].__name__]
        self.images = _Images(given.given, self.config) if given and isinstance(given.given, OneImage) else None

    def write(self, folder: Path) -> None:
        """A folder that vLLM loads with ``load_format="dummy"``."""
        if self.images is not None:
            self.images.processor(self.config).save_pretrained(folder)
        # Both, since configs of vLLM's own read fields that transformers' replace by others, such as layers' kinds.
        (folder / "config.json").write_text(json.dumps(self._fields | self.config.to_dict()))

    def prompts(self, case: GenerateCase, draw: np.random.Generator) -> list[dict[str, Any]]:
        """The case's prompts: random ids, and in each an image of random pixels if the shape has one."""
        images, shared = self.images, 0 if case.tree is None else case.tree.shared
        end = min(images.names) if images else self.config.vocab_size
        ids = draw.integers(FIRST_ID, end, (case.prompts, case.context - (images.tokens if images else 0)))
        ids[:, :shared] = ids[0, :shared]
        if images is None:
            return [{"prompt_token_ids": row} for row in ids.tolist()]
        rows = [[*row[:BEFORE_IMAGE], *images.ids, *row[BEFORE_IMAGE:]] for row in ids.tolist()]
        return [{"prompt_token_ids": row, "multi_modal_data": {"image": images.random(draw)}} for row in rows]


class _Images:
    """Where images stand in prompts: `ids`, of which the processor makes `tokens` tokens, by words of `names`."""

    def __init__(self, given: OneImage, config: Any):
        before, image, after = given.special(config)
        vision, self.image_tokens, self.is_gemma = config.vision_config, given.tokens, isinstance(given, GemmaImage)
        if self.is_gemma:  # puts line ends before and after, which it joins into tokens of up to four
            self.names = {before: "<start_of_image>", image: "<image_soft_token>", after: "<end_of_image>"}
            self.names |= {before - count: "\n" * count for count in range(1, 5)}
            self.ids, self.tokens, self.side = [before], given.tokens + 4, vision.image_size
        else:
            self.names = {before: "<|vision_start|>", image: "<|image_pad|>", after: "<|vision_end|>"}
            self.names |= {config.video_token_id: "<|video_pad|>"}
            self.ids, self.tokens = [before, image, after], given.tokens + 2
            self.side = isqrt(given.tokens) * vision.spatial_merge_size * vision.patch_size

    def random(self, draw: np.random.Generator) -> Any:
        from PIL import Image

        return Image.fromarray(draw.integers(0, 256, (self.side, self.side, 3), dtype=np.uint8))

    def tokenizer(self, vocabulary: int) -> PreTrainedTokenizerFast:
        """A word for each id."""
        tokenizer = Tokenizer(WordLevel({self.names.get(at, f"w{at}"): at for at in range(vocabulary)}, "w0"))
        tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in self.names.values()])
        kinds = ("boi_token", "image_token", "eoi_token") if self.is_gemma else ()
        special = dict(zip(kinds, self.names.values(), strict=False))
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", extra_special_tokens=special
        )

    def processor(self, config: Any) -> Any:
        tokenizer, vision = self.tokenizer(config.text_config.vocab_size), config.vision_config
        if self.is_gemma:
            images = transformers.Gemma3ImageProcessor(size={"height": self.side, "width": self.side})
            return transformers.Gemma3Processor(images, tokenizer, image_seq_length=self.image_tokens)
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        images = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 1, "longest_edge": self.side**2}, **sizes)
        return transformers.Qwen3VLProcessor(images, tokenizer, transformers.Qwen3VLVideoProcessor(**sizes))
