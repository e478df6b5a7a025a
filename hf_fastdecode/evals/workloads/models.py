"""From a name to a model and its tokenizer: a checkpoint's, or a named shape with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.command_errors import CommandError, one_line

from ...measurement.shapes import SHAPES, random_model
from .cases import SHAPE
from .points import check_shape


def load(name: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, which pads on the left.

    Args:
        name: ``embedded``, a folder, an id on the hub, or ``shape:`` and one of `SHAPES`: random weights, as fast as
            trained ones, whose prompts the embedded tokenizer reads.
        dtype: Of the parameters: float32, bfloat16, float16, or ``auto``: the checkpoint's own, of a shape bfloat16 on
            a GPU and float32 elsewhere.
        device: Where the parameters go.

    Raises:
        CommandError: There is no such model, or it does not fit into memory.
    """
    if not name.startswith(SHAPE):
        from ...commands.models import load_model

        return load_model(name, dtype, device)
    shape = name.removeprefix(SHAPE)
    check_shape(shape)
    chosen = ("bfloat16" if device.type == "cuda" else "float32") if dtype == "auto" else dtype
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    if len(tokenizer) > SHAPES[shape]["vocab_size"]:
        raise CommandError(
            f"shape {shape} has {SHAPES[shape]['vocab_size']} tokens, fewer than the {len(tokenizer)} of the embedded "
            "tokenizer; choose another"
        )
    try:
        return random_model(shape, device, getattr(torch, chosen)), tokenizer
    except torch.OutOfMemoryError as error:
        raise CommandError(
            f"shape {shape} does not fit into the memory of {device} ({one_line(error, 70)}); name a smaller one"
        ) from error
