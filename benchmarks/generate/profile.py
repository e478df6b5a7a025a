"""Breakdown of the GPU time of a first token and of a step: kernels by what they compute, and pauses."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hf_fastdecode.measurement.calls import guarded, percentiles, prefill_and_decode, synchronize, what_ran

from .calls import caller
from .cases import KINDS, GenerateCase, ProfileCase
from .measure import Bench
from .ways import GenerateWay, find_way, using

_PATTERNS = {
    "products": r"gemm|gemv|nvjet|cutlass|xmma|splitk|products?\b|opened|add_up|route\b|absorb",
    "attention": r"node_partials|attend|merge|flash|fmha|attention|causal|slim_partials|append_token|cudnn_generated",
    "pointwise": r"normaliz|rotate|gate\b|layer_norm|rms|silu|gelu|\bcos_|\bsin_",
    "sampling": r"sample|softmax|topk|sort|multinomial|column_totals|argmax",
    "copies": r"memcpy|memset|copy|cat(array)?|index|scatter|gather|fill",
}
"""Names of kernels, this package's, PyTorch's and its libraries', by kind; the first that matches counts."""

_MOST_NAMED = 4  # kernels


class Kernel(NamedTuple):
    """One kernel's or copy's run: its name, and from when to when, in microseconds."""

    name: str
    begin: float
    end: float


@dataclass
class Profile:
    """Sums of a call: microseconds of each kind and of each kernel, launches, and how long any of them ran."""

    kinds: dict[str, float]
    kernels: dict[str, float]
    launches: int
    busy_us: float

    @classmethod
    def of(cls, kernels: Iterable[Kernel]) -> Profile:
        found = cls(defaultdict(float), defaultdict(float), 0, 0.0)
        end = float("-inf")
        for one in sorted(kernels, key=lambda kernel: kernel.begin):
            found.kinds[kind_of(one.name)] += one.end - one.begin
            found.kernels[one.name] += one.end - one.begin
            found.launches += 1
            found.busy_us += max(0.0, one.end - max(one.begin, end))  # kernels may overlap
            end = max(end, one.end)
        return found

    def step(self, first: Profile, steps: int) -> Profile:
        """The time of a step, this being a whole call of so many steps and `first` a call without any."""

        def part(whole: dict[str, float], before: dict[str, float]) -> dict[str, float]:
            return {name: max(0.0, us - before.get(name, 0.0)) / steps for name, us in whole.items()}

        return Profile(
            part(self.kinds, first.kinds),
            part(self.kernels, first.kernels),
            round((self.launches - first.launches) / steps),
            (self.busy_us - first.busy_us) / steps,
        )

    def columns(self) -> dict[str, Any]:
        ordered = sorted(self.kernels.items(), key=lambda entry: -entry[1])[:_MOST_NAMED]
        largest = [f"{_short(name)} {us:.0f} us" for name, us in ordered]
        kinds = {f"{kind}_ms": self.kinds.get(kind, 0.0) / 1e3 for kind in KINDS}
        return {"busy_ms": self.busy_us / 1e3, **kinds, "launches": self.launches, "largest": "; ".join(largest)}


@cache
def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def _short(name: str) -> str:
    """A kernel's name without template arguments and what encloses it."""
    return name.partition("<")[0].partition("(")[0].rpartition("::")[2].removeprefix("void ").strip() or name[:40]


class ProfileBench(Bench):
    """Profiles ways of ours and stock's on a CUDA device."""

    def __init__(self, device: torch.device, *, repeats: int = 3, budget_s: float = 20.0):
        super().__init__(device, check=False)
        self.repeats, self.budget_s = repeats, budget_s
        self._found: dict[tuple[GenerateCase, str], dict[str, dict[str, Any]]] = {}

    def measure(self, case: ProfileCase, way_name: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``ms``: of the first token or of a step, by the clock, without the profiler; a median. ``busy_ms``: in which
        the GPU ran a kernel or a copy, with the profiler. ``<kind>_ms``, for each of `KINDS`: sums of the kernels of
        that kind; as kernels may overlap, their sum may be more than ``busy_ms``. ``launches``: kernels and copies.
        ``largest``: kernels that take the most time. ``ran``: what our report says ran.
        """

        def profiled() -> dict[str, Any]:
            if (key := (case.call, way_name)) not in self._found:
                self._found[key] = self._profiled(case.call, find_way(way_name))
            return self._found[key][case.part]

        return guarded(_COLUMNS, profiled)

    def _profiled(self, case: GenerateCase, way: GenerateWay) -> dict[str, dict[str, Any]]:
        model = self.model(case, way)
        call, steps = caller(model, case, way), case.new_tokens - 1
        with using(model, way):
            for count in (case.new_tokens, 1, case.new_tokens):  # compiles, captures
                call(count)
            prefills, decodes, _ = prefill_and_decode(
                model, call, case.new_tokens, repeats=self.repeats, budget_s=self.budget_s
            )
            first, whole = self._profile(partial(call, 1)), self._profile(partial(call, case.new_tokens))
            ran = None if way.enable is None else what_ran(model)
        step_ms = 1e3 * percentiles(decodes).p50 / steps
        return {
            "first token": first.columns() | {"ms": 1e3 * percentiles(prefills).p50, "ran": ran},
            "step": whole.step(first, steps).columns() | {"ms": step_ms, "ran": ran},
        }

    def _profile(self, call: Callable[[], object]) -> Profile:
        synchronize(self.device)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            synchronize(self.device)
        return Profile.of(
            Kernel(event.name, event.time_range.start, event.time_range.end)
            for event in found.events()
            if event.device_type.name == "CUDA"
        )


_COLUMNS = ("status", "ms", "busy_ms", *(f"{kind}_ms" for kind in KINDS), "launches", "largest", "ran")
