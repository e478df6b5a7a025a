"""Overrides of the methods in which transformers encodes and expands images, video or audio: they are held back."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import ENCODE
from ..active_call import active_call_of
from ..model_state import ModelState


def hold_before_encoding(
    model_state: ModelState, model: PreTrainedModel, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any
) -> dict[str, Any]:
    """`ENCODE` of a decoder: is called with model arguments that hold raw images, and returns encoded ones."""
    original, call = model_state.methods.original(model, ENCODE), active_call_of(model)
    if call is not None and call.may_hold:
        call.hold(model_kwargs, partial(original, inputs_tensor, dict(model_kwargs), *args))
        if call.inputs is not None:
            return model_kwargs
    encoded: dict[str, Any] = original(inputs_tensor, model_kwargs, *args)
    return encoded


def expand_inputs(model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    original, call = model_state.methods.original(model, "_expand_inputs_for_generation"), active_call_of(model)
    if call is None or args or not call.may_hold:
        return original(*args, **kwargs)
    call.hold(kwargs)
    if call.inputs is None:
        return original(**kwargs)
    ids, copies = kwargs["input_ids"], kwargs.get("expand_size", 1)
    call.inputs.expand(original, ids, copies)
    # Tokens of no image, as images are held back: VideoLlama 3 counts both, before transformers 5.24.
    _, expanded = original(**kwargs | {"input_ids": torch.full_like(ids, -1)})
    return ids.repeat_interleave(copies, dim=0), expanded
