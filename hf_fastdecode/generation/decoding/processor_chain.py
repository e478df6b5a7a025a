"""Translates a list of transformers' logits processors to settings of the sampling kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    LogitNormalization,
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

if TYPE_CHECKING:  # it imports triton, which may be missing
    from ...kernels.sampling.api import Settings

# The order in which generate builds them; those that suppress tokens may come in any order, and several times.
_ORDER = {
    RepetitionPenaltyLogitsProcessor: 0,
    MinLengthLogitsProcessor: 1,
    MinNewTokensLengthLogitsProcessor: 1,
    SuppressTokensLogitsProcessor: 1,
    SuppressTokensAtBeginLogitsProcessor: 1,
    TemperatureLogitsWarper: 2,
    TopKLogitsWarper: 3,
    TopPLogitsWarper: 4,
    MinPLogitsWarper: 5,
    TypicalLogitsWarper: 6,
    LogitNormalization: 7,
}

_SUPPRESSING = (SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor)


@dataclass(frozen=True)
class Chain:
    """Parameters of a list of logits processors; absent processors have neutral values.

    Attributes:
        prompt_ignore_length: Leading tokens of each row exempt from the penalty: one number, one per row, or None.
        min_new_tokens: Minimum new tokens before an end token is allowed.
        eos_token_ids: The end tokens suppressed until then.
        suppressed: ``[any]``: tokens that are never drawn, or None. They stay on the device, which is not waited for.
        suppressed_at_begin: ``[any]``: tokens that are not drawn at step `begin_step`, or None.
        begin_step: That step, by the tokens drawn before it; -1 if it is no step of the call.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    prompt_ignore_length: int | Tensor | None = None
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    suppressed: Tensor | None = None
    suppressed_at_begin: Tensor | None = None
    begin_step: int = -1

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
            values={
                "temperature": self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
                "min_p": self.min_p,
                "typical_p": self.typical_p,
                "repetition_penalty": self.repetition_penalty,
                "min_new_tokens": self.min_new_tokens,
                "begin_step": self.begin_step,
                "seed": seed,
            },
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
        kind, name = type(processor), type(processor).__name__
        if kind not in _ORDER:
            raise Unsupported(f"{name} is not among the processors that the kernel applies")
        again = kind is type(last) and kind not in _SUPPRESSING
        if last is not None and (_ORDER[kind] < _ORDER[type(last)] or again):
            raise Unsupported(f"{name} comes after {type(last).__name__}, which is not the order of generate")
        last = processor
        if getattr(processor, "filter_value", -math.inf) != -math.inf:
            raise Unsupported(
                f"{name} has filter_value={processor.filter_value}; the kernel only removes tokens (-inf)"
            )
        if kind is not TopKLogitsWarper and getattr(processor, "min_tokens_to_keep", 1) != 1:
            raise Unsupported(
                f"{name} has min_tokens_to_keep={processor.min_tokens_to_keep}; the kernel keeps at least 1"
            )
        if kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
            eos = tuple(int(token) for token in processor.eos_token_id.flatten().tolist())
            if set(eos) != set(values.get("eos_token_ids", eos)):
                raise Unsupported(f"{name} means other end tokens than the processor before it")
            if kind is MinLengthLogitsProcessor:
                least = processor.min_length - prompt_length
            else:
                least = processor.min_new_tokens + processor.prompt_length_to_skip - prompt_length
            values["min_new_tokens"] = max(0, least, values.get("min_new_tokens", 0))
            values["eos_token_ids"] = eos
        elif kind is SuppressTokensLogitsProcessor:
            values["suppressed"] = _with(values.get("suppressed"), processor.suppress_tokens)
        elif kind is SuppressTokensAtBeginLogitsProcessor:
            begin = max(-1, processor.begin_index - prompt_length)
            if begin != values.get("begin_step", begin):
                raise Unsupported(f"{name} has begin_index={processor.begin_index}, and another one has another")
            tokens = _with(values.get("suppressed_at_begin"), processor.begin_suppress_tokens)
            values["suppressed_at_begin"], values["begin_step"] = tokens, begin
        elif kind is RepetitionPenaltyLogitsProcessor:
            values["repetition_penalty"] = processor.penalty
            values["prompt_ignore_length"] = processor.prompt_ignore_length
        elif kind is TemperatureLogitsWarper:
            values["temperature"] = processor.temperature
        elif kind is TopKLogitsWarper:
            values["top_k"] = processor.top_k  # the constructor has already raised it to min_tokens_to_keep
        elif kind is TopPLogitsWarper:
            values["top_p"] = processor.top_p
        elif kind is MinPLogitsWarper:
            values["min_p"] = processor.min_p
        elif kind is TypicalLogitsWarper:
            values["typical_p"] = processor.mass
        # LogitNormalization changes no probability.
    return Chain(**values)


def _with(known: Tensor | None, more: Tensor) -> Tensor:
    return more if known is None else torch.cat([known, more.to(known)])
