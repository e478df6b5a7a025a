"""How the next tokens are chosen from the logits."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from ...kernels.failures import KernelFailedError
from ...kernels.sampling import limits
from .processor_chain import Chain, read_chain


class Drawn(NamedTuple):
    """Tokens of one step.

    Attributes:
        tokens: ``[rows]`` int64.
        scores: ``[rows, vocabulary]`` fp32, processed; None where the sampler makes none.
        logits: ``[rows, vocabulary]`` fp32, as the model gave them; likewise.
        logprobs: ``[rows]`` fp32: log-probabilities of the tokens by the raw logits; likewise.
    """

    tokens: Tensor
    scores: Tensor | None = None
    logits: Tensor | None = None
    logprobs: Tensor | None = None

    def spread(self, alive: Tensor, rows: int) -> Drawn:
        """The same in a batch of `rows` rows, among which these are the rows `alive`; zeros elsewhere."""
        tokens = self.tokens.new_zeros(rows).index_copy_(0, alive, self.tokens)
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = logprobs.new_zeros(rows).index_copy_(0, alive, logprobs)
        return Drawn(tokens, logprobs=logprobs)


class Sampler(Protocol):
    """Chooses tokens.

    Attributes:
        name: For reports.
        whole: Whether it wants the logits of rows that ended too, and the tokens so far.
        custom: Whether it runs code that is not transformers' or ours, or that keeps a state from step to step.
        generator_draws: Whether it draws from torch's generator of the device, step by step.
    """

    name: str
    needs_finished_rows: bool
    custom: bool
    generator_draws: bool

    def draw(self, logits: Tensor, rows: Tensor, input_ids: Tensor | None, step: int) -> Drawn:
        """Choose a token for each row.

        Args:
            logits: ``[rows, vocabulary]`` in the model's dtype.
            rows: ``[rows]`` int64: the rows' numbers in the call.
            input_ids: ``[rows, length]`` so far, when `whole`; what a `custom` one changes in it stays changed.
            step: Tokens that the rows have drawn before.
        """
        ...


# transformers' processors that keep something from step to step, or call the user's code.
_KEEPS_STATE = {
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
}


class TransformersSampler:
    """transformers' own processors and draws, operation by operation as in its sampling loop.

    A draw depends on the number of rows, so it is given all rows to the end.
    """

    name = "hf"
    needs_finished_rows = True

    def __init__(self, processors: LogitsProcessorList, *, do_sample: bool):
        self.processors, self.do_sample = processors, do_sample
        self.custom = any(
            not type(entry).__module__.startswith("transformers.") or type(entry).__name__ in _KEEPS_STATE
            for entry in processors
        )
        self.generator_draws = do_sample

    def draw(self, logits: Tensor, rows: Tensor, input_ids: Tensor | None, step: int) -> Drawn:
        assert input_ids is not None
        logits = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = self.processors(input_ids, logits)
        if self.do_sample:
            tokens = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        return Drawn(tokens, scores, logits)


class FastSampler:
    """The sampling kernel: transformers' distribution, drawn without a sort and with other random numbers.

    A row's draws depend on the seed, its number in the call and the step, not on which rows are computed beside it.

    Args:
        chain: What the call's processors do.
        prompts: ``[rows, width]`` int64.
        logits: The first ones, ``[rows, vocabulary]``.
        do_sample: Draw; else take the most likely token.

    Raises:
        KernelFailedError: The kernel cannot be compiled or launched. Nothing was drawn, no generator was advanced.
    """

    name = "fast"
    needs_finished_rows = False
    custom = False
    generator_draws = False

    def __init__(self, chain: Chain, prompts: Tensor, logits: Tensor, *, do_sample: bool):
        from ...kernels.sampling.api import sample, seen_tokens  # needs Triton

        self._sample = sample
        self._settings = chain.settings(logits.device, greedy=not do_sample)
        self._seen: Tensor | None = None
        if chain.repetition_penalty != 1:
            ignored = chain.prompt_ignore_length
            counts = torch.as_tensor(0 if ignored is None else ignored, device=prompts.device).reshape(-1, 1)
            keep = torch.arange(prompts.shape[1], device=prompts.device)[None] >= counts
            self._seen = seen_tokens(prompts, logits.shape[1], keep.expand_as(prompts)).to(logits.device)
        self._rows: tuple[Tensor, Tensor] | None = None
        # A launch for a row that is skipped compiles the kernel, while others can still take its place.
        skipped = torch.full((1,), -1, dtype=torch.int32, device=logits.device)
        sample(logits[:1], skipped, self._settings, seen=self._seen)
        if do_sample:
            self._settings.update(seed=int(torch.randint(2**62, (), device="cpu")))

    def draw(self, logits: Tensor, rows: Tensor, input_ids: Tensor | None, step: int) -> Drawn:
        if self._rows is None or self._rows[0] is not rows:
            self._rows = rows, rows.to(device=logits.device, dtype=torch.int32)
        self._settings.step.fill_(step)
        tokens, logprobs = self._sample(logits, self._rows[1], self._settings, seen=self._seen)
        return Drawn(tokens.to(rows.device), logprobs=logprobs.to(rows.device))  # prompts may stay on the CPU


def choose_sampler(
    asked: str,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    prompts: Tensor,
    logits: Tensor,
    *,
    computed_in: torch.dtype,
) -> tuple[Sampler, str]:
    """Who draws the tokens of a call, and why.

    Args:
        asked: ``auto``, ``hf`` or ``fast``.
        processors: As `generate` prepared them.
        config: The call's generation config.
        prompts: ``[rows, width]`` int64.
        logits: The first ones, ``[rows, vocabulary]``.
        computed_in: The dtype of keys and values: under autocast logits may be float32 all the same.

    Raises:
        ValueError: ``fast`` was asked for and cannot draw this call's tokens.
    """
    stock = TransformersSampler(processors, do_sample=config.do_sample)
    if asked == "hf":
        return stock, "sampler='hf' was asked for"
    reason, chain = _refusal(processors, config, prompts, logits)
    if asked == "auto" and reason is None and computed_in.itemsize > 2:
        reason = f"in {str(computed_in).removeprefix('torch.')} a seed draws the tokens that it draws in stock"
    if chain is not None and reason is None:
        try:
            fast = FastSampler(chain, prompts, logits, do_sample=config.do_sample)
        except KernelFailedError as error:
            reason = str(error)
        else:
            why = "the kernel draws what the processors leave"
            return fast, "sampler='fast' was asked for" if asked == "fast" else why
    if asked == "fast":
        raise ValueError(f"sampler='fast' cannot draw these tokens: {reason}; use sampler='auto'")
    return stock, reason or ""


def _refusal(
    processors: LogitsProcessorList, config: GenerationConfig, prompts: Tensor, logits: Tensor
) -> tuple[str | None, Chain | None]:
    """Why the kernel cannot draw, or what it draws."""
    if refused := limits.refusal(logits.device, logits.dtype):
        return refused, None
    for name in ("output_scores", "output_logits"):
        if config.return_dict_in_generate and getattr(config, name):
            return f"{name}=True asks for what it does not compute", None
    chain, reason = read_chain(processors, prompt_length=prompts.shape[1])
    return (None, chain) if chain is not None else (reason, None)
