"""Calls of `generate`: samples drawn from a seed, with log-probabilities; seconds of prefill and decode, peak memory,
and what ran.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from .._compat import CACHE
from ..api import explain
from ..errors import InputError, out_of_memory
from ..generation.decoding.sampling import NotFiniteError, TokenLogProbs
from .rows import NotAvailableError, status_of


class Times(NamedTuple):
    """Seconds: the median, between the 20th and the 80th percentile."""

    p20: float
    p50: float
    p80: float


def percentiles(samples: Sequence[float]) -> Times:
    """The three percentiles of measured seconds, by the nearest rank."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Times(ordered[round(0.2 * last)], median(ordered), ordered[round(0.8 * last)])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def idle_time(device: torch.device) -> float:
    """`time.perf_counter` once the device is idle."""
    synchronize(device)
    return time.perf_counter()


def wall_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from an idle device to an idle device."""
    start = idle_time(device)
    call()
    return idle_time(device) - start


def wall_samples(
    call: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    budget_s: float,
    warming: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Seconds of a call, measured `repeats` times at most, and not again when that has taken `budget_s`.

    Where `warming` says that the last call was a warm-up after all, what was measured does not count, at most four
    times, and unless it took `budget_s`.
    """
    samples: list[float] = []
    forgiven = 4
    while len(samples) < repeats and sum(samples) < budget_s:
        samples.append(wall_seconds(call, device))
        if forgiven and samples[-1] < budget_s and warming():
            samples, forgiven = [], forgiven - 1
    return samples


ANCHOR: Final = 4
"""Prompt tokens decoded before a completion, so that its first space is kept."""


@dataclass(frozen=True)
class Drawn:
    """Tokens and times of one `generate` call; tensors are on the CPU, times are of `time.perf_counter`.

    `sequences` are ``[rows, prompt_length + steps]`` int64; `prompt_length` counts a prompt with its padding, in an
    encoder-decoder the token that the decoder starts from. `log_probs`, ``[rows, steps]`` float32, are of the drawn
    tokens under the raw logits. The cache at the end is None if not asked for, or if rows were cut into waves.
    `step_times` say when the logits of each timed step were computed.
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
        return self.sequences[:, : self.prompt_length]

    @property
    def tokens(self) -> Tensor:
        """``[rows, steps]`` int64, padded after each row's end."""
        return self.sequences[:, self.prompt_length :]

    @property
    def first_token_s(self) -> float:
        return self.step_times[0] - self.started

    @property
    def total_s(self) -> float:
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
        inputs: ``input_ids`` and ``attention_mask`` ``[prompts, length]`` on the model's device.
        on_step: Called at each step with the number of tokens drawn before it.
        time_every_step: Time all steps, which waits for the device at each; else only the first.
        arguments: Further arguments of `generate`; `processors` are further logits processors.

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
    """Within, memory that runs out raises `memory_error`'s result, and logits that are not finite an InputError."""
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
            reason = f'values are too large for {str(model.dtype).removeprefix("torch.")}; try `dtype="float32"`'
        raise InputError(f"the model's logits are not finite: {reason}") from error


def end_tokens_of(model: Any) -> list[int]:
    end = model.generation_config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def count_before_end(tokens: Sequence[int], end_tokens: Collection[int]) -> int:
    """The number of tokens before the first end token; of all where there is none."""
    return next((at for at, token in enumerate(tokens) if token in end_tokens), len(tokens))


def continuation(tokenizer: Any, prompt: list[int], ids: list[int], *, special: bool = False) -> str:
    """The text that tokens add to their prompt's: tokenizers strip a space from the start of a text."""

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    before = text(prompt[-ANCHOR:])
    both = text(prompt[-ANCHOR:] + ids)
    return both[len(before) :] if both.startswith(before) else text(ids)


Call = Callable[..., object]
"""Called with a number of tokens, it generates so many for every row."""


def prefill_and_decode(
    model: Any, call: Call, new_tokens: int, *, repeats: int, budget_s: float
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of prefill (calls of one token), of decoding (the difference), and of whole calls.

    On a GPU nothing waits within a call that would not without being timed. Calls that still captured steps do not
    count. Each length is timed `repeats` times at most, and not again after `budget_s` seconds.
    """

    def captured() -> bool:
        last = explain(model).last_call
        return last is not None and last.captures > 0

    def samples(count: int) -> list[float]:
        return wall_samples(lambda: call(count), model.device, repeats=repeats, budget_s=budget_s, warming=captured)

    prefills, whole = samples(1), samples(new_tokens)
    prefill = percentiles(prefills).p50
    return prefills, [seconds - prefill for seconds in whole], whole


def step_columns(decodes: Sequence[float], steps: int, drawn: int) -> dict[str, Any]:
    """Milliseconds of a step and tokens a second, from seconds of decoding `drawn` tokens in `steps` steps."""
    decode = percentiles(decodes)
    times = zip(("_p20", "", "_p80"), decode, strict=True)
    return {
        **{f"ms_per_step{name}": 1e3 * seconds / steps for name, seconds in times},
        # A difference of two times, which noise can make negative.
        "tokens_per_s": drawn / decode.p50 if decode.p50 > 0 else None,
    }


def what_ran(model: Any, *, must_share: bool = True) -> str:
    """Mode, sampler, waves and compactions of an enabled model's last call, and how many rows decoded at once, if not
    all; or ``stock`` and the reason.

    Raises NotAvailableError where it ran stock though it must share.
    """
    call = explain(model).last_call
    if call is None or call.path != "shared":
        ran = f"stock: {'no call' if call is None else call.reason}"
        if must_share:
            raise NotAvailableError(f"it ran {ran}")
        return ran
    words = [call.mode, f"sampler {call.sampler}"]
    words += [f"{call.rows_at_once:,} rows at once"] if call.rows_at_once else []
    words += [f"{call.waves} waves"] if call.waves > 1 else []
    words += [f"{call.compactions} compactions"] if call.compactions else []
    return ", ".join(words)


@contextmanager
def counted_tokens(embedding: Any) -> Iterator[list[int]]:
    """Within, the number of tokens of each call of an embedding, by a hook under which calls share context."""
    counted: list[int] = []
    hook = embedding.register_forward_hook(lambda module, args, out: counted.append(args[0].numel()))
    try:
        yield counted
    finally:
        hook.remove()


def begin_peak(device: torch.device) -> int | None:
    """Start to count a CUDA device's peak memory; returns the bytes that it holds now, and None on other devices."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_over(device: torch.device, before: int | None) -> int | None:
    """Peak bytes since `begin_peak`, over the bytes held `before`; None where these are unknown."""
    return None if before is None else torch.cuda.max_memory_allocated(device) - before


def cpu_memory() -> int:
    """Bytes of this machine's memory, up to the limit of a container."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no such limit, or "max"
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


def guarded(columns: Iterable[str], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The columns of a measurement: those that `measure` returns, or the status of what it raises; the others None."""
    try:
        found = {"status": "ok"} | measure()
    except Exception as error:
        found = {"status": status_of(error)}
    collect()  # after the handler, since the error holds the frames that hold the memory
    return dict.fromkeys(columns) | found


def collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
