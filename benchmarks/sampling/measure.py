"""Sampling measured: the kernel and transformers' own processors, on the same logits, against one read of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
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

from ..operator_time import in_us, time_operator
from ..ops.ceilings import Ceilings, measure_ceilings
from ..ops.inputs import sets_needed
from .cases import SETTINGS, SamplingCase
from .check import red

# In the order in which generate builds them.
_WARPERS: dict[str, Callable[..., Any]] = {
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
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


class SamplingBench:
    """Measures sampling on one device; with `check`, the kernel is timed only after its draws were found right."""

    def __init__(self, device: torch.device, *, check: bool = True):
        self.device, self.check = device, check
        self._prepared: tuple[tuple[int, int, str], Tensor] | None = None

    @cached_property
    def ceilings(self) -> Ceilings:
        """The device's rates, measured when they are first needed."""
        return measure_ceilings(self.device)

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
        result: dict[str, Any] = {"status": "ok", "us_p20": None, "us_p50": None, "us_p80": None}
        result |= {"over_floor": None, "tb_per_s": None, "bytes": size, "floor_us": 1e6 * floor}
        result |= {"copy_tb_per_s": self.ceilings.bytes_per_s / 1e12, "error_ratio": None}
        if way == "fast" and (reason := refusal_of_logits(self.device, getattr(torch, case.dtype))):
            return result | {"status": f"not run: {reason}"}
        try:
            found = self._fast(case) if way == "fast" else {"times": self._transformers(case)}
        except torch.OutOfMemoryError:
            self._prepared = None
            return result | {"status": "does not fit"}
        times: Times | None = found.pop("times", None)
        if times is not None:
            result |= in_us(times) | {"over_floor": times.p50 / floor, "tb_per_s": size / times.p50 / 1e12}
        return result | found

    def _fast(self, case: SamplingCase) -> dict[str, Any]:
        """The times or a red status, and the error found."""
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
        key = case.rows, case.vocabulary, case.dtype
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = None
            dtype: torch.dtype = getattr(torch, case.dtype)
            # A row's logits are so small that hundreds fit into the cache.
            sets = sets_needed(case.bytes(dtype.itemsize), self.device, most=sys.maxsize)
            generator = torch.Generator(self.device).manual_seed(0)
            shape = sets, case.rows, case.vocabulary
            logits = torch.randn(*shape, generator=generator, device=self.device, dtype=dtype).mul_(_SPREAD)
            self._prepared = key, logits
        return self._prepared[1]
