"""Samplers: transformers' own code, and the sampling kernel."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from ...errors import Unsupported
from ...kernels.ahead import compiled_ahead
from ...kernels.failures import Kernel, KernelFailedError, failure
from ...kernels.sampling import limits
from .processor_chain import Chain, read_chain

if TYPE_CHECKING:  # it imports triton, which may be missing
    from ...kernels.sampling.api import Settings


class Drawn(NamedTuple):
    """Tokens sampled in one step.

    Attributes:
        tokens: ``[rows]`` int64.
        scores: ``[rows, vocabulary]`` fp32, processed; None if the sampler does not return them.
        logits: ``[rows, vocabulary]`` fp32, raw; likewise.
        logprobs: ``[rows]`` fp32: log-probabilities of the tokens under the raw logits; likewise.
    """

    tokens: Tensor
    scores: Tensor | None = None
    logits: Tensor | None = None
    logprobs: Tensor | None = None

    def scatter(self, active: Tensor, rows: int) -> Drawn:
        """Scatter to a batch of `rows` rows at the indices `active`; zeros elsewhere."""
        tokens = self.tokens.new_zeros(rows).index_copy_(0, active, self.tokens)
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = logprobs.new_zeros(rows).index_copy_(0, active, logprobs)
        return Drawn(tokens, logprobs=logprobs)

    @property
    def token_logprobs(self) -> Tensor | None:
        """As `logprobs`; computed from the logits where the sampler returns these alone."""
        if self.logprobs is not None or self.logits is None:
            return self.logprobs
        return self.logits.log_softmax(-1).gather(1, self.tokens[:, None])[:, 0]


class Sampler(Protocol):
    """Samples tokens from logits.

    Attributes:
        name: Name in reports.
        needs_finished_rows: Whether it needs finished rows' logits too, and the tokens so far.
        reads_tokens: Whether it looks at them, so that all rows of a draw must have as many.
        custom: Whether it runs third-party code, or code with state between steps.
        needs_all_rows: Whether it cannot draw for a part of the call's rows.
        generator_draws: Whether every step advances torch's generator of the device.
        refuses_refill: Why its rows cannot each be at a step of its own; None if they can.
    """

    name: str
    needs_finished_rows: bool
    reads_tokens: bool
    custom: bool
    needs_all_rows: bool
    generator_draws: bool
    refuses_refill: str | None

    def draw(self, logits: Tensor, rows: Tensor, input_ids: Tensor | None, step: int | Tensor) -> Drawn:
        """Sample a token for each row.

        Args:
            logits: ``[rows, vocabulary]`` in the model's dtype.
            rows: ``[rows]`` int64: the row numbers in the call.
            input_ids: ``[rows, length]`` so far, if `needs_finished_rows`; a `custom` sampler may modify it in place.
            step: Tokens sampled per row before, of every row or of each: ``[rows]`` int64.
        """
        ...

    def forget(self, rows: Tensor) -> None:
        """Forget what these rows, by their numbers in the call, have drawn: they begin anew."""
        ...


# transformers' processors with state between steps, or that call user code.
_KEEPS_STATE = {
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
}


class TransformersSampler:
    """transformers' own processors and sampling, operation by operation.

    Random draws depend on the number of rows, so finished rows are kept, and where only a part of the call's rows
    decodes, numbers are drawn for all of them: a row's token then depends on the generator's state alone.

    Args:
        rows: Rows of the call.
    """

    name = "hf"
    needs_finished_rows = True

    def __init__(self, processors: LogitsProcessorList, *, do_sample: bool, rows: int):
        self.processors, self.do_sample, self.rows = processors, do_sample, rows
        self.custom = any(
            not type(entry).__module__.startswith("transformers.") or type(entry).__name__ in _KEEPS_STATE
            for entry in processors
        )
        self.needs_all_rows = self.custom or any(type(entry).__name__.startswith("Encoder") for entry in processors)
        self.generator_draws, self.reads_tokens = do_sample, bool(processors)
        self.refuses_refill = "the sampler of transformers draws for all rows at once" if do_sample else None

    def draw(self, logits: Tensor, rows: Tensor, input_ids: Tensor | None, step: int | Tensor) -> Drawn:
        assert input_ids is not None
        logits = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = self._of_rows(rows)(input_ids, logits)
        if self.do_sample:
            tokens = self._multinomial(nn.functional.softmax(scores, dim=-1), rows)
        else:
            tokens = torch.argmax(scores, dim=-1)
        return Drawn(tokens, scores, logits)

    def forget(self, rows: Tensor) -> None:
        """Nothing is known of a row but its tokens."""

    def _of_rows(self, rows: Tensor) -> LogitsProcessorList:
        """The processors for these rows of the call."""
        if len(rows) == self.rows:
            return self.processors
        return LogitsProcessorList(
            RepetitionPenaltyLogitsProcessor(entry.penalty, entry.prompt_ignore_length.to(rows.device)[rows])
            if isinstance(getattr(entry, "prompt_ignore_length", None), Tensor)
            else entry
            for entry in self.processors
        )

    def _multinomial(self, probabilities: Tensor, rows: Tensor) -> Tensor:
        """Draw for these rows of the call, of ``[rows, vocabulary]``, what a draw for all of its rows gives them."""
        if len(rows) == self.rows:
            return torch.multinomial(probabilities, num_samples=1).squeeze(1)
        whole = probabilities.new_ones(self.rows, probabilities.shape[1]).index_copy_(0, rows, probabilities)
        return torch.multinomial(whole, num_samples=1).squeeze(1).index_select(0, rows)


def generator_state(device: torch.device) -> Tensor:
    """State of torch's generator of a device, on the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set it."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


# What kernels have been launched for, of those that are compiled.
_launched: set[tuple[torch.device, torch.dtype, int, Hashable]] = set()


class FastSampler:
    """The sampling kernel: transformers' distribution without a sort, with other random numbers.

    A row's random numbers depend on the seed, its number in the call and the step, not on the other rows. Raises
    KernelFailedError if the kernel cannot be compiled or launched; no generator was advanced then.

    Args:
        prompts: ``[rows, width]`` int64.
        logits: The first ones, ``[rows, vocabulary]``.
    """

    name = "fast"
    needs_finished_rows = False
    reads_tokens = False
    custom = False
    needs_all_rows = False
    generator_draws = False
    refuses_refill: str | None = None

    def __init__(self, chain: Chain, prompts: Tensor, logits: Tensor, *, do_sample: bool):
        from ...kernels.sampling.api import sample, seen_tokens  # needs Triton

        self._sample = sample
        self._settings = chain.settings(logits.device, logits.shape[1], greedy=not do_sample)
        self._seen: Tensor | None = None
        if chain.repetition_penalty != 1:
            ignored = chain.prompt_ignore_length
            counts = torch.as_tensor(0 if ignored is None else ignored, device=prompts.device).reshape(-1, 1)
            keep = (torch.arange(prompts.shape[1], device=prompts.device)[None] >= counts).expand_as(prompts)
            vocabulary, device = logits.shape[1], logits.device
            self._seen_of = lambda rows: seen_tokens(prompts[rows], vocabulary, keep[rows]).to(device)
            self._seen = self._seen_of(slice(None))
        self._rows: tuple[Tensor, Tensor] | None = None
        form = logits.device, logits.dtype, logits.shape[1], self._settings.compiled_for
        if form not in _launched or failure(Kernel.SAMPLING, logits.device):
            # Compile now, while falling back to another sampler is still possible.
            compiled_ahead(partial(_sample_nothing, logits, self._settings, self._seen), logits.device)
            if logits.is_cuda:
                _launched.add(form)
        if do_sample:
            self._settings.update(seed=int(torch.randint(2**62, (), device="cpu")))

    def draw(self, logits: Tensor, rows: Tensor, input_ids: Tensor | None, step: int | Tensor) -> Drawn:
        if self._rows is None or self._rows[0] is not rows:
            self._rows = rows, rows.to(device=logits.device, dtype=torch.int32)
        steps = None
        if isinstance(step, Tensor):
            steps = step.to(logits.device)
        else:
            self._settings.step.fill_(step)
        tokens, logprobs = self._sample(logits, self._rows[1], self._settings, seen=self._seen, steps=steps)
        return Drawn(tokens.to(rows.device), logprobs=logprobs.to(rows.device))  # prompts may stay on the CPU

    def forget(self, rows: Tensor) -> None:
        if self._seen is not None:
            self._seen[rows.to(self._seen.device)] = self._seen_of(rows)


def choose_sampler(
    asked: str,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    prompts: Tensor,
    logits: Tensor,
    *,
    computed_in: torch.dtype | None,
) -> tuple[Sampler, str]:
    """Choose the sampler of a call, with the reason; ValueError if ``fast`` was requested and cannot run.

    Args:
        asked: ``auto``, ``hf`` or ``fast``.
        prompts: ``[rows, width]`` int64.
        logits: The first ones, ``[rows, vocabulary]``.
        computed_in: Dtype of keys and values; under autocast it may differ from the logits'.
    """
    stock = TransformersSampler(processors, do_sample=config.do_sample, rows=len(prompts))
    if asked == "hf":
        return stock, "sampler='hf' was requested"
    try:
        chain = _chain(processors, config, prompts, logits)
        if asked == "auto" and computed_in is not None and computed_in.itemsize > 2:
            raise Unsupported(f"in {str(computed_in).removeprefix('torch.')} a seed gives the same tokens as stock")
        fast = FastSampler(chain, prompts, logits, do_sample=config.do_sample)
    except (Unsupported, KernelFailedError) as error:
        if asked == "fast":
            raise ValueError(f"sampler='fast' cannot draw these tokens: {error}; use sampler='auto'") from error
        return stock, str(error)
    why = "the kernel supports the call's processors"
    return fast, "sampler='fast' was requested" if asked == "fast" else why


def compile_sampler(
    asked: str, processors: LogitsProcessorList, config: GenerationConfig, prompts: Tensor, logits: Tensor
) -> None:
    """Launch the kernel that the sampler of a call would launch, if it has one; arguments as for `choose_sampler`."""
    if asked == "hf":
        return
    with suppress(Unsupported):
        chain = _chain(processors, config, prompts, logits)
        seen = torch.empty(1, (logits.shape[1] + 31) // 32, dtype=torch.int32, device=logits.device)
        settings = chain.settings(logits.device, logits.shape[1], greedy=not config.do_sample)
        _sample_nothing(logits, settings, seen)


def _sample_nothing(logits: Tensor, settings: Settings, seen: Tensor | None) -> None:
    """Launch the kernel over a skipped row."""
    from ...kernels.sampling.api import sample  # needs Triton

    skipped = torch.full((1,), -1, dtype=torch.int32, device=logits.device)
    sample(logits[:1], skipped, settings, seen=seen)


def _chain(processors: LogitsProcessorList, config: GenerationConfig, prompts: Tensor, logits: Tensor) -> Chain:
    """The chain for the kernel; raises `Unsupported` if the kernel does not support the call."""
    if refused := limits.refusal(logits.device, logits.dtype):
        raise Unsupported(refused)
    for name in ("output_scores", "output_logits"):
        if config.return_dict_in_generate and getattr(config, name):
            raise Unsupported(f"{name}=True needs tensors that the kernel does not compute")
    return read_chain(processors, prompt_length=prompts.shape[1])
