"""Adds what routers chose to the output of `generate` (``output_router_choices=True``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from ..._compat import pad_token
from ..call_context import active_call_of
from ..routing.choices import Recorder
from .log_probs import drawn_tokens, refusal_of_rows
from .loop import FastDecodeOutput
from .stopping import Stopping

CHOICES: Final = "output_router_choices"
"""The argument of `generate`, or field of its config, that asks for them."""


def adding_choices(
    model: PreTrainedModel,
    prompts: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    arguments: dict[str, Any],
    *,
    then: Callable[[Any], Any],
) -> Callable[[Any], Any]:
    """Begin to record a call that asks for it; returns what adds the choices to a loop's output, and calls `then`.

    Args:
        prompts: ``[rows, width]`` int64.
        arguments: The model's, as `generate` prepared them.

    Raises:
        ValueError: The call asks for it, and cannot be recorded.
    """
    call = active_call_of(model)
    if call is None or not call.records:
        return then
    refusal = refusal_of_rows(model, config.get_generation_mode(arguments.get("assistant_model")))
    if not config.return_dict_in_generate:
        refusal = "this call returns ids alone; use return_dict_in_generate=True"
    elif call.structure is not None and not call.structure.alone:
        refusal = "several processes compute this model; use a model for each"
    if refusal is not None:
        raise ValueError(f"{CHOICES}=True records rows of text that are drawn token by token, and {refusal}")
    call.recorder = recorder = Recorder(model, len(prompts))
    mask, stopping = arguments.get("attention_mask"), Stopping(criteria, prompts.device)
    given = torch.ones_like(prompts) if mask is None else mask.to(prompts.device)

    def finish(output: Any) -> Any:
        call.recorder = None
        drawn = drawn_tokens(output.sequences[:, prompts.shape[1] :], stopping, pad_token(config))
        choices = recorder.choices(output.sequences, torch.cat([given > 0, drawn], dim=1))
        return then(FastDecodeOutput(**{**output, "router_choices": choices}))

    return finish
