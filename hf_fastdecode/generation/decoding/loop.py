"""Decoding of one call with shared context, by a loop that is step for step equivalent to transformers' own.

Finished rows are compacted away, so step time tracks the active rows. On a GPU the host polls finished rows only every
few steps, and undoes steps after the last row's end. A batch that does not fit in memory is split into smaller waves.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..._compat import CACHE, pad_token
from ...attention.forest import Forest
from ...cache.shared import SharedContextCache
from ...parallel.agreement import NoRoomError
from ..call_context import CallContext
from ..identity import Fingerprint
from ..prompts.start import Start
from ..prompts.unshared_prompts import prefill_unshared
from ..same_calls import require_same_ends
from ..steps.modes import StepsMaker
from ..steps.runners import EagerSteps, Steps
from ..support import step_arguments
from .decisions import Decisions
from .experts import decode_context
from .sampling import Drawn, Sampler, choose_sampler
from .stopping import FinishedRowPoller, Stopping
from .token_log_probs import TokenLogProbs
from .wave import Wave, concatenate

logger = logging.getLogger("hf_fastdecode")

_REPLAY = 16
"""Tokens per row and forward pass when a wave's suffixes are recomputed."""


@dataclass
class Loop:
    """Decoding loop of one call, over prompts ``[rows, width]`` int64, with a recorder of log-probabilities if any."""

    call: CallContext
    prompts: Tensor
    start: Start
    sampler: Sampler
    stopping: Stopping
    streamer: BaseStreamer | None
    make_steps: StepsMaker
    log_probs: TokenLogProbs | None = None
    decisions: Decisions = field(init=False)

    def run(self) -> Wave:
        """Decode all rows; returns one wave with all rows, padded after each row's end."""
        self.decisions = self._agree()
        limit = self.stopping.max_length or self.call.config.max_length
        waiting = deque([Wave.of(self.prompts, max(1, limit - self.prompts.shape[1]))])
        done: list[Wave] = []
        forest = self.start.cache.forest
        cache: SharedContextCache | None = self.start.cache
        while waiting:
            wave = waiting.popleft()
            fits = True
            try:
                self._decode(wave, cache or self._resume(wave, forest))
                done.append(wave)
            except torch.OutOfMemoryError as error:
                why = "use shorter prompts" if len(wave.rows) == 1 else self._why_unsplittable(error)
                if why:
                    error.add_note(f"{len(wave.rows)} rows at once; {why}")
                    raise
                fits = False
            cache = None
            if not fits:  # outside of `except`, where the traceback keeps the memory alive
                self.start.cache.set_forest(forest)  # drops the suffixes; the nodes stay
                self._split(wave, waiting)
        self.call.report.waves = len(done) if len(done) > 1 else 0
        if self.streamer is not None:
            self.streamer.end()
        wave = done[0] if len(done) == 1 else concatenate(done, self._pad)
        if self.log_probs is not None:
            self.log_probs.take(torch.stack(wave.logprobs, dim=1))
        return wave

    def _split(self, wave: Wave, waiting: deque[Wave]) -> None:
        half = (len(wave.rows) + 1) // 2
        if len(wave.rows) == len(self.prompts):
            logger.warning("%d rows do not fit in memory at once; continuing in smaller waves", len(wave.rows))
        waiting.extendleft((wave.part(slice(half, None)), wave.part(slice(half))))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _resume(self, wave: Wave, forest: Forest) -> SharedContextCache:
        """Create a cache for the wave's rows and recompute their suffixes."""
        base = self.start.cache
        rows = wave.rows.tolist()
        cache = base.nodes_only(forest.select_rows(rows), max_suffix=base.state.max_suffix)
        if self.start.unshared is not None:
            unshared = self.start.unshared.of_rows(rows)
            prefill_unshared(self.call.model, cache, unshared, max_tokens=self.call.max_prefill_tokens)
        width = self.prompts.shape[1]
        suffix_tokens = self.start.suffix_tokens[wave.rows]
        if cache.inputs is not None:  # decoders with an encoder count positions, also those of padding
            cache.state.padded_length = width - suffix_tokens.shape[1]
        tokens = torch.cat([suffix_tokens, wave.tokens[:, width : width + max(0, wave.drawn - 1)]], dim=1)
        positions = self.start.positions[wave.rows][:, None] - suffix_tokens.shape[1]
        feed = EagerSteps(self.call.model, cache, step_arguments(self.call.arguments)).feed
        layout = self.call.structure.layout
        at_once = 1 if layout.own or layout.states else _REPLAY  # as in the steps, and kernels of own layers
        for first in range(0, tokens.shape[1], at_once):
            part = tokens[:, first : first + at_once]
            feed(part, positions + torch.arange(first, first + part.shape[1], device=positions.device))
        return cache

    def _decode(self, wave: Wave, cache: SharedContextCache) -> None:
        """Sample tokens until every row of the wave is finished."""
        width, stopping = self.prompts.shape[1], self.stopping
        steps: Steps | None = None  # made after the first token, which needs no step
        positions = self.start.positions[wave.rows] + wave.drawn - 1
        logits = None if wave.drawn else self.start.logits[wave.rows.to(self.start.logits.device)]
        active: Tensor | None = None  # the batch's rows as indices of the wave; None for all
        row_numbers = wave.rows  # the batch's row numbers in the call
        kept = bool(cache.state_layers) and self.call.returns_cache  # whose steps cannot be undone
        synchronous = self.decisions.polls_synchronously or kept
        poller = FinishedRowPoller(self.prompts.device, synchronous=synchronous, draws=self.sampler.generator_draws)
        limit = stopping.max_length or self.call.config.max_length
        while True:
            if logits is None:
                self.decisions.reserve(cache)
                steps = steps or self.make_steps(cache)
                last = wave.tokens[:, width + wave.drawn - 1]
                logits = steps(last if active is None else last[active], positions)
            if self.log_probs is not None:
                self.log_probs.before_draw(logits, wave.drawn)
            drawn = self.decisions.drawn(self._draw(wave, logits, row_numbers, active))
            tokens = drawn.tokens
            if stopping.pads:
                tokens = torch.where(wave.unfinished, tokens, self._pad)
            self._collect(wave, drawn)
            view = wave.with_next(tokens, width)
            given = view.contiguous() if stopping.custom else None
            ended = self.decisions.ended(stopping.rows_end(tokens, given, self._scores(wave)), wave.unfinished)
            if given is not None:
                view.copy_(given)  # as in stock, the user's code may change tokens in place
            wave.commit(ended)  # last, so that a failed step leaves the wave unchanged
            positions, logits = positions + 1, None
            if self.streamer is not None:
                self.streamer.put(tokens.cpu())
            if self.decisions.over(stopping.all_end(width + wave.drawn, view)):
                break
            mask = poller.poll(wave.unfinished, wave.drawn) if ended is not None or stopping.timed else None
            if mask is None:
                continue
            count = int(mask.sum())
            if count == 0:
                break
            if not self.decisions.can_compact or count == len(mask if active is None else active):
                continue
            steps = steps or self.make_steps(cache)
            if self.decisions.compacts(steps.should_compact(count, limit - width - wave.drawn)):
                batch = torch.arange(len(mask), device=mask.device) if active is None else active.cpu()
                keep = mask[batch].nonzero().flatten()
                steps = steps.select(keep.tolist())
                positions = positions[keep.to(positions.device)]
                active = batch[keep].to(positions.device)
                row_numbers = wave.rows[active]
                self.call.report.compactions += 1
        wave.end()
        self._undo(wave, cache, poller)

    def _undo(self, wave: Wave, cache: SharedContextCache, poller: FinishedRowPoller) -> None:
        """Remove steps run after the last row's end, before the host saw it."""
        last, stepped = int(wave.ends.max()), wave.drawn > 1
        overrun = wave.drawn - last
        if overrun:
            for steps in (wave.scores, wave.logits, wave.logprobs):
                del steps[last:]
            poller.restore_generator(last)
            if not cache.state_layers:  # which cannot go back, and nobody has the cache
                cache.crop(-overrun)
        wave.drawn = last
        wave.tokens = wave.tokens[:, : self.prompts.shape[1] + last].contiguous()
        if stepped:  # else the report has seen the last pass
            self.call.report.observe(cache)

    def _draw(self, wave: Wave, logits: Tensor, row_numbers: Tensor, active: Tensor | None) -> Drawn:
        """Sample tokens for the wave's rows from the batch's logits."""
        if not self.sampler.needs_finished_rows:
            drawn = self.sampler.draw(logits, row_numbers, None, wave.drawn)
            return drawn if active is None else drawn.scatter(active, len(wave.rows))
        if active is not None:
            logits = logits.new_zeros(len(wave.rows), logits.shape[1]).index_copy_(0, active.to(logits.device), logits)
        view = wave.tokens[:, : self.prompts.shape[1] + wave.drawn]
        input_ids = view.contiguous()
        drawn = self.sampler.draw(logits, wave.rows, input_ids, wave.drawn)
        if self.sampler.custom:
            view.copy_(input_ids)  # as in stock, the user's code may change tokens in place
        return drawn

    def _collect(self, wave: Wave, drawn: Drawn) -> None:
        logprobs = drawn.logprobs
        if self.log_probs is not None and logprobs is None and drawn.logits is not None:
            logprobs = drawn.logits.log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
        if logprobs is not None and (self.log_probs is not None or self.call.returns_cache):
            wave.logprobs.append(torch.where(wave.unfinished, logprobs, 0.0))
        if not self.call.returns_cache:
            return
        if self.call.config.output_scores and drawn.scores is not None:
            wave.scores.append(drawn.scores)
        if self.call.config.output_logits and drawn.logits is not None:
            wave.logits.append(drawn.logits)

    def _scores(self, wave: Wave) -> tuple[Tensor, ...] | None:
        return tuple(wave.scores) if self.call.returns_cache and self.call.config.output_scores else None

    def _agree(self) -> Decisions:
        call, recorded = self.call, self.log_probs is not None
        return Decisions.agreed(
            call.ranks,
            self.stopping,
            self.sampler,
            streams=self.streamer is not None,
            returns_cache=call.returns_cache,
            keeps_logprobs=call.returns_cache or recorded,
        )

    def _why_unsplittable(self, error: torch.OutOfMemoryError) -> str | None:
        """Why the batch cannot be split into waves after an error, with the remedy; None if it can."""
        if self.call.returns_cache:
            return "return_dict_in_generate does not allow splitting them: use fewer samples per call"
        if self.decisions.watched:
            return "a streamer, or custom processors or criteria, do not allow splitting them: use fewer samples"
        if self.call.ranks.count > 1 and not isinstance(error, NoRoomError):
            return (
                "other processes of the model, which did not run out of memory, cannot split them: use fewer samples"
            )
        return None

    @property
    def _pad(self) -> Tensor:
        pad = pad_token(self.call.config)
        return self.prompts.new_zeros(()) if pad is None else pad.to(self.prompts.device)


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
    """The same of a model with an encoder: transformers' fields plus `logprobs`, see `FastDecodeOutput`."""

    logprobs: Tensor | None = None


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

    if call.returns_cache:  # the caller may keep it; taken while the device prefills
        start.cache.fingerprint = start.cache.fingerprint or Fingerprint(model)
    with decode_context(model, len(input_ids)):
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
