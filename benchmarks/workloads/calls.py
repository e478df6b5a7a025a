"""One batch of rows through `generate` in a given way: prefill apart from decode, tokens prefilled, memory."""

from __future__ import annotations

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
from hf_fastdecode.measurement.calls import (
    begin_peak,
    collect,
    peak_over,
    percentiles,
    prefill_and_decode,
    seeded,
    step_columns,
    wall_samples,
    what_ran,
)
from hf_fastdecode.measurement.rows import status_of

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Batch:
    """The rows of a call: ``[rows, width]`` int64 each, padded on the left, with a mask of 0 for padding."""

    input_ids: Tensor
    attention_mask: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], model: PreTrainedModel) -> Batch:
        """A batch of the tokens of each row, on the model's device."""
        width, device, pad = max(map(len, prompts)), model.device, model.generation_config.pad_token_id or 0
        ids = [[pad] * (width - len(own)) + list(own) for own in prompts]
        mask = [[0] * (width - len(own)) + [1] * len(own) for own in prompts]
        return cls(torch.tensor(ids, device=device), torch.tensor(mask, device=device))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.input_ids.shape[0]

    @property
    def width(self) -> int:
        """Tokens of a row with its padding."""
        return self.input_ids.shape[1]


@dataclass(frozen=True)
class Timing:
    """How calls are timed: every row draws `new_tokens`, at least 2, as `sampling` says, and none ends before.

    A call is repeated `repeats` times at most, and not again after `budget_s` seconds.
    """

    new_tokens: int
    repeats: int
    budget_s: float
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What calls of a batch gave.

    Attributes:
        columns: ``prefill_s``: seconds to the first token of all rows; ``decode_s``: seconds for the others;
            ``total_s``: both; ``ms_per_step``: `decode_s` over the steps; ``tokens_per_s``: tokens drawn in
            `decode_s`, over it; ``prefilled_tokens``: with stock's padding; ``kv_bytes``: of keys and values at the
            end; ``peak_bytes``: most memory over what was held before, on CUDA. Times are medians.
        tokens: ``[rows, new_tokens]`` int64 on the CPU, of the first call; None without numbers.
    """

    columns: dict[str, Any]
    tokens: Tensor | None = None


def guarded(measure: Callable[[], Measured]) -> Measured:
    """What was measured, or the status of the error that it raised."""
    try:
        return measure()
    except Exception as error:
        status = status_of(error)
    collect()  # behind the handler, since the error holds the frames that hold the memory
    return Measured({"status": status})


def measure_calls(
    model: PreTrainedModel, batch: Batch, enable: dict[str, Any] | None, timing: Timing, *, must_share: bool = True
) -> Measured:
    """Time calls of the rows after a warm-up, prefill and decode separately; `enable` is None for stock transformers.

    Raises NotAvailableError where an enabled model's call ran stock though it `must_share`.
    """
    if enable is None and (status := _too_large(model, batch, timing.new_tokens)):
        return Measured({"status": status})
    with _without_ends(model), enabled(model, **enable) if enable is not None else nullcontext():
        found, tokens = _measured(model, batch, timing)
        if enable is not None:
            ran, call = what_ran(model, must_share=must_share), explain(model).last_call
            if call is not None and call.path == "shared":
                found |= {
                    "prefilled_tokens": call.prefilled_tokens,
                    "kv_bytes": call.nbytes.stored,
                    "forest": call.forest,
                }
            found["ran"] = ran
    return Measured({"status": "ok"} | found, tokens)


def dtype_of(model: PreTrainedModel) -> str:
    """The dtype of the parameters, such as ``float32``."""
    return str(model.dtype).removeprefix("torch.")


def greedy_tokens(model: PreTrainedModel, batch: Batch, enable: dict[str, Any] | None, new_tokens: int) -> Tensor:
    """``[rows, new_tokens]`` int64 on the CPU: the most likely tokens."""
    with _without_ends(model), enabled(model, **enable) if enable is not None else nullcontext():
        return _caller(model, batch, {"do_sample": False})(new_tokens)[:, batch.width :].cpu()


def _measured(model: PreTrainedModel, batch: Batch, timing: Timing) -> tuple[dict[str, Any], Tensor]:
    device, most = model.device, timing.new_tokens
    call = _caller(model, batch, timing.sampling)
    limits: dict[str, Any] = {"repeats": timing.repeats, "budget_s": timing.budget_s}
    with seeded(device):
        first = call(most, return_dict_in_generate=True)
        tokens, cache = first.sequences[:, batch.width :].cpu(), first[CACHE]
        held = None if cache is None else cache_bytes(cache)  # rows that were cut into waves leave none
        del first, cache
        collect()
        before = begin_peak(device)
        if before is None:
            prefills, decodes = prefill_and_decode_on_cpu(call, most, **limits)
        else:
            call(1)  # captures what it needs by itself
            prefills, decodes, _ = prefill_and_decode(model, call, most, **limits)
    prefill, decode = percentiles(prefills).p50, percentiles(decodes).p50
    return {
        "prefill_s": prefill,
        "decode_s": decode,
        "total_s": prefill + decode,
        **step_columns(decodes, most - 1, batch.rows * (most - 1)),
        "prefilled_tokens": batch.input_ids.numel(),
        "kv_bytes": held,
        "peak_bytes": peak_over(device, before),
    }, tokens


def prefill_and_decode_on_cpu(
    call: Callable[..., object], new_tokens: int, *, repeats: int, budget_s: float
) -> tuple[list[float], list[float]]:
    """Seconds to the first logits of whole calls and after them: a CPU has computed logits when it hands them over."""
    prefills: list[float] = []

    def once() -> None:
        started, logits = time.perf_counter(), _FirstLogits()
        call(new_tokens, logits_processor=[logits])
        prefills.append(logits.seen_at - started)

    whole = wall_samples(once, torch.device("cpu"), repeats=repeats, budget_s=budget_s)
    return prefills, [seconds - prefill for seconds, prefill in zip(whole, prefills, strict=True)]


class _FirstLogits(LogitsProcessor):
    """Notes when the first logits come, and leaves them as they are."""

    seen_at = math.nan

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if math.isnan(self.seen_at):
            self.seen_at = time.perf_counter()
        return scores


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
