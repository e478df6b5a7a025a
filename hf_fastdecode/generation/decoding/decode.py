"""Decoding of one call with shared context: sets up steps and sampler, runs the loop, builds the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..._compat import CACHE, optimized_for_decode
from ...cache.shared import SharedContextCache
from ..call_context import CallContext
from ..identity import Fingerprint
from ..prompts.start import Start
from ..steps.modes import steps_maker
from ..steps.runners import EagerSteps
from ..support import step_arguments
from .loop import Loop
from .sampling import choose_sampler
from .stopping import Stopping
from .token_log_probs import TokenLogProbs


@dataclass
class FastDecodeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with ``return_dict_in_generate``: transformers' fields plus `logprobs`.

    Attributes:
        logprobs: ``[rows, new_tokens]`` fp32: log-probability of each sampled token under the raw logits, natural log,
            0 after a row's end; None with transformers' own sampler.
    """

    logprobs: Tensor | None = None


def _without_recorder(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, TokenLogProbs | None]:
    """Split off a `TokenLogProbs` recorder, whose work the loop does itself."""
    recorders = [entry for entry in processors if type(entry) is TokenLogProbs]
    if len(recorders) != 1:
        return processors, None
    return LogitsProcessorList(entry for entry in processors if entry is not recorders[0]), recorders[0]


def decode_shared(
    call: CallContext,
    start: Start,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> FastDecodeOutput | Tensor:
    """Decode after `start_shared`; further arguments as for transformers' decoding loops."""
    model, config, arguments = call.model, call.config, step_arguments(call.arguments)
    input_ids = input_ids.long()  # dtype of sampled tokens
    stopping = Stopping(criteria, input_ids.device)
    processors, log_probs = _without_recorder(processors)
    sampler, call.report.sampler_reason = choose_sampler(
        call.options.sampler, processors, config, input_ids, start.logits, computed_in=start.cache.computed_in
    )
    call.report.sampler = sampler.name

    def eager(cache: SharedContextCache) -> EagerSteps:
        return EagerSteps(model, cache, arguments)

    with optimized_for_decode(model), steps_maker(call) as make_steps:
        wave = Loop(call, input_ids, start, sampler, stopping, streamer, make_steps, eager, log_probs).run()
    if not call.returns_cache:
        return wave.tokens
    start.cache.fingerprint = start.cache.fingerprint or Fingerprint(model)  # the caller may keep the cache
    return FastDecodeOutput(
        sequences=wave.tokens,
        scores=tuple(wave.scores) if config.output_scores else None,
        logits=tuple(wave.logits) if config.output_logits else None,
        logprobs=torch.stack(wave.logprobs, dim=1) if wave.logprobs else None,
        **{CACHE: start.cache},
    )
