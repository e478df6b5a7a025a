"""A hash of a model and its tokenizer, which distinguishes runs of different checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WORD: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS_AT_ONCE: Final = 1 << 24
_NOT_THE_MODELS: Final = ("_name_or_path", "transformers_version")  # where a config lies, and who wrote it
_SPREAD: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # golden ratio: neighbouring words get very different factors


def model_digest(model: Any, tokenizer: Any) -> str:
    """A hash of weights, configs and tokenizer: of what decides the tokens that are drawn, and their text."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_MODELS}
    parts = [config, model.generation_config.to_diff_dict(), _tokenizer_text(tokenizer)]
    text = json.dumps([weights_digest(model), *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tokenizer_text(tokenizer: Any) -> str:
    """What a tokenizer computes, as text; of one without a Rust backend its class and its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str())
    return json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])


def weights_digest(model: Any) -> str:
    """A hash of names, shapes, dtypes and every value of a model's state dict, computed where the weights are."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        for tensor in _plain(value):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sum_of_bits(tensor)}".encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Iterator[Tensor]:
    """The tensors that a value of a state dict consists of: several for a quantised one."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, Tensor) and not value.is_meta:
        yield value.detach()


def _sum_of_bits(tensor: Tensor) -> int:
    """A sum over a tensor's words, each weighted by its place; it wraps around at 64 bits."""
    words = tensor.contiguous().reshape(-1).view(_WORD[tensor.dtype.itemsize])
    total = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE].long()
        factors = torch.arange(start, start + len(part), device=part.device) * _SPREAD | 1  # odd: no bit is lost
        total += int((part * factors).sum())
    return total & (1 << 64) - 1
