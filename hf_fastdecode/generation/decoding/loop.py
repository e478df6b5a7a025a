"""The decoding loop: transformers' own, step for step, but for when the host waits and which rows are computed.

Rows that ended leave the batch once enough of them have: time follows the rows still alive. On a GPU the host looks at
which rows are alive every few steps only, and what was drawn past the end is undone. A batch that does not fit into
memory goes on in smaller waves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ...attention.forest import Forest
from ...cache.shared import SharedContextCache
from ..prompts.start import Start
from ..report import CallReport
from ..steps.runners import EagerSteps, Steps
from .finished_row_poller import FinishedRowPoller
from .sampling import Drawn, Sampler
from .stopping import Stopping
from .token_log_probs import TokenLogProbs
from .wave import Wave, concatenate

logger = logging.getLogger("hf_fastdecode")

_REPLAY = 16
"""Tokens of a row that go through the model at once when a wave is taken up again."""


@dataclass
class Loop:
    """What one call decodes with.

    Attributes:
        prompts: ``[rows, width]`` int64.
        start: The prompts' nodes and first logits.
        sampler: Chooses tokens.
        stopping: When rows end.
        config: The call's generation config.
        streamer: Gets every token, if any.
        make_steps: Makes what runs the steps of a batch.
        make_eager: The same, for several tokens at once.
        report: Of the call.
        log_probs: Takes the drawn tokens' log-probabilities, if the caller asked for them.
    """

    prompts: Tensor
    start: Start
    sampler: Sampler
    stopping: Stopping
    config: GenerationConfig
    streamer: BaseStreamer | None
    make_steps: Callable[[SharedContextCache], Steps]
    make_eager: Callable[[SharedContextCache], EagerSteps]
    report: CallReport
    log_probs: TokenLogProbs | None = None

    def run(self) -> Wave:
        """Decode all rows.

        Returns:
            One wave with all of them; what lies behind a row's end is the pad token.
        """
        limit = self.stopping.max_length or self.config.max_length
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
                if len(wave.rows) == 1 or self._why_unsplittable:
                    error.add_note(f"{len(wave.rows)} rows at once; {self._why_unsplittable or 'use shorter prompts'}")
                    raise
                fits = False
            cache = None
            if not fits:  # not within `except`, where the traceback still holds the memory
                self.start.cache.set_forest(forest)  # drops the suffixes; the nodes stay
                self._split(wave, waiting)
        self.report.waves = len(done) if len(done) > 1 else 0
        if self.streamer is not None:
            self.streamer.end()
        wave = done[0] if len(done) == 1 else concatenate(done, self._pad)
        if self.log_probs is not None:
            self.log_probs.take(torch.stack(wave.logprobs, dim=1))
        return wave

    def _split(self, wave: Wave, waiting: deque[Wave]) -> None:
        half = (len(wave.rows) + 1) // 2
        if len(wave.rows) == len(self.prompts):
            logger.warning("%d rows do not fit into memory at once; going on in smaller waves", len(wave.rows))
        waiting.extendleft((wave.part(slice(half, None)), wave.part(slice(half))))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _resume(self, wave: Wave, forest: Forest) -> SharedContextCache:
        """A cache of the wave's rows, with the tokens that they had appended run through the model again."""
        base = self.start.cache
        cache = base.nodes_only(forest.select_rows(wave.rows.tolist()), max_suffix=base.state.max_suffix)
        width = self.prompts.shape[1]
        suffix_tokens = self.start.suffix_tokens[wave.rows]
        tokens = torch.cat([suffix_tokens, wave.tokens[:, width : width + max(0, wave.drawn - 1)]], dim=1)
        positions = self.start.positions[wave.rows][:, None] - suffix_tokens.shape[1]
        feed = self.make_eager(cache).feed
        for first in range(0, tokens.shape[1], _REPLAY):
            part = tokens[:, first : first + _REPLAY]
            feed(part, positions + torch.arange(first, first + part.shape[1], device=positions.device))
        return cache

    def _decode(self, wave: Wave, cache: SharedContextCache) -> None:
        """Draw tokens until every row of the wave has ended."""
        width, stopping = self.prompts.shape[1], self.stopping
        steps = self.make_steps(cache)
        positions = self.start.positions[wave.rows] + wave.drawn - 1
        logits = None if wave.drawn else self.start.logits[wave.rows.to(self.start.logits.device)]
        alive: Tensor | None = None  # where in the wave the batch's rows are; None for all of them
        numbers = wave.rows  # of the batch's rows in the call
        poller = FinishedRowPoller(
            self.prompts.device, synchronous=self._polls_synchronously, draws=self.sampler.generator_draws
        )
        limit = stopping.max_length or self.config.max_length
        while True:
            if logits is None:
                last = wave.tokens[:, width + wave.drawn - 1]
                logits = steps(last if alive is None else last[alive], positions)
            if self.log_probs is not None:
                self.log_probs.before_draw(logits, wave.drawn)
            drawn = self._draw(wave, logits, numbers, alive)
            tokens = drawn.tokens
            if stopping.pads:
                tokens = torch.where(wave.unfinished, tokens, self._pad)
            self._collect(wave, drawn)
            view = wave.with_next(tokens, width)
            given = view.contiguous() if stopping.custom else None
            ended = stopping.rows_end(tokens, given, self._scores(wave))
            if given is not None:
                view.copy_(given)  # as in stock, the user's code may change tokens in place
            wave.commit(ended)  # nothing of a step is taken over when something in it fails
            positions, logits = positions + 1, None
            if self.streamer is not None:
                self.streamer.put(tokens.cpu())
            if stopping.all_end(width + wave.drawn, view):
                break
            mask = poller.poll(wave.unfinished, wave.drawn) if ended is not None or stopping.timed else None
            if mask is None:
                continue
            count = int(mask.sum())
            if count == 0:
                break
            if self._can_compact and steps.should_compact(count, limit - width - wave.drawn):
                batch = torch.arange(len(mask), device=mask.device) if alive is None else alive.cpu()
                keep = mask[batch].nonzero().flatten()
                steps = steps.select(keep.tolist())
                positions = positions[keep.to(positions.device)]
                alive = batch[keep].to(positions.device)
                numbers = wave.rows[alive]
                self.report.compactions += 1
        wave.end()
        self._undo(wave, steps.cache, poller)

    def _undo(self, wave: Wave, cache: SharedContextCache, poller: FinishedRowPoller) -> None:
        """Forget the steps after the last row's end, which the host saw late."""
        last = int(wave.ends.max())
        overrun = wave.drawn - last
        if overrun:
            for steps in (wave.scores, wave.logits, wave.logprobs):
                del steps[last:]
            poller.restore_generator(last)
            cache.crop(-overrun)
        wave.drawn = last
        wave.tokens = wave.tokens[:, : self.prompts.shape[1] + last].contiguous()
        self.report.observe(cache)

    def _draw(self, wave: Wave, logits: Tensor, numbers: Tensor, alive: Tensor | None) -> Drawn:
        """Draw for the wave's rows from the logits of its batch."""
        if not self.sampler.needs_finished_rows:
            drawn = self.sampler.draw(logits, numbers, None, wave.drawn)
            return drawn if alive is None else drawn.spread(alive, len(wave.rows))
        if alive is not None:
            logits = logits.new_zeros(len(wave.rows), logits.shape[1]).index_copy_(0, alive.to(logits.device), logits)
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
        if logprobs is not None and (self.log_probs is not None or self.config.return_dict_in_generate):
            wave.logprobs.append(torch.where(wave.unfinished, logprobs, 0.0))
        if not self.config.return_dict_in_generate:
            return
        if self.config.output_scores and drawn.scores is not None:
            wave.scores.append(drawn.scores)
        if self.config.output_logits and drawn.logits is not None:
            wave.logits.append(drawn.logits)

    def _scores(self, wave: Wave) -> tuple[Tensor, ...] | None:
        return tuple(wave.scores) if self.config.return_dict_in_generate and self.config.output_scores else None

    @property
    def _can_compact(self) -> bool:
        """Not without a pad token to stand for them, not from a cache that the caller gets, and not where the user's
        own code may look at all rows' logits together."""
        return self.stopping.pads and not self.config.return_dict_in_generate and not self.sampler.custom

    @property
    def _why_unsplittable(self) -> str | None:
        """Why the rows cannot go on in smaller waves, with the remedy."""
        if self.config.return_dict_in_generate:
            return "with return_dict_in_generate they stay together: use fewer samples in a call"
        if self.streamer is not None or self.stopping.custom or self.sampler.custom:
            return "with a streamer, or processors or criteria of one's own, they stay together: use fewer samples"
        return None

    @property
    def _polls_synchronously(self) -> bool:
        """The user's own code must not run for steps that are undone, and a time limit means what the device did."""
        return self.streamer is not None or self.stopping.custom or self.stopping.timed or self.sampler.custom

    @property
    def _pad(self) -> Tensor:
        pad = self.config._pad_token_tensor
        return self.prompts.new_zeros(()) if pad is None else pad.to(self.prompts.device)
