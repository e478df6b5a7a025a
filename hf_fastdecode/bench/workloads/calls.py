"""One batch of rows through `generate` in a given way: prefill apart from decode, tokens prefilled, memory."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from hf_fastdecode._compat import CACHE
from hf_fastdecode.api import enabled, explain
from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.cache.shared import cache_bytes
from hf_fastdecode.errors import out_of_memory

from ...measurement.status import NotAvailableError, status_of
from ...measurement.timing import percentiles, wall_samples

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Batch:
    """The rows of a call.

    Attributes:
        input_ids: ``[rows, width]`` int64, padded on the left.
        attention_mask: ``[rows, width]`` int64, 0 for padding.
    """

    input_ids: Tensor
    attention_mask: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> Batch:
        """From the tokens of each row."""
        width = max(map(len, prompts))
        ids = [[pad] * (width - len(own)) + list(own) for own in prompts]
        mask = [[0] * (width - len(own)) + [1] * len(own) for own in prompts]
        return cls(torch.tensor(ids, device=device), torch.tensor(mask, device=device))

    @property
    def rows(self) -> int:
        """How many."""
        return self.input_ids.shape[0]

    @property
    def width(self) -> int:
        """Tokens of a row, with padding."""
        return self.input_ids.shape[1]


@dataclass(frozen=True)
class Timing:
    """How calls are timed.

    Attributes:
        new_tokens: Tokens that every row draws, at least 2; none ends before.
        repeats: Timed calls, at most.
        budget_s: Seconds after which a call is not repeated.
        sampling: Arguments of `generate` that say how tokens are drawn.
    """

    new_tokens: int
    repeats: int
    budget_s: float
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What calls of a batch gave.

    Attributes:
        columns: Of a row. ``prefill_s``: seconds to the first token of all rows; ``decode_s``: seconds for the others;
            ``total_s``: both; ``ms_per_step``: `decode_s` over the steps; ``tokens_per_s``: tokens drawn in
            `decode_s`, over it; ``prefilled_tokens``: with stock's padding; ``kv_bytes``: of keys and values at the
            end; ``peak_bytes``: most memory over what was held before, on CUDA. Times are medians.
        tokens: ``[rows, new_tokens]`` int64 on the CPU, of the first call; None without numbers.
    """

    columns: dict[str, Any]
    tokens: Tensor | None = None


def guarded(measure: Callable[[], Measured]) -> Measured:
    """What was measured, or a status: memory that ran out, a call that was not shared, an error."""
    try:
        return measure()
    except Exception as error:
        status = "out of memory" if out_of_memory(error) else status_of(error)
    # Behind the handler, since the error holds the frames that hold the memory.
    collect()
    return Measured({"status": status})


def measure_calls(
    model: PreTrainedModel, batch: Batch, enable: dict[str, Any] | None, timing: Timing, *, must_share: bool = True
) -> Measured:
    """Time calls, prefill apart from decode, after a warm-up.

    Args:
        model: A causal language model.
        batch: On its device.
        enable: Options of `hf_fastdecode.enable`; None for stock transformers.
        timing: How.
        must_share: Whether an enabled model's call that shares nothing says nothing.

    Raises:
        NotAvailableError: A call ran stock that must be shared.
    """
    if enable is None and (status := _too_large(model, batch, timing.new_tokens)):
        return Measured({"status": status})
    with _without_ends(model), enabled(model, **enable) if enable is not None else nullcontext():
        found, tokens = _measured(model, batch, enable is not None, timing)
        if enable is not None and must_share and "forest" not in found:
            raise NotAvailableError(f"it ran {found['ran']}")
    return Measured({"status": "ok"} | found, tokens)


def dtype_of(model: PreTrainedModel) -> str:
    """That of the parameters, such as ``float32``."""
    return str(model.dtype).removeprefix("torch.")


def collect() -> None:
    """Free the memory that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def greedy_tokens(model: PreTrainedModel, batch: Batch, enable: dict[str, Any] | None, new_tokens: int) -> Tensor:
    """``[rows, new_tokens]`` int64 on the CPU: the most likely tokens."""
    with _without_ends(model), enabled(model, **enable) if enable is not None else nullcontext():
        return _caller(model, batch, {"do_sample": False})(new_tokens)[:, batch.width :].cpu()


def _measured(model: PreTrainedModel, batch: Batch, is_enabled: bool, timing: Timing) -> tuple[dict[str, Any], Tensor]:
    device, most = model.device, timing.new_tokens
    call = _caller(model, batch, timing.sampling)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        first = call(most, return_dict_in_generate=True)
        tokens, cache = first.sequences[:, batch.width :].cpu(), first[CACHE]
        held = None if cache is None else cache_bytes(cache)  # rows that were cut into waves leave none
        del first, cache
        before = _reset_peak(device)
        times = _times_of_one_call if before is None else _times_apart
        prefills, decodes = times(model, call, is_enabled, timing)
    prefill, decode = percentiles(prefills).p50, percentiles(decodes)
    result = {
        "prefill_s": prefill,
        "decode_s": decode.p50,
        "total_s": prefill + decode.p50,
        **{f"ms_per_step{name}": 1e3 * value / (most - 1) for name, value in zip(("_p20", "", "_p80"), decode)},
        "tokens_per_s": batch.rows * (most - 1) / decode.p50 if decode.p50 > 0 else None,
        "prefilled_tokens": batch.input_ids.numel(),
        "kv_bytes": held,
        "peak_bytes": None if before is None else torch.cuda.max_memory_allocated(device) - before,
    }
    return result | (_report(model) if is_enabled else {}), tokens


def _times_apart(
    model: PreTrainedModel, call: Callable[..., Any], is_enabled: bool, timing: Timing
) -> tuple[list[float], list[float]]:
    """Seconds of prefill and of decoding, which is what whole calls take over calls of one token.

    On a GPU nothing waits within a call that would not without being timed.
    """

    def captured() -> bool:
        last = explain(model).last_call if is_enabled else None
        return last is not None and last.captures > 0

    def samples(count: int) -> list[float]:
        return wall_samples(
            lambda: call(count), model.device, repeats=timing.repeats, budget_s=timing.budget_s, warming=captured
        )

    call(1)  # captures what it needs by itself
    prefills, whole = samples(1), samples(timing.new_tokens)
    prefill = percentiles(prefills).p50
    return prefills, [seconds - prefill for seconds in whole]


def _times_of_one_call(
    model: PreTrainedModel, call: Callable[..., Any], is_enabled: bool, timing: Timing
) -> tuple[list[float], list[float]]:
    """Seconds to the first logits and behind them, which on the CPU are there when they are seen."""
    prefills: list[float] = []

    def once() -> None:
        started, logits = time.perf_counter(), _FirstLogits()
        call(timing.new_tokens, logits_processor=[logits])
        prefills.append(logits.seen_at - started)

    whole = wall_samples(once, model.device, repeats=timing.repeats, budget_s=timing.budget_s)
    return prefills, [seconds - prefill for seconds, prefill in zip(whole, prefills, strict=True)]


class _FirstLogits(LogitsProcessor):
    """Notes when the first logits come, and leaves them as they are."""

    seen_at = math.nan

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if math.isnan(self.seen_at):
            self.seen_at = time.perf_counter()
        return scores


def _report(model: PreTrainedModel) -> dict[str, Any]:
    """What is known of the last call of an enabled model; ``forest`` only of a shared one."""
    call = explain(model).last_call
    if call is None or call.path != "shared":
        return {"ran": f"stock: {'no call' if call is None else call.reason}"}
    waves = [f"{call.waves} waves"] if call.waves > 1 else []
    return {
        "prefilled_tokens": call.prefilled_tokens,
        "kv_bytes": call.nbytes.stored,
        "forest": call.forest,
        "ran": ", ".join([call.mode, f"sampler {call.sampler}", *waves]),
    }


def _caller(model: PreTrainedModel, batch: Batch, sampling: dict[str, Any]) -> Callable[..., Any]:
    def call(new_tokens: int, **arguments: Any) -> Any:
        return model.generate(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=new_tokens,
            **sampling,
            **arguments,
        )

    return call


@contextmanager
def _without_ends(model: PreTrainedModel) -> Iterator[None]:
    """Within, no token ends a row and nothing that comes with a checkpoint changes what is drawn."""
    given = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=given.pad_token_id or 0)
    try:
        yield
    finally:
        model.generation_config = given


def _reset_peak(device: torch.device) -> int | None:
    """Bytes that a CUDA device holds, from where its peak counts from now on; None on others."""
    collect()
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _too_large(model: PreTrainedModel, batch: Batch, new_tokens: int) -> str:
    """Why stock's rows do not fit into a CPU's memory, where the system would end this process; empty if they do.

    Sharing takes a part of that which depends on the prompts, and prefills in parts.
    """
    if model.device.type != "cpu":
        return ""
    try:
        shape = KVSizes.from_config(model.config)
    except ValueError:  # not a cache of keys and values alone
        return ""
    # A layer's pass holds several hidden states and the widened ones of its MLP beside what the cache keeps.
    hidden = model.config.hidden_size
    widened = getattr(model.config, "intermediate_size", None) or 4 * hidden
    passing = batch.rows * batch.width * (4 * hidden + 3 * widened) * model.dtype.itemsize
    needed = shape.kv_bytes(batch.rows, batch.width, new_tokens, model.dtype.itemsize).stock + passing
    free = _free_memory()
    return f"out of memory: {needed / 2**30:.1f} GiB of {free / 2**30:.1f}" if needed > free else ""


def _free_memory() -> int:
    """Bytes of memory that are free or can be freed; all there are where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(free, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        return free
