"""Overrides of the methods in which transformers encodes and expands images, video or audio: they are held back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from .._compat import ENCODE
from .active_call import active_call_of_thread
from .loop_argument import signature_of
from .model_state import ModelState


def _encode(model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    """`ENCODE`: is called with model arguments that hold raw images, and returns them with encoded ones."""
    assert ENCODE is not None
    original, call = model_state.methods.original(model, ENCODE), active_call_of_thread.get()
    if call is None or call.model is not model or not call.may_hold:
        return original(*args, **kwargs)
    given = signature_of(partial(getattr(GenerationMixin, ENCODE), model)).bind(*args, **kwargs).arguments
    arguments: dict[str, Any] = given["model_kwargs"]
    whole = given | {"model_kwargs": dict(arguments)}
    call.hold(arguments, partial(original, **whole))
    return arguments if call.inputs is not None else original(*args, **kwargs)


def _expand_inputs_for_generation(
    model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any
) -> Any:
    original, call = model_state.methods.original(model, "_expand_inputs_for_generation"), active_call_of_thread.get()
    if call is None or call.model is not model or args or not call.may_hold:
        return original(*args, **kwargs)
    call.hold(kwargs)
    if call.inputs is not None:
        call.inputs.expand(original, kwargs["input_ids"], kwargs.get("expand_size", 1))
    return original(**kwargs)


INPUT_METHODS: dict[str, Callable[..., Any]] = {
    "_expand_inputs_for_generation": _expand_inputs_for_generation,
    **({} if ENCODE is None else {ENCODE: _encode}),
}
"""These overrides by method name."""
