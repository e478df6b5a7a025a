"""Timing calls of `generate`: prefill and decode separately, peak memory, and what ran."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..api import explain
from .runner import NotAvailableError
from .timing import percentiles, wall_samples

Call = Callable[..., object]
"""Called with a number of tokens, it generates so many for every row."""


def prefill_and_decode(
    model: Any, call: Call, new_tokens: int, *, repeats: int, budget_s: float
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of prefill, of decoding, and of whole calls: of calls of one token, and what whole calls take longer.

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
    """Within, the number of tokens of each call of an embedding.

    A hook of this package is one that calls share context under, which those of other programs are not.
    """
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


def collect() -> None:
    """Free the memory that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
