"""Shapes whose calls are given more than token ids, with random weights: configs as data, and what they are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from .inputs import EncodedText, GemmaImage, OneImage, Recording, TokenIds

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class InputShape:
    """A model's config, and what its calls are given."""

    model_type: str
    auto_class: str  # transformers' class that makes the model of the config
    fields: Mapping[str, Any]
    given: TokenIds
    context: int  # tokens of an input, for the check of ways
    small: str  # the shape of the same kind that ways are checked with
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of the generation config

    def model(self, device: torch.device | str, dtype: torch.dtype) -> PreTrainedModel:
        """A model with random weights, in eval mode, that never stops by itself within `min_new_tokens`."""
        import transformers

        from hf_fastdecode.measurement.shapes import random_weights

        config = transformers.AutoConfig.for_model(self.model_type, **self.fields)
        model = random_weights(getattr(transformers, self.auto_class), config, device, dtype)
        model.generation_config = transformers.GenerationConfig(
            **{"pad_token_id": 0, "eos_token_id": None, **self.settings}
        )
        return model

    def parameters(self) -> int:
        import torch

        return sum(parameter.numel() for parameter in self.model("meta", torch.bfloat16).parameters())


def _whisper(
    vocabulary: int, hidden: int, layers: int, heads: int, bins: int, positions: int, end: int, **more: Any
) -> dict[str, Any]:
    """The fields of a Whisper, whose encoder and decoder are of one size, and whose special tokens begin at `end`."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * hidden}.items()
    }
    return {
        "vocab_size": vocabulary,
        "d_model": hidden,
        "num_mel_bins": bins,
        "max_source_positions": positions,
        **sides,
        **_ends(end),
        **more,
    }


def _ends(end: int) -> dict[str, int]:
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end + 1}


def _of_whisper(
    vocabulary: int, end: int, english: int, transcribe: int, no_timestamps: int, suppressed: Iterable[int]
) -> dict[str, Any]:
    """The generation config of a multilingual Whisper, by the ids of its special tokens.

    Timestamps are suppressed, too, which no trained model draws after "no timestamps": Whisper's `generate` would
    take two of random weights for the end of a segment, and call again for the rest of the recording.
    """
    return {
        **_ends(end),
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": english},
        "task_to_id": {"transcribe": transcribe, "translate": transcribe - 1},
        "prev_sot_token_id": transcribe + 2,
        "no_timestamps_token_id": no_timestamps,
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "suppress_tokens": [*suppressed, *range(no_timestamps + 1, vocabulary)],
        "begin_suppress_tokens": [220, end],
    }


# Sounds that are no speech, as the checkpoint's generation config suppresses them, and special tokens.
_NO_SPEECH: Final = (
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542, 873),
    *(893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667, 6585),
    *(6647, 7273, 9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635, 15265, 15618, 16553),
    *(16604, 18362, 18956, 20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650, 32302, 32470, 36865, 42863),
    *(47425, 49870, 50254, 50258, 50359, 50360, 50361, 50362, 50363),
)


_TEXT: Final = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_HEADS: Final = ("num_attention_heads", "num_key_value_heads", "head_dim")
_VISION: Final = ("depth", "hidden_size", "intermediate_size", "num_heads", "deepstack_visual_indexes")


def _qwen3_vl(text: Sequence[int], sections: list[int], vision: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The fields of a Qwen3-VL, by those of its two parts and the numbers of angles of each position plane."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    own = dict(zip((*_TEXT, *_HEADS), text, strict=True))
    seen = dict(zip(_VISION, vision, strict=True)) | {"out_hidden_size": own["hidden_size"]}
    text_config = {**own, "max_position_embeddings": 262144, "rope_parameters": rope}
    return {"text_config": text_config, "vision_config": seen, "tie_word_embeddings": True, **more}


def _gemma3(text: Sequence[int], vision: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """The fields of a Gemma 3, by those of its two parts and the tokens of an image."""
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size"
    own = dict(zip((*_TEXT, *_HEADS, "sliding_window"), text, strict=True)) | {"max_position_embeddings": 131072}
    seen = dict(zip(names, vision, strict=True)) | {"vision_use_head": False}
    return {"text_config": own, "vision_config": seen, "mm_tokens_per_image": tokens, **more}


_SPEECH, _SEQUENCES, _IMAGES = "AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText"

INPUT_SHAPES: Final[dict[str, InputShape]] = {
    "whisper-large-v3": InputShape(
        *("whisper", _SPEECH, _whisper(51866, 1280, 32, 20, 128, 1500, 50257)),
        given=Recording(1500, 448),
        context=1500,
        small="tiny-whisper",
        settings=_of_whisper(51866, 50257, 50259, 50360, 50364, _NO_SPEECH),
    ),
    "t5-3b": InputShape(
        *("t5", _SEQUENCES),
        {"vocab_size": 32128, "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
        given=EncodedText(),
        context=1024,
        small="tiny-t5",
        settings={"decoder_start_token_id": 0},
    ),
    "qwen3-vl-2b": InputShape(
        *("qwen3_vl", _IMAGES),
        _qwen3_vl((151936, 2048, 6144, 28, 16, 8, 128), [24, 20, 20], (24, 1024, 4096, 16, [5, 11, 17])),
        given=OneImage(1024),
        context=1126,
        small="tiny-qwen3-vl",
    ),
    "gemma3-12b-image": InputShape(
        *("gemma3", _IMAGES),
        _gemma3((262208, 3840, 15360, 48, 16, 8, 256, 1024), (1152, 4304, 27, 16, 896, 14), 256),
        given=GemmaImage(256),
        context=358,
        small="tiny-gemma3-image",
    ),
    "tiny-whisper": InputShape(
        *("whisper", _SPEECH, _whisper(512, 128, 2, 2, 16, 200, 480, max_target_positions=64)),
        given=Recording(200, 64),
        context=200,
        small="tiny-whisper",
        settings=_of_whisper(512, 480, 482, 485, 490, [1, 2, 7, 485]),
    ),
    "tiny-t5": InputShape(
        *("t5", _SEQUENCES),
        {"vocab_size": 512, "d_model": 128, "d_kv": 64, "d_ff": 256, "num_layers": 2, "num_heads": 2},
        given=EncodedText(),
        context=200,
        small="tiny-t5",
        settings={"decoder_start_token_id": 0},
    ),
    "tiny-qwen3-vl": InputShape(
        *("qwen3_vl", _IMAGES),
        _qwen3_vl(
            (512, 128, 256, 2, 4, 2, 32),
            [6, 5, 5],
            (2, 64, 128, 2, [0]),
            **{"vision_start_token_id": 508, "vision_end_token_id": 509, "image_token_id": 510, "video_token_id": 511},
        ),
        given=OneImage(16),
        context=120,
        small="tiny-qwen3-vl",
        settings={"suppress_tokens": [508, 509, 510, 511]},  # which would be drawn of so few, and stand for no image
    ),
    "tiny-gemma3-image": InputShape(
        *("gemma3", _IMAGES),
        _gemma3(
            (512, 128, 256, 2, 4, 2, 32, 48),
            (64, 128, 2, 2, 32, 4),
            16,
            **{"boi_token_index": 509, "eoi_token_index": 510, "image_token_index": 511},
        ),
        given=GemmaImage(16),
        context=120,
        small="tiny-gemma3-image",
        settings={"suppress_tokens": [509, 510, 511]},
    ),
}

QUANTIZED: Final[dict[str, str]] = {
    "bnb-4bit": "bitsandbytes' NF4, its scales quantized too",
    "bnb-8bit": "bitsandbytes' LLM.int8 without outliers",
    "ao-int4": "torchao's 4 bits in groups of 128",
    "ao-int8": "torchao's 8 bits",
    "ao-float8": "torchao's float8, activations too, a scale for each token",
    "fp8": "blocks of FP8 checkpoints, by the Hub's kernels",
    "mxfp4": "gpt-oss' experts, by the Hub's kernels",
}
"""Ways to quantize a shape's weights: a name such as ``8b-gqa:bnb-4bit``."""


def split_shape(shape: str) -> tuple[str, str | None]:
    """The name of a shape, and how its weights are quantized, if they are."""
    name, _, how = shape.rpartition(":")
    return (name, how) if how in QUANTIZED else (shape, None)


_TOKEN_IDS: Final = TokenIds()


def given_of(shape: str) -> TokenIds:
    shape, _ = split_shape(shape)
    return INPUT_SHAPES[shape].given if shape in INPUT_SHAPES else _TOKEN_IDS
