"""From a name on the command line to a model, and the machine in words."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..dtypes import parse_dtype
from ..errors import InputError, out_of_memory
from ..measurement.shapes import SHAPES, random_model
from ..model_loading import load_tokenizer, load_weights, takes_text_only
from ..model_names import EMBEDDED, SHAPE, load_config
from .completions import vocabulary_of


def load_model(name: str, dtype: str, device: torch.device, *, encoders: bool = False) -> tuple[Any, Any]:
    """A model that generates text, in eval mode, and its tokenizer, which pads where the model does not look.

    Sampling defaults that come with a checkpoint are dropped, its special tokens kept: what `generate` does is what
    the command line says. Names are those of `load_config`, but not a config.json; or ``shape:`` and one of `SHAPES`:
    random weights, which are as fast as trained ones, and the embedded tokenizer. The dtype ``auto`` is float32 for
    the embedded model, for a shape bfloat16 on a GPU and float32 elsewhere, what the checkpoint says for others.
    Encoder-decoders are refused unless `encoders`.
    """
    dtype = parse_dtype(dtype)
    if name.startswith(SHAPE):
        return _random_model(name.removeprefix(SHAPE), dtype, device)
    config = load_config(name)
    if config.is_encoder_decoder and not encoders:
        raise InputError(
            f"{name} is an encoder-decoder ({config.model_type}), and this command takes decoder-only models; "
            "`hf-fastdecode generate` and `inspect` take others too"
        )
    if config.is_encoder_decoder and not takes_text_only(config):
        raise InputError(f"{name} ({config.model_type}) is given audio, and a prompt is a text; name a model of texts")
    tokenizer = load_tokenizer(name)
    model = load_weights(name, dtype, device)
    _prepare(model, tokenizer)
    return model, tokenizer


def _random_model(shape: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    chosen = ("bfloat16" if device.type == "cuda" else "float32") if dtype == "auto" else dtype
    tokenizer = load_tokenizer(EMBEDDED)
    if len(tokenizer) > SHAPES[shape]["vocab_size"]:
        raise InputError(
            f"shape {shape} has {SHAPES[shape]['vocab_size']} tokens, fewer than the {len(tokenizer)} of the embedded "
            "tokenizer; choose another"
        )
    try:
        return random_model(shape, device, getattr(torch, chosen)), tokenizer
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise InputError(f"shape {shape} does not fit in the memory of {device}; name a smaller one") from error


def machine(device: torch.device) -> str:
    """The processor in words, with the number of threads where torch computes on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} torch thread{'' if threads == 1 else 's'}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _prepare(model: Any, tokenizer: Any) -> None:
    """Padding, on the left of a decoder's prompts, and a generation config of special tokens only."""
    encodes = model.config.is_encoder_decoder
    tokenizer.padding_side = "right" if encodes else "left"  # positions of an encoder may be counted from the left
    given = model.generation_config
    end = given.eos_token_id if given.eos_token_id is not None else tokenizer.eos_token_id
    # Which token pads does not matter, padding is masked; but it must be one of the model's.
    vocabulary = vocabulary_of(model)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocabulary:
        first = end[0] if isinstance(end, list) else end
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(first if first is not None and first < vocabulary else 0)
    kept = ("bos_token_id", *(("decoder_start_token_id", "forced_bos_token_id") if encodes else ()))
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=tokenizer.pad_token_id, **{name: getattr(given, name) for name in kept}
    )
