"""Decoding of one call with shared context, from its prefill to its output; outputs and contexts of such calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..._compat import CACHE, optimized_for_decode
from ..call_context import CallContext
from ..prompts.start import Start
from ..same_calls import require_same_ends
from ..steps.modes import StepsMaker
from .loop import Loop
from .sampling import choose_sampler
from .stopping import Stopping
from .token_log_probs import TokenLogProbs


def _without_recorder(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, TokenLogProbs | None]:
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


@dataclass
class FastDecodeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with ``return_dict_in_generate``: transformers' fields plus `logprobs`.

    Attributes:
        logprobs: ``[rows, new_tokens]`` fp32: log-probability of each sampled token under the raw logits, natural log,
            0 after a row's end; None with transformers' own sampler.
    """

    logprobs: Tensor | None = None


@dataclass
class FastDecodeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """Output of a model with an encoder: transformers' fields plus `logprobs`, see `FastDecodeOutput`."""

    logprobs: Tensor | None = None


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of configs: experts of a layer."""


def decode_context(model: PreTrainedModel, rows: int) -> AbstractContextManager[None]:
    """transformers' context of decode steps, except where it would slow down steps of many rows.

    In its context the experts run by ``batched_mm``, which first copies the weights of each row's experts, and is for
    few rows. Outside of it they run by ``grouped_mm``, which reads the weights of each chosen expert once. From as
    many pairs of row and expert as there are experts, the copies are several times what all experts have. fp32 models
    keep the context, so that they compute what stock computes.
    """
    config = model.config.get_text_config(decoder=True)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    experts = next((count for name in _COUNTS if (count := getattr(config, name, None))), None)
    half = model.dtype in (torch.float16, torch.bfloat16)
    if half and experts is not None and rows * chosen >= experts:
        return nullcontext()
    return optimized_for_decode(model)
