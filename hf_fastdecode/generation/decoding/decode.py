"""Decoding of one call with shared context: sets up steps and sampler, runs the loop, builds the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...cache.fingerprint import Fingerprint
from ...cache.shared import SharedContextCache
from ..prompts.start import Start
from ..report import CallReport
from ..steps.modes import State, steps_maker
from ..steps.runners import EagerSteps
from ..support import is_nothing
from .loop import Loop
from .sampling import choose_sampler
from .stopping import Stopping
from .token_log_probs import TokenLogProbs

# Model arguments that the loop itself passes at every step.
_OWN_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values")
# Arguments of decoding loops that are not model arguments.
_NOT_THE_MODELS = ("tokenizer", "assistant_tokenizer", "assistant_model")


@dataclass
class FastDecodeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with ``return_dict_in_generate``: transformers' fields plus `logprobs`.

    Attributes:
        logprobs: ``[rows, new_tokens]`` fp32: log-probability of each sampled token under the raw logits, natural log,
            0 after a row's end; None with transformers' own sampler.
    """

    logprobs: Tensor | None = None


def step_arguments(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Extra model arguments of every step, beyond tokens, positions and cache."""
    left_out = (*_OWN_ARGUMENTS, *_NOT_THE_MODELS)
    return {name: value for name, value in model_kwargs.items() if name not in left_out and not is_nothing(value)}


def _without_recorder(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, TokenLogProbs | None]:
    """Split off a `TokenLogProbs` recorder, whose work the loop does itself."""
    recorders = [entry for entry in processors if type(entry) is TokenLogProbs]
    if len(recorders) != 1:
        return processors, None
    return LogitsProcessorList(entry for entry in processors if entry is not recorders[0]), recorders[0]


def decode_shared(
    model: PreTrainedModel,
    state: State,
    call: CallReport,
    start: Start,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> FastDecodeOutput | Tensor:
    """Decode after `start_shared`; arguments as for transformers' decoding loops."""
    arguments = step_arguments(model_kwargs)
    input_ids = input_ids.long()  # dtype of sampled tokens
    stopping = Stopping(criteria, input_ids.device)
    processors, log_probs = _without_recorder(processors)
    sampler, call.sampler_reason = choose_sampler(
        state.options.sampler, processors, config, input_ids, start.logits, computed_in=start.cache.layers[0].dtype
    )
    call.sampler = sampler.name

    def eager(cache: SharedContextCache) -> EagerSteps:
        return EagerSteps(model, cache, arguments)

    with (
        model._optimize_model_for_decode(),
        steps_maker(model, state, call, arguments) as make_steps,
    ):
        wave = Loop(input_ids, start, sampler, stopping, config, streamer, make_steps, eager, call, log_probs).run()
    if not config.return_dict_in_generate:
        return wave.tokens
    start.cache.fingerprint = start.cache.fingerprint or Fingerprint(model)  # the caller may keep the cache
    return FastDecodeOutput(
        sequences=wave.tokens,
        scores=tuple(wave.scores) if config.output_scores else None,
        logits=tuple(wave.logits) if config.output_logits else None,
        past_key_values=start.cache,
        logprobs=torch.stack(wave.logprobs, dim=1) if wave.logprobs else None,
    )
