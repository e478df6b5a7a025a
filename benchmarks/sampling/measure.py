"""Sampling measured: the kernel and transformers' own processors, on the same logits, against one read of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_fastdecode.generation.decoding.sampling import TransformersSampler, read_chain
from hf_fastdecode.kernels.limits import refusal_of_logits
from hf_fastdecode.measurement.calls import Times, percentiles, wall_samples

from ..latest import Latest
from ..operator_time import OperatorBench, in_us, time_operator
from ..ops.inputs import BOUND, sets_needed
from .cases import SETTINGS, SamplingCase

# In the order in which generate builds them.
_WARPERS: dict[str, Callable[..., Any]] = {
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
_COLUMNS = (
    *("status", "us_p20", "us_p50", "us_p80", "over_floor", "tb_per_s", "bytes", "floor_us", "copy_tb_per_s"),
    "error_ratio",
)
_DRAWS = 8  # of each row in the check
_SPREAD = 2.0  # standard deviation of the logits
_REPEATS, _BUDGET_S = 30, 1.0  # timed calls of transformers' sampler, at most


def processors_of(case: SamplingCase) -> LogitsProcessorList:
    """transformers' processors as `generate` builds them for a case; none for greedy decoding."""
    if case.greedy:
        return LogitsProcessorList()
    numbers = SETTINGS[case.settings]
    chosen = [warper(numbers[name]) for name, warper in _WARPERS.items() if name in numbers]
    return LogitsProcessorList([TemperatureLogitsWarper(case.temperature), *chosen])


class SamplingBench(OperatorBench):
    """Measures sampling on one device; with `check`, the kernel is timed only after its draws were found right."""

    def __init__(self, device: torch.device, *, check: bool = True):
        super().__init__(device, check=check)
        self._sets: Latest[Tensor] = Latest()

    @torch.no_grad()
    def measure(self, case: SamplingCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``us_p20``, ``us_p50``, ``us_p80``: microseconds of a call, for ``fast`` in a CUDA graph, for ``hf`` from an
        idle device to an idle device, as `generate` calls it. ``bytes``: of the logits, read once. ``floor_us``: what
        that takes at the measured bandwidth; ``over_floor``: the time over it. ``tb_per_s``: the rate that the time
        means. ``error_ratio``: error of the kernel's log-probabilities over PyTorch's. A measurement whose ``status``
        is not ``ok`` has no times, and the status says why.
        """
        size = case.bytes(getattr(torch, case.dtype).itemsize)
        floor = size / self.ceilings.bytes_per_s
        result: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"status": "ok", "bytes": size, "floor_us": 1e6 * floor}
        result["copy_tb_per_s"] = self.ceilings.bytes_per_s / 1e12
        if way == "fast" and (reason := refusal_of_logits(self.device, getattr(torch, case.dtype))):
            return result | {"status": f"not run: {reason}"}
        try:
            found = self._fast(case) if way == "fast" else {"times": self._transformers(case)}
        except torch.OutOfMemoryError:
            self._sets.drop()
            return result | {"status": "does not fit"}
        times: Times | None = found.pop("times", None)
        if times is not None:
            result |= in_us(times) | {"over_floor": times.p50 / floor, "tb_per_s": size / times.p50 / 1e12}
        return result | found

    def _fast(self, case: SamplingCase) -> dict[str, Any]:
        from hf_fastdecode.kernels.sampling import api  # needs Triton

        sets, processors = self._logits(case), processors_of(case)
        chain = read_chain(processors, prompt_length=1)
        settings = chain.settings(self.device, sets[0].shape[1], greedy=case.greedy)
        row_ids = torch.arange(case.rows, dtype=torch.int32, device=self.device)
        found: dict[str, Any] = {}
        if self.check:
            draws = []
            for step in range(_DRAWS):
                settings.update(step=step)
                draws.append(api.sample(sets[0], row_ids, settings))
            tokens, logprobs = (torch.stack(part, 1) for part in zip(*draws, strict=True))  # [rows, draws]
            status, found["error_ratio"] = red(sets[0], tokens, logprobs, processors, greedy=case.greedy)
            if status is not None:
                return found | {"status": status}
        settings.update(step=0)

        def call(logits: Tensor) -> Callable[[], Tensor]:
            return lambda: api.sample(logits, row_ids, settings)[0]

        times, output = time_operator([call(logits) for logits in sets], self.device)
        if self.check and not torch.equal(output, tokens[:, 0]):
            return found | {"status": "wrong: it draws other tokens when it is repeated"}
        return found | {"times": times}

    def _transformers(self, case: SamplingCase) -> Times:
        sampler = TransformersSampler(processors_of(case), do_sample=not case.greedy, rows=case.rows)
        sets = cycle(self._logits(case))
        rows = torch.arange(case.rows, device=self.device)
        ids = torch.zeros(case.rows, 1, dtype=torch.int64, device=self.device)

        def call() -> Tensor:
            return sampler.draw(next(sets), rows, ids, 0).tokens

        for _ in range(3):  # loads what is loaded once, and fills the allocator's pools
            call()
        return percentiles(wall_samples(call, self.device, repeats=_REPEATS, budget_s=_BUDGET_S))

    def _logits(self, case: SamplingCase) -> Tensor:
        """``[sets, rows, vocabulary]``, together twice the L2 cache; kept until another size asks."""

        def make() -> Tensor:
            dtype: torch.dtype = getattr(torch, case.dtype)
            # A row's logits are so small that hundreds fit into the cache.
            sets = sets_needed(case.bytes(dtype.itemsize), self.device, most=sys.maxsize)
            generator = torch.Generator(self.device).manual_seed(0)
            shape = sets, case.rows, case.vocabulary
            return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype).mul_(_SPREAD)

        return self._sets.of((case.rows, case.vocabulary, case.dtype), make)


def outside_support(logits: Tensor, tokens: Tensor, processors: LogitsProcessorList, *, greedy: bool) -> int:
    """Number of tokens ``[rows, draws]`` int64 that transformers never draws from logits ``[rows, vocabulary]``.

    Its own processors each leave the largest logits, and -inf in place of the others; greedy, only the first of the
    largest may be taken. Of tokens that tie at the edge of top-p, its sort, which is not stable, leaves any: a token
    counts when its logit is below all that are left. The filters sum probabilities in fp32, so a token at the edge may
    fall on either side: one that they remove in fp32 counts only if they remove it in fp64 too.
    """

    def removed(row: Tensor, dtype: torch.dtype) -> Tensor:
        ids = tokens.new_zeros(len(row), 1)  # none of the processors reads the tokens so far
        scores = processors(ids, logits[row].to(dtype, copy=True))
        if greedy:
            return tokens[row] != scores.argmax(-1, keepdim=True)
        edge = logits[row].masked_fill(scores == -torch.inf, torch.inf).amin(-1, keepdim=True)
        return logits[row].gather(1, tokens[row]) < edge

    if bool(((tokens < 0) | (tokens >= logits.shape[1])).any()):
        return tokens.numel()
    doubtful = removed(torch.arange(len(logits), device=logits.device), torch.float32)
    rows = doubtful.any(1).nonzero().flatten()
    return int((doubtful[rows] & removed(rows, torch.float64)).sum()) if len(rows) else 0


def logprob_error(logits: Tensor, tokens: Tensor, logprobs: Tensor) -> float:
    """Error of log-probabilities against fp64, in multiples of the error of PyTorch's fp32 `log_softmax`.

    PyTorch's error counts at least as what rounding the log-sum-exp and the result to fp32 may lose. Of logits
    ``[rows, vocabulary]``, tokens ``[rows, draws]`` int64 and their log-probabilities in fp32.
    """
    chosen, total = logits.double().gather(1, tokens), logits.double().logsumexp(-1, keepdim=True)
    oracle = chosen - total  # [rows, draws]
    theirs = logits.float().log_softmax(-1).gather(1, tokens).double() - oracle
    unit = torch.finfo(torch.float32).eps / 2 * (total.abs().max() + oracle.abs().max())
    ratio = (logprobs.double() - oracle).abs().max() / torch.maximum(theirs.abs().max(), unit)
    return float(ratio.nan_to_num(nan=torch.inf))


def red(
    logits: Tensor, tokens: Tensor, logprobs: Tensor, processors: LogitsProcessorList, *, greedy: bool
) -> tuple[str | None, float]:
    """The status of wrong draws, else None; and the error of the log-probabilities."""
    error = logprob_error(logits, tokens.clamp(0, logits.shape[1] - 1), logprobs)
    if outside := outside_support(logits, tokens, processors, greedy=greedy):
        what = "are not the most likely" if greedy else "are none that transformers leaves"
        return f"wrong: {outside} of {tokens.numel()} tokens {what}", error
    if not error <= BOUND:
        return f"wrong: log-probabilities err {error:.2f} times PyTorch's error, at most {BOUND:g} is right", error
    return None, error
