"""Decoding of one call with shared context, by a loop that is step for step equivalent to transformers' own.

Finished rows are compacted away, so step time tracks the active rows. On a GPU the host polls finished rows only every
few steps, and undoes steps after the last row's end. Where not all rows decode at once, by `max_rows` or by memory,
waiting ones take the slots of finished ones (`refill.Refill`), or decode in waves, one after another.

Each step of several processes that compute a model has the same rows: rank 0's tokens count, so that each may have
another seed, and so do its time limit and criteria. Rows leave the batch, or are split into waves, on all or on none.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..._compat import CACHE, optimized_for_decode, pad_token
from ...attention.forest import Forest
from ...cache.shared import SharedContextCache
from ...kernels.limits import refusal_of_logits
from ...log import logger
from ..call_context import CallContext
from ..prompts.packed import prefill_unshared
from ..prompts.start import Start
from ..routing.choices import RouterChoices
from ..steps.modes import EagerSteps, Steps, StepsMaker
from ..support import step_arguments
from .refill import Refill
from .sampling import Drawn, Sampler, TokenLogProbs, choose_sampler, generator_state, is_recorder, set_generator_state
from .stopping import Decisions, Ends, FinishedRowPoller, Stopping
from .waves import Logits, Wave, concatenate, rows_that_fit

_REPLAY = 16
"""Tokens per row and forward pass when a wave's suffixes are recomputed."""


@dataclass
class _Batch:
    """The rows of a wave that decode steps compute."""

    cache: SharedContextCache
    rows: Tensor  # [batch] int64: their numbers in the call
    positions: Tensor  # [batch] int64: of the tokens drawn last
    active: Tensor | None = None  # [batch] int64: the rows as indices of the wave; None for all of it
    steps: Steps | None = None  # none before the first step, which the first token does without

    def next_logits(self, last: Tensor, make_steps: StepsMaker) -> Tensor:
        """Logits ``[batch, vocabulary]`` after the `last` tokens of the wave's rows."""
        self.steps = self.steps or make_steps(self.cache)
        return self.steps(last if self.active is None else last[self.active], self.positions)

    def select(self, mask: Tensor, wave: Wave) -> None:
        """Keep the rows that a mask on the host, of the wave's rows, marks."""
        assert self.steps is not None
        batch = torch.arange(len(mask), device=mask.device) if self.active is None else self.active.cpu()
        keep = mask[batch].nonzero().flatten()
        self.steps = self.steps.select(keep.tolist())
        self.positions = self.positions[keep.to(self.positions.device)]
        self.active = batch[keep].to(self.positions.device)
        self.rows = wave.rows[self.active]


@dataclass
class Loop:
    """Decoding loop of one call, over prompts ``[rows, width]`` int64, with a recorder of log-probabilities if any."""

    call: CallContext
    prompts: Tensor
    start: Start
    stopping: Stopping
    streamer: BaseStreamer | None
    make_steps: StepsMaker
    log_probs: TokenLogProbs | None
    sampler: Sampler = field(init=False)
    decisions: Decisions = field(init=False)

    def run(self) -> Wave:
        """Decode all rows; returns one wave with all rows, padded after each row's end."""
        at_once = self._rows_at_once()
        if at_once < len(self.prompts):
            report, why = self.call.report, self._why_waves()
            report.rows_at_once, report.waves_reason = at_once, why
            self.start.cache.set_forest(self.start.cache.forest)  # drops the suffixes; the nodes stay
            if not why:
                return self._recorded(self._refilled(at_once))
        return self._recorded(self._in_waves(at_once))

    def _in_waves(self, at_once: int) -> Wave:
        rows = len(self.prompts)
        whole = Wave.of(self.prompts, self._new_tokens)
        if self.sampler.generator_draws:
            whole.generator = generator_state(self.prompts.device)
        waves = [whole.part(slice(first, first + at_once)) for first in range(0, rows, at_once)]
        waiting = deque(waves if at_once < rows else [whole])
        done: list[Wave] = []
        forest = self.start.cache.forest
        cache: SharedContextCache | None = self.start.cache
        if len(waiting) > 1:
            cache = None
        while waiting:
            wave = waiting.popleft()
            fits = True
            try:
                self._decode(wave, cache or self._resume(wave, forest))
                done.append(wave)
            except torch.OutOfMemoryError as error:
                why = "use shorter prompts" if len(wave.rows) == 1 else self._why_unsplittable(error)
                if why is not None:
                    error.add_note(f"{len(wave.rows)} rows at once; {why}")
                    raise
                fits = False
            cache = None
            if not fits:  # outside of `except`, where the traceback keeps the memory alive
                self.start.cache.set_forest(forest)  # drops the suffixes; the nodes stay
                self._split(wave, waiting)
        if self.stopping.draws_on:  # as stock does, until the last row of the call ends
            until = max(wave.drawn for wave in done)
            for wave in done:
                if wave.drawn < until:
                    self._decode(wave, self._resume(wave, forest), until)
        self.call.report.waves = len(done) if len(done) > 1 else 0
        if self.streamer is not None:
            self.streamer.end()
        wave = done[0] if len(done) == 1 else concatenate(done, self._pad)
        if len(done) > 1 and wave.generator is not None:
            set_generator_state(self.prompts.device, wave.generator)
        return wave

    def _recorded(self, wave: Wave) -> Wave:
        if self.log_probs is not None:
            self.log_probs.take(torch.stack(wave.logprobs, dim=1), wave.tokens[:, self.prompts.shape[1] :])
        return wave

    def _refilled(self, at_once: int) -> Wave:
        try:
            return self._refill(at_once)
        except torch.OutOfMemoryError as error:
            if at_once == 1:
                error.add_note("1 rows at once; use shorter prompts")
                raise
        at_once = self.call.report.rows_at_once = (at_once + 1) // 2
        logger.warning("rows do not fit in memory at once; all begin anew, %d at a time", at_once)
        self.sampler.forget(torch.arange(len(self.prompts), device=self.prompts.device))
        self.call.report.refilled = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._refilled(at_once)

    def _refill(self, at_once: int) -> Wave:
        base = self.start.cache
        cache = base.nodes_only(base.forest, max_suffix=base.state.max_suffix)
        # Captured steps go on with rows that wait now: they must know of windows that only these outgrow.
        cache.state.longest_to_come = cache.longest_row(1)
        cache.set_forest(base.forest.select_rows(range(at_once)))
        parts = self.start, self.sampler, self.stopping, self.make_steps, self.call.report
        return Refill(self.prompts, *parts, self._new_tokens, self._pad, self.log_probs).run(cache)

    def offered(self) -> list[int]:
        """Numbers of `Decisions`, of which processes take the smallest: rows that fit, and how the loop may run."""
        call, stopping, sampler, streams = self.call, self.stopping, self.sampler, self.streamer is not None
        fit, splits = len(self.prompts), not (streams or stopping.needs_all_rows or sampler.needs_all_rows)
        if splits and not call.returns_cache:
            logits = Logits(self.start.logits.device, self.start.logits.shape[1])
            drawing = 8 * fit * logits.vocabulary  # probabilities, and random numbers
            beside = drawing if sampler.generator_draws else 0
            fit = rows_that_fit(self.start.cache, fit, logits, self._new_tokens, beside=beside)
        return [
            fit,
            stopping.pads and not call.returns_cache and not sampler.custom,
            splits,
            not (streams or stopping.custom or sampler.custom or stopping.timed),
            not stopping.differs_by_process,
            not call.returns_cache and self.log_probs is None,
        ]

    def _rows_at_once(self) -> int:
        rows, most, fit = len(self.prompts), self.call.options.max_rows, self.decisions.fit
        if (why := self._why_unsplittable()) is not None:
            if most is not None and most < rows:
                raise ValueError(
                    f"max_rows={most} cannot hold for the {rows} rows of this call: {why}, or max_rows=None"
                )
            return rows
        if fit < min(rows, most or rows):
            logger.warning("%d rows do not fit in memory at once; %d decode at a time", rows, fit)
        return min(fit, most or rows)

    def _why_waves(self) -> str:
        """Why waiting rows cannot take the slots of finished ones; empty if they can."""
        if not self.call.alone:
            return "several processes compute the model"
        if not self.stopping.pads:
            return "without end tokens all rows end at one length"
        if self.stopping.counts_steps:
            return "a time limit counts for all rows"
        if self.stopping.custom:
            return "stop strings are looked for in rows of one length"
        if self.start.unshared is not None or self.start.suffix_tokens.shape[1]:
            return "rows begin with tokens of prompts that nodes do not hold"
        if self.start.cache.inputs is not None:
            return "decoders with an encoder count the positions of all rows alike"
        return self.sampler.refuses_refill or ""

    @property
    def _new_tokens(self) -> int:
        """Most tokens that a row draws."""
        return max(1, (self.stopping.max_length or self.call.config.max_length) - self.prompts.shape[1])

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

    def _decode(self, wave: Wave, cache: SharedContextCache, until: int = 0) -> None:
        """Sample tokens until every row of the wave is finished, or if all are, until each has so many."""
        stopping, device = self.stopping, self.prompts.device
        logits = None if wave.drawn else self.start.logits[wave.rows.to(self.start.logits.device)]
        batch = _Batch(cache, wave.rows, self.start.positions[wave.rows] + wave.drawn - 1)
        kept = bool(cache.state_layers) and self.call.returns_cache  # whose steps cannot be undone
        synchronous = kept or not self.decisions.polls_late
        poller = FinishedRowPoller(device, synchronous=synchronous, draws=self.sampler.generator_draws)
        counted = len(wave.rows) > 1 and self._why_unsplittable() is None
        pad = self._pad if stopping.pads else None
        if wave.generator is not None:
            set_generator_state(device, wave.generator)
        while True:
            if logits is None:
                self.decisions.reserve(cache, counted=counted)
                logits = batch.next_logits(wave.tokens[:, self.prompts.shape[1] + wave.drawn - 1], self.make_steps)
            ends = self._extend(wave, batch, logits, pad, until=until)
            if counted and wave.generator is not None:
                wave.generator = generator_state(device)
            logits, batch.positions = None, batch.positions + 1
            if ends.all:
                break
            mask = poller.poll(wave.unfinished, wave.drawn) if ends.rows is not None or stopping.timed else None
            if mask is None:
                continue
            count = int(mask.sum())
            if count == 0:
                break
            if self.decisions.can_compact and count != len(batch.rows):
                self._compact(wave, batch, mask, count)
        wave.end()
        self._undo(wave, cache, poller, until or int(wave.ends.max()))

    def _extend(self, wave: Wave, batch: _Batch, logits: Tensor, pad: Tensor | None, *, until: int) -> Ends:
        """Draw the wave's next tokens, and ask what ends with them."""
        stopping = self.stopping
        if self.log_probs is not None:
            self.log_probs.before_draw(logits, wave.drawn)

        def end(drawn: Drawn) -> Ends:
            tokens = drawn.tokens if pad is None else torch.where(wave.unfinished, drawn.tokens, pad)
            self._collect(wave, drawn)
            view = wave.with_next(tokens, self.prompts.shape[1])
            given = view.contiguous() if stopping.custom else None
            ended = None
            if not until:
                scores = tuple(wave.scores) if self.call.returns_cache and self.call.config.output_scores else None
                ended = stopping.rows_end(tokens, wave.rows, wave.drawn + 1, given, scores)
            if given is not None:
                view.copy_(given)  # as in stock, the user's code may change tokens in place
            over = stopping.all_end(view.shape[1], view) or wave.drawn + 1 == until
            return Ends(tokens, ended, over)

        ends = self.decisions.step(self._draw(wave, logits, batch.rows, batch.active), wave.unfinished, end)
        wave.commit(ends.rows)  # last, so that a failed step leaves the wave unchanged
        if self.streamer is not None:
            self.streamer.put(ends.tokens.cpu())
        return ends

    def _compact(self, wave: Wave, batch: _Batch, mask: Tensor, count: int) -> None:
        """Let finished rows leave the batch if that pays; `mask` says of the wave's rows which `count` go on."""
        left = self._new_tokens - wave.drawn
        steps = batch.steps = batch.steps or self.make_steps(batch.cache)
        if self.call.ranks.all(steps.should_compact(count, left)) == [True]:
            batch.select(mask, wave)
            self.call.report.compactions += 1

    def _undo(self, wave: Wave, cache: SharedContextCache, poller: FinishedRowPoller, last: int) -> None:
        """Remove steps run after the last row's end, with `last` tokens, before the host saw it."""
        stepped = wave.drawn > 1
        overrun = wave.drawn - last
        if overrun:
            for steps in (wave.scores, wave.logits, wave.logprobs):
                del steps[last:]
            poller.restore_generator(last)
            if not cache.state_layers:  # which cannot go back, and nobody has the cache
                cache.crop(-overrun)
        if wave.generator is not None:
            wave.generator = generator_state(self.prompts.device)
        wave.drawn = last
        wave.tokens = wave.tokens[:, : self.prompts.shape[1] + last].contiguous()
        if stepped:  # else the report has seen the last pass
            self.call.report.observe(cache)

    def _draw(self, wave: Wave, logits: Tensor, row_numbers: Tensor, active: Tensor | None) -> Drawn:
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
        recorded = self.log_probs is not None
        logprobs = drawn.token_logprobs if recorded else drawn.logprobs
        if logprobs is not None and (recorded or self.call.returns_cache):
            wave.logprobs.append(torch.where(wave.unfinished, logprobs, 0.0))
        if not self.call.returns_cache:
            return
        if self.call.config.output_scores and drawn.scores is not None:
            wave.scores.append(drawn.scores)
        if self.call.config.output_logits and drawn.logits is not None:
            wave.logits.append(drawn.logits)

    def _why_unsplittable(self, error: torch.OutOfMemoryError | None = None) -> str | None:
        """Why the batch cannot be split into waves, after an error if any, with the remedy; None if it can."""
        if self.call.returns_cache:
            return "return_dict_in_generate does not allow splitting them: use fewer samples per call"
        if not self.decisions.splits:
            return "a streamer, or custom processors or criteria, do not allow splitting them: use fewer samples"
        if error is not None and not self.call.ranks.all_raise(error):
            return (
                "other processes of the model, which did not run out of memory, cannot split them: use fewer samples"
            )
        return None

    @property
    def _pad(self) -> Tensor:
        pad = pad_token(self.call.config)
        return self.prompts.new_zeros(()) if pad is None else pad.to(self.prompts.device)


def decode_shared(
    call: CallContext,
    make_steps: StepsMaker,
    start: Start,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> tuple[FastDecodeOutput | FastDecodeEncoderDecoderOutput | Tensor, Tensor]:
    """Decode after `start_shared`; further arguments as for transformers' decoding loops.

    Returns:
        The call's output, and ``[rows]`` int64: tokens that each row drew up to its end.
    """
    model, config = call.model, call.config
    call.report.fused = call.structure.fused_names  # found while the device prefills
    input_ids = input_ids.long()  # dtype of sampled tokens
    stopping = Stopping(criteria, input_ids.device)
    recorders = [one for one in processors if is_recorder(one)]
    log_probs = recorders[0] if len(recorders) == 1 else None
    processors = LogitsProcessorList(one for one in processors if one is not log_probs)
    form = start.logits.device, start.logits.dtype
    choose = partial(
        choose_sampler,
        processors=processors,
        config=config,
        prompts=input_ids,
        logits=start.logits,
        computed_in=start.cache.computed_in,
        refused=call.structure.kept(("logits that kernels read", *form), lambda: refusal_of_logits(*form)),
    )
    ends = {"stopping_criteria's end tokens": stopping.eos, "max_length": stopping.max_length}
    loop = Loop(call, input_ids, start, stopping, streamer, make_steps, log_probs)
    with call.together() as offer:
        offer.compare(lambda: ends, "generate was called differently")
        loop.sampler, why = choose(call.options.sampler)
        is_fast = loop.sampler.name == "fast"
        offer.numbers = [is_fast, -is_fast, *loop.offered()]
    least, most, *numbers = offer.numbers
    if least != -most:
        if is_fast:
            loop.sampler, why = choose("hf")[0], "another process of the model uses it"
        with call.together() as offer:
            offer.numbers = loop.offered()
        numbers = offer.numbers
    loop.decisions = Decisions(call.ranks, numbers[0], *map(bool, numbers[1:]))
    whose = "" if call.alone else ", on rank 0 for all processes"
    call.report.sampler, call.report.sampler_reason = loop.sampler.name, why + whose
    with decode_context(model, min(len(input_ids), call.options.max_rows or len(input_ids))):
        wave = loop.run()
    if not call.returns_cache:
        return wave.tokens, wave.ends
    kind = FastDecodeEncoderDecoderOutput if model.config.is_encoder_decoder else FastDecodeOutput
    output = kind(
        sequences=wave.tokens,
        scores=tuple(wave.scores) if config.output_scores else None,
        logits=tuple(wave.logits) if config.output_logits else None,
        logprobs=torch.stack(wave.logprobs, dim=1) if wave.logprobs else None,
        **{CACHE: start.cache},
    )
    return output, wave.ends


@dataclass
class FastDecodeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with ``return_dict_in_generate``: transformers' fields plus log-probabilities.

    Attributes:
        logprobs: ``[rows, new_tokens]`` fp32: log-probability of each sampled token under the raw logits, natural log,
            0 after a row's end; None with transformers' own sampler, unless the model is enabled with
            ``log_probs="trainer"``.
        processed_logprobs: Likewise in the distribution that it was drawn from: after penalties, temperature, top-k,
            top-p and others; with greedy search after processors alone. A drawn token that top-k, top-p or the like
            would remove by rounding counts as kept. With ``log_probs="trainer"``, and processors of transformers
            that need neither a state between steps nor all rows; else None.
        router_choices: The experts that routers chose, with ``output_router_choices=True``; else None.
    """

    logprobs: Tensor | None = None
    processed_logprobs: Tensor | None = None
    router_choices: RouterChoices | None = None


@dataclass
class FastDecodeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """Output of a model with an encoder: transformers' fields plus `logprobs`, see `FastDecodeOutput`."""

    logprobs: Tensor | None = None


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of configs: experts of a layer."""


def decode_context(model: PreTrainedModel, rows: int) -> AbstractContextManager[None]:
    """transformers' context of decode steps, except where it would slow down steps of many rows.

    There experts run by ``batched_mm``, which first copies the weights of each row's experts, and not by
    ``grouped_mm``, which reads the weights of each chosen expert once. fp32 models keep the context, so that they
    compute what stock computes.
    """
    config = model.config.get_text_config(decoder=True)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    experts = next((count for name in _COUNTS if (count := getattr(config, name, None))), None)
    half = model.dtype in (torch.float16, torch.bfloat16)
    if half and experts is not None and rows * chosen >= experts:
        return nullcontext()
    return optimized_for_decode(model)
