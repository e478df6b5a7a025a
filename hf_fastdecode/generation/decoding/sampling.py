"""Samplers: transformers' own code, and the sampling kernel with settings read from logits processors.

`TokenLogProbs` records log-probabilities of what they draw.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ...errors import Unsupported
from ...kernels.ahead import compiled_ahead
from ...kernels.failures import Kernel, KernelFailedError, failure
from ...kernels.limits import refusal_of_logits

if TYPE_CHECKING:  # it imports triton, which may be missing
    from ...kernels.sampling.api import Settings


class Drawn(NamedTuple):
    """Tokens sampled in one step; scores, logits and log-probabilities if the sampler returns them."""

    tokens: Tensor  # [rows] int64
    scores: Tensor | None = None  # [rows, vocabulary] fp32, processed
    logits: Tensor | None = None  # [rows, vocabulary] fp32, raw
    logprobs: Tensor | None = None  # [rows] fp32, of the tokens under the raw logits

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


class Sampler(ABC):
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
    needs_finished_rows = reads_tokens = custom = needs_all_rows = generator_draws = False
    refuses_refill: str | None = None

    @abstractmethod
    def draw(self, logits: Tensor, rows: Tensor, input_ids: Tensor | None, step: int | Tensor) -> Drawn:
        """Sample a token for each row.

        Args:
            logits: ``[rows, vocabulary]`` in the model's dtype.
            rows: ``[rows]`` int64: the row numbers in the call.
            input_ids: ``[rows, length]`` so far, if `needs_finished_rows`; a `custom` sampler may modify it in place.
            step: Tokens sampled per row before, of every row or of each: ``[rows]`` int64.
        """

    def forget(self, rows: Tensor) -> None:  # noqa: B027
        """Forget what these rows, by their numbers in the call, have drawn: they begin anew."""


# transformers' processors with state between steps, or that call user code.
_KEEPS_STATE = {
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
}


class TransformersSampler(Sampler):
    """transformers' own processors and sampling, operation by operation.

    Random draws depend on the number of rows, so finished rows are kept, and where only a part of the call's rows
    decodes, numbers are drawn for all `rows` of the call: a row's token then depends on the generator's state alone.
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
        scores = self.processors_of(rows)(input_ids, logits)
        if self.do_sample:
            tokens = self._multinomial(nn.functional.softmax(scores, dim=-1), rows)
        else:
            tokens = torch.argmax(scores, dim=-1)
        return Drawn(tokens, scores, logits)

    def processors_of(self, rows: Tensor) -> LogitsProcessorList:
        """The processors for these rows ``[rows]`` of the call, by their numbers."""
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
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


# What kernels have been launched for, of those that are compiled.
_launched: set[tuple[torch.device, torch.dtype, int, Hashable]] = set()


class FastSampler(Sampler):
    """The sampling kernel: transformers' distribution without a sort, with other random numbers.

    A row's random numbers depend on the seed, its number in the call and the step, not on the other rows. Raises
    KernelFailedError if the kernel cannot be compiled or launched; no generator was advanced then.

    Args:
        prompts: ``[rows, width]`` int64.
        logits: The first ones, ``[rows, vocabulary]``.
    """

    name = "fast"

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


_CANNOT_DRAW = "sampler='fast' cannot draw these tokens: {}; use sampler='auto'"


def choose_sampler(
    asked: str,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    prompts: Tensor,
    logits: Tensor,
    *,
    computed_in: torch.dtype | None,
    refused: str | None = None,
) -> tuple[Sampler, str]:
    """Choose the sampler of a call, with the reason; ValueError if ``fast`` was requested and cannot run.

    Args:
        asked: ``auto``, ``hf`` or ``fast``.
        prompts: ``[rows, width]`` int64.
        logits: The first ones, ``[rows, vocabulary]``.
        computed_in: Dtype of keys and values; under autocast it may differ from the logits'.
        refused: Why kernels do not read such logits; None if they do, see `refusal_of_logits`.
    """
    stock = TransformersSampler(processors, do_sample=config.do_sample, rows=len(prompts))
    if asked == "hf":
        return stock, "sampler='hf' was requested"
    if refused is not None:
        if asked == "fast":
            raise ValueError(_CANNOT_DRAW.format(refused))
        return stock, refused
    try:
        chain = _chain(processors, config, prompts)
        if asked == "auto" and computed_in is not None and computed_in.itemsize > 2:
            raise Unsupported(f"in {str(computed_in).removeprefix('torch.')} a seed gives the same tokens as stock")
        fast = FastSampler(chain, prompts, logits, do_sample=config.do_sample)
    except (Unsupported, KernelFailedError) as error:
        if asked == "fast":
            raise ValueError(_CANNOT_DRAW.format(error)) from error
        return stock, str(error)
    why = "the kernel supports the call's processors"
    return fast, "sampler='fast' was requested" if asked == "fast" else why


def compile_sampler(
    asked: str, processors: LogitsProcessorList, config: GenerationConfig, prompts: Tensor, logits: Tensor
) -> None:
    """Launch the kernel that the sampler of a call would launch, if it has one; arguments as for `choose_sampler`."""
    if asked == "hf" or refusal_of_logits(logits.device, logits.dtype):
        return
    with suppress(Unsupported):
        chain = _chain(processors, config, prompts)
        seen = torch.empty(1, (logits.shape[1] + 31) // 32, dtype=torch.int32, device=logits.device)
        settings = chain.settings(logits.device, logits.shape[1], greedy=not config.do_sample)
        _sample_nothing(logits, settings, seen)


def _sample_nothing(logits: Tensor, settings: Settings, seen: Tensor | None) -> None:
    from ...kernels.sampling.api import sample  # needs Triton

    skipped = torch.full((1,), -1, dtype=torch.int32, device=logits.device)
    sample(logits[:1], skipped, settings, seen=seen)


def _chain(processors: LogitsProcessorList, config: GenerationConfig, prompts: Tensor) -> Chain:
    for name in ("output_scores", "output_logits"):
        if config.return_dict_in_generate and getattr(config, name):
            raise Unsupported(f"{name}=True needs tensors that the kernel does not compute")
    return read_chain(processors, prompt_length=prompts.shape[1])


_FIELDS: dict[type, tuple[int, dict[str, str]]] = {
    RepetitionPenaltyLogitsProcessor: (
        0,
        {"repetition_penalty": "penalty", "prompt_ignore_length": "prompt_ignore_length"},
    ),
    MinLengthLogitsProcessor: (1, {}),
    MinNewTokensLengthLogitsProcessor: (1, {}),
    SuppressTokensLogitsProcessor: (1, {}),
    SuppressTokensAtBeginLogitsProcessor: (1, {}),
    TemperatureLogitsWarper: (2, {"temperature": "temperature"}),
    TopKLogitsWarper: (3, {"top_k": "top_k"}),  # the constructor has already raised it to min_tokens_to_keep
    TopPLogitsWarper: (4, {"top_p": "top_p"}),
    MinPLogitsWarper: (5, {"min_p": "min_p"}),
    TypicalLogitsWarper: (6, {"typical_p": "mass"}),
    LogitNormalization: (7, {}),  # changes no probability
}
"""Processors that the kernel applies: the order in which generate builds them (those that suppress tokens may come in
any order, and repeatedly), and fields of `Chain` that are attributes of one, by the attributes' names."""

_SUPPRESSING = (SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor)

_VALUES = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("min_new_tokens", "begin_step"),
)
"""Fields of `Chain` that the kernel reads from the device."""


@dataclass(frozen=True)
class Chain:
    """Parameters of a list of logits processors; absent processors have neutral values."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    prompt_ignore_length: int | Tensor | None = None  # leading tokens exempt from the penalty, of each row or of all
    min_new_tokens: int = 0  # before an end token is allowed
    eos_token_ids: tuple[int, ...] = ()  # the end tokens suppressed until then
    suppressed: Tensor | None = None  # [any]: tokens never drawn; they stay on the device, which is not waited for
    suppressed_at_begin: Tensor | None = None  # [any]: tokens that are not drawn at step `begin_step`
    begin_step: int = -1  # by the tokens drawn before it; -1 if it is no step of the call

    def settings(self, device: torch.device | str, vocab: int, *, greedy: bool = False, seed: int = 0) -> Settings:
        """Kernel settings for this chain and logits of a vocabulary.

        `greedy` takes the largest processed logit instead of sampling.
        """
        from ...kernels.sampling.api import Settings, suppressed_tokens  # Triton, which reading a chain does not need

        suppresses = self.suppressed is not None or self.suppressed_at_begin is not None
        marks = suppressed_tokens(self.suppressed, self.suppressed_at_begin, vocab, device) if suppresses else None
        return Settings(
            device,
            greedy=greedy,
            top_k=self.top_k > 0,
            typical=self.typical_p < 1,
            penalty=self.repetition_penalty != 1,
            eos_token_ids=self.eos_token_ids,
            suppressed=marks,
            values={name: getattr(self, name) for name in _VALUES} | {"seed": seed},
        )


def read_chain(processors: LogitsProcessorList, *, prompt_length: int) -> Chain:
    """Recognise a list of logits processors, as ``generate`` passes them to a decoding loop.

    Only transformers' own classes are recognised, not subclasses, and only in the order in which ``generate`` builds
    them. Raises `Unsupported`, with the processor's name, where the kernel does not compute the same.

    Args:
        prompt_length: Tokens of ``input_ids``, padding included.
    """
    values: dict[str, Any] = {}
    last: Any = None
    for processor in processors:
        _check_place(processor, last)
        last, kind = processor, type(processor)
        if kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
            _read_least(values, processor, prompt_length)
        elif kind is SuppressTokensLogitsProcessor:
            values["suppressed"] = _with(values.get("suppressed"), processor.suppress_tokens)
        elif kind is SuppressTokensAtBeginLogitsProcessor:
            begin = max(-1, processor.begin_index - prompt_length)
            if begin != values.get("begin_step", begin):
                raise Unsupported(
                    f"{kind.__name__} has begin_index={processor.begin_index}, and another one has another"
                )
            tokens = _with(values.get("suppressed_at_begin"), processor.begin_suppress_tokens)
            values["suppressed_at_begin"], values["begin_step"] = tokens, begin
        else:
            values |= {field: getattr(processor, name) for field, name in _FIELDS[kind][1].items()}
    return Chain(**values)


def _check_place(processor: Any, last: Any) -> None:
    """Raise `Unsupported` for a processor that the kernel does not apply, or not after `last`."""
    kind, name = type(processor), type(processor).__name__
    if kind not in _FIELDS:
        raise Unsupported(f"{name} is not among the processors that the kernel applies")
    again = kind is type(last) and kind not in _SUPPRESSING
    if last is not None and (_FIELDS[kind][0] < _FIELDS[type(last)][0] or again):
        raise Unsupported(f"{name} comes after {type(last).__name__}, which is not the order of generate")
    if getattr(processor, "filter_value", -math.inf) != -math.inf:
        raise Unsupported(f"{name} has filter_value={processor.filter_value}; the kernel only removes tokens (-inf)")
    if kind is not TopKLogitsWarper and getattr(processor, "min_tokens_to_keep", 1) != 1:
        raise Unsupported(f"{name} has min_tokens_to_keep={processor.min_tokens_to_keep}; the kernel keeps at least 1")


def _read_least(values: dict[str, Any], processor: Any, prompt_length: int) -> None:
    """Read the fewest new tokens, and the end tokens that are suppressed until then."""
    eos = tuple(int(token) for token in processor.eos_token_id.flatten().tolist())
    if set(eos) != set(values.get("eos_token_ids", eos)):
        raise Unsupported(f"{type(processor).__name__} means other end tokens than the processor before it")
    if type(processor) is MinLengthLogitsProcessor:
        least = processor.min_length - prompt_length
    else:
        least = processor.min_new_tokens + processor.prompt_length_to_skip - prompt_length
    values["min_new_tokens"] = max(0, least, values.get("min_new_tokens", 0))
    values["eos_token_ids"] = eos


def _with(known: Tensor | None, more: Tensor) -> Tensor:
    return more if known is None else torch.cat([known, more.to(known)])


class NotFiniteError(ArithmeticError):
    """Raised for NaN logits, from which no token can be sampled."""

    def __init__(
        self,
        message: str = "the model's logits are NaN, from which no token can be drawn; see whether its weights are "
        "finite, and load it with dtype=torch.float32 if they are",
    ):
        super().__init__(message)


class TokenLogProbs(LogitsProcessor):
    """Records the raw log-probability of every token sampled by a `generate` call.

    Gives the same numbers as ``output_logits=True``, which keeps ``rows * vocabulary`` logits per step, but keeps one
    number per row and step and allows compaction of finished rows. Pass it to one call as
    ``logits_processor=[log_probs]``, then call `of`:

        log_probs = hf_fastdecode.TokenLogProbs()
        sequences = model.generate(**inputs, logits_processor=[log_probs])
        log_probs.of(sequences[:, inputs["input_ids"].shape[1]:])

    In stock calls it is an ordinary processor and sees the output of earlier ones: `generate` places its processors
    for repetition, length and suppressed tokens before a caller's own, and temperature, top-p and top-k after. So is
    a subclass with a ``__call__`` of its own in all calls.

    Args:
        on_step: Called at each step with the number of tokens sampled before.
    """

    def __init__(self, on_step: Callable[[int], None] = lambda drawn: None):
        self.on_step = on_step
        self._drawn: list[Tensor] = []  # [rows, 1] or [rows, steps] each
        self._tokens = torch.empty(1, 0, dtype=torch.long)  # [rows, steps] whose log-probabilities these are
        self._latest: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the logits ``[rows, vocabulary]`` and return them unchanged.

        Raises:
            NotFiniteError: One is NaN at the first step; `of` checks later steps, since a check waits for the GPU.
        """
        self._note(input_ids[:, -1:])
        self.before_draw(scores, len(self._drawn))
        self._latest = scores.float().log_softmax(-1)
        self._tokens = input_ids[:, input_ids.shape[1] - len(self._drawn) :]
        return scores

    def before_draw(self, logits: Tensor, drawn: int) -> None:
        """Report a step after so many tokens; raises NotFiniteError if one of the first step's logits is NaN."""
        if drawn == 0 and bool(logits.isnan().any()):
            raise NotFiniteError
        self.on_step(drawn)

    def take(self, log_probs: Tensor, tokens: Tensor) -> None:
        """Set ``[rows, steps]`` float32 log-probabilities gathered by a decoding loop, and their int64 tokens."""
        self._drawn, self._tokens, self._latest = [log_probs], tokens, None

    def of(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the tokens that the call sampled.

        Args:
            tokens: ``[rows, steps]`` int64: the output of `generate` without the prompts, padding as it is.

        Returns:
            ``[rows, steps]`` float32, natural logarithm; undefined after a row's end token or stop.

        Raises:
            NotFiniteError: One is NaN.
            ValueError: The call sampled fewer tokens, or others.
        """
        if self._latest is not None and sum(part.shape[1] for part in self._drawn) < tokens.shape[1]:
            self._note(tokens[:, -1:])  # unless the GPU ran an extra step, which generate dropped
        found = torch.cat(self._drawn, dim=1) if self._drawn else tokens.new_empty(*tokens.shape[:1], 0).float()
        remedy = "pass what generate returned without the prompts, and a new TokenLogProbs to each call"
        if len(found) != len(tokens) or found.shape[1] < tokens.shape[1]:
            raise ValueError(
                f"got tokens of shape {tuple(tokens.shape)}, and log-probabilities of shape {tuple(found.shape)} were "
                f"gathered; {remedy}"
            )
        found = found[:, : tokens.shape[1]]
        sampled = self._tokens[:, : tokens.shape[1]].to(found.device)
        differ = sampled != tokens[:, : sampled.shape[1]].to(found.device)
        no_number, others = torch.stack([found.isnan().any(), differ.any()]).tolist()  # waits for the GPU once
        if others:
            row, step = differ.nonzero()[0].tolist()
            what = f"token {step} of row {row} is {int(tokens[row, step])}"
            raise ValueError(f"{what}, and the call sampled {int(sampled[row, step])}; {remedy}")
        if no_number:
            raise NotFiniteError
        return found

    def _note(self, tokens: Tensor) -> None:
        if self._latest is not None:
            self._drawn.append(self._latest.gather(1, tokens.to(self._latest.device)))


def is_recorder(processor: object) -> bool:
    """Whether a processor is a `TokenLogProbs` that records what loops give it, and computes no numbers of its own."""
    return isinstance(processor, TokenLogProbs) and type(processor).__call__ is TokenLogProbs.__call__
