"""Drawing samples by one `generate` call: seeded, with log-probabilities, times, and errors in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from .._compat import CACHE
from ..errors import InputError, out_of_memory
from ..generation.decoding.token_log_probs import NotFiniteError, TokenLogProbs
from .timing import idle_time

ANCHOR: Final = 4
"""Prompt tokens decoded before a completion, so that its first space is kept."""


@dataclass(frozen=True)
class Drawn:
    """What one `generate` call drew; tensors are on the CPU, and times are of `time.perf_counter`.

    Attributes:
        sequences: ``[rows, prompt_length + steps]`` int64; `prompt_length` counts a prompt with its padding, in an
            encoder-decoder the token that the decoder starts from.
        log_probs: ``[rows, steps]`` float32: log-probabilities of the drawn tokens under the raw logits.
        cache: The keys and values at the end; None if not asked for, or if rows were cut into waves.
        step_times: When the logits of each timed step were computed; `started` and `ended` are the call's.
    """

    sequences: Tensor
    prompt_length: int
    log_probs: Tensor
    cache: Any
    started: float
    step_times: list[float]
    ended: float

    @property
    def prompts(self) -> Tensor:
        """``[rows, prompt_length]`` int64."""
        return self.sequences[:, : self.prompt_length]

    @property
    def tokens(self) -> Tensor:
        """``[rows, steps]`` int64, padded behind each row's end."""
        return self.sequences[:, self.prompt_length :]

    @property
    def first_token_s(self) -> float:
        """Seconds until the logits of the first token."""
        return self.step_times[0] - self.started

    @property
    def total_s(self) -> float:
        """Seconds of the call."""
        return self.ended - self.started


def draw(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    seed: int,
    on_step: Callable[[int], None] = lambda drawn: None,
    processors: Sequence[LogitsProcessor] = (),
    time_every_step: bool = False,
    keep_cache: bool = False,
    **arguments: Any,
) -> Drawn:
    """Run `model.generate` from a seed, and leave torch's generators as they were.

    Args:
        model: A model that generates text, enabled or not.
        inputs: ``input_ids`` and ``attention_mask`` ``[prompts, length]`` on the model's device.
        seed: Seed of torch's generators.
        on_step: Called at each step with the number of tokens drawn before it.
        processors: Further logits processors.
        time_every_step: Time all steps, which waits for the device at each; else only the first.
        keep_cache: Return the keys and values too.
        arguments: Further arguments of `generate`.

    Raises:
        NotFiniteError: The model's logits are not finite.
    """
    device = model.device
    step_times: list[float] = []

    def step(drawn: int) -> None:
        if time_every_step or not step_times:
            step_times.append(idle_time(device))
        on_step(drawn)

    log_probs = TokenLogProbs(step)
    with seeded(device, seed):
        started = idle_time(device)
        out = model.generate(
            **inputs,
            **arguments,
            return_dict_in_generate=keep_cache,
            logits_processor=LogitsProcessorList([log_probs, *processors]),
        )
        ended = idle_time(device)
    sequences, cache = (out.sequences, out[CACHE]) if keep_cache else (out, None)
    length = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    found = log_probs.of(sequences[:, length:])
    return Drawn(sequences.cpu(), length, found.cpu(), cache, started, step_times, ended)


@contextmanager
def seeded(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Within, torch's generators start from a seed; afterwards they are as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def memory_and_logit_errors(model: Any, memory_error: Callable[[], Exception]) -> Iterator[None]:
    """Within, memory that runs out raises what `memory_error` makes, and logits that are not finite an InputError.

    The model's `TokenLogProbs` checks its logits.
    """
    try:
        yield
    except (RuntimeError, MemoryError, NotFiniteError) as error:
        if out_of_memory(error):
            raise memory_error() from error
        # The second is torch.multinomial's error at a later step than the first.
        if not isinstance(error, NotFiniteError) and "probability tensor contains" not in str(error):
            raise
        weights = (name for name, weight in model.named_parameters() if not bool(weight.isfinite().all()))
        if culprit := next(weights, None):
            reason = f"its weight {culprit} holds NaN or infinity; get the checkpoint again"
        else:
            reason = f'numbers are too large for {str(model.dtype).removeprefix("torch.")}; try `dtype="float32"`'
        raise InputError(f"the model's logits are not finite: {reason}") from error


def end_tokens_of(model: Any) -> list[int]:
    """The ids that end a completion."""
    end = model.generation_config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def continuation(tokenizer: Any, prompt: list[int], ids: list[int], *, special: bool = False) -> str:
    """The text that these tokens add to their prompt's; tokenizers strip a space from the start of a text.

    With `special`, the text of special tokens too.
    """

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    before = text(prompt[-ANCHOR:])
    both = text(prompt[-ANCHOR:] + ids)
    return both[len(before) :] if both.startswith(before) else text(ids)
