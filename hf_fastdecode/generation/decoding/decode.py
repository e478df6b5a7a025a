"""Decoding of one call with shared context, from its prefill to its output."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..._compat import CACHE
from ..call_context import CallContext
from ..prompts.start import Start
from ..same_calls import require_same_ends
from ..steps.modes import StepsMaker
from .experts import decode_context
from .loop import Loop
from .outputs import FastDecodeEncoderDecoderOutput, FastDecodeOutput
from .sampling import choose_sampler
from .stopping import Stopping
from .token_log_probs import TokenLogProbs


def _without_recorder(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, TokenLogProbs | None]:
    """Split off a `TokenLogProbs` recorder, whose work the loop does itself."""
    recorders = [entry for entry in processors if type(entry) is TokenLogProbs]
    if len(recorders) != 1:
        return processors, None
    return LogitsProcessorList(entry for entry in processors if entry is not recorders[0]), recorders[0]


def decode_shared(
    call: CallContext,
    make_steps: StepsMaker,
    start: Start,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> FastDecodeOutput | FastDecodeEncoderDecoderOutput | Tensor:
    """Decode after `start_shared`; further arguments as for transformers' decoding loops."""
    model, config = call.model, call.config
    call.report.fused = call.structure.fused_names  # found while the device prefills
    input_ids = input_ids.long()  # dtype of sampled tokens
    stopping = Stopping(criteria, input_ids.device)
    processors, log_probs = _without_recorder(processors)
    require_same_ends(call, stopping.eos, stopping.max_length)
    choose = partial(
        choose_sampler,
        processors=processors,
        config=config,
        prompts=input_ids,
        logits=start.logits,
        computed_in=start.cache.computed_in,
    )
    with call.ranks.together():
        sampler, why = choose(call.options.sampler)
    if call.ranks.all(sampler.name == "fast") == [False] and sampler.name == "fast":
        sampler, why = choose("hf")[0], "another process of the model uses it"
    whose = ", on rank 0 for all processes" if call.ranks.count > 1 else ""
    call.report.sampler, call.report.sampler_reason = sampler.name, why + whose

    with decode_context(model, min(len(input_ids), call.options.max_rows or len(input_ids))):
        wave = Loop(call, input_ids, start, sampler, stopping, streamer, make_steps, log_probs).run()
    if not call.returns_cache:
        return wave.tokens
    kind = FastDecodeEncoderDecoderOutput if model.config.is_encoder_decoder else FastDecodeOutput
    return kind(
        sequences=wave.tokens,
        scores=tuple(wave.scores) if config.output_scores else None,
        logits=tuple(wave.logits) if config.output_logits else None,
        logprobs=torch.stack(wave.logprobs, dim=1) if wave.logprobs else None,
        **{CACHE: start.cache},
    )
