"""`generate` measured: whole calls, with prefill and decode separately and memory; steps while completions grow.

A way of ours is measured only after its tokens were found to be stock's in fp32, where it can run in fp32, and its
logits to err at most twice as much as stock's in half precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import QuantizedCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import cache_bytes
from hf_fastdecode.generation.decoding.stopping import HostStoppingCriteria
from hf_fastdecode.generation.report import CallReport
from hf_fastdecode.measurement import calls as timed

from ..latest import Latest
from ..operator_time import measure_ceilings
from .calls import caller, check_way, compilations, floor_kv_bytes, kv_bytes_per_token, load, small_case
from .cases import CompletionCase, GenerateCase
from .experts import experts_of_steps, mixtures_of, read_bytes
from .inputs import TokenIds
from .shapes import given_of
from .ways import GenerateWay, find_way, using


class Bench:
    """Measures calls on one device; with `check`, one of our ways only after its check."""

    def __init__(self, device: torch.device, *, check: bool = True):
        self.device, self.check = device, check
        self._model: Latest[PreTrainedModel] = Latest()
        self._checked: dict[tuple[str, str, GenerateCase], str | None] = {}

    @cached_property
    def _copy_rate(self) -> float:
        """Bytes a second, measured in the same run."""
        return measure_ceilings(self.device).bytes_per_s

    def model(self, case: GenerateCase, way: GenerateWay) -> PreTrainedModel:
        dtype: torch.dtype = getattr(torch, case.dtype)
        key = case.shape, case.dtype, way.slim
        return self._model.of(key, lambda: load(case.shape, self.device, dtype, way.slim))

    def red(self, case: GenerateCase, way_name: str) -> str | None:
        """Why a way must not be measured: its check found it wrong, or it does not run at all."""
        way, small = find_way(way_name), small_case(case.shape)
        if not self.check or not way.exact or way.enable is None:
            return None
        key = way_name, case.dtype, small
        if key not in self._checked:
            self._checked[key] = check_way(way, self.device, getattr(torch, case.dtype), small)
        return self._checked[key]


class GenerateBench(Bench):
    """Measures whole calls.

    Each call is timed `repeats` times at most, and not again after `budget_s` seconds. If a way's first call takes
    longer than that, it runs no more often than its times need. Calls that warm up draw `warm_up` tokens at most.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        repeats: int = 3,
        check: bool = True,
        budget_s: float = 20.0,
        warm_up: int | None = None,
    ):
        super().__init__(device, check=check)
        self.repeats, self.budget_s, self.warm_up = repeats, budget_s, warm_up
        self._single_prefills: dict[tuple[str, str, str | None, int], float] = {}

    def measure(self, case: GenerateCase, way_name: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``first_call_s``: seconds of the first call of the way in this case, with its captures (``first_captures``) and
        the kernels that Triton compiles for it in this process (``first_compiled``), which were not on disk;
        ``first_compile_s``: the sum of their seconds, which overlap. ``prefill_s``: seconds to the first token of all
        samples; ``single_prefill_s``: stock's, of one sample. ``ms_per_step``:
        ``(time(new_tokens) - time(1)) / (new_tokens - 1)``. ``tokens_per_s``: tokens drawn after the first one of each
        sample, over the time for them. ``total_s``: seconds of the whole call. ``kv_bytes``: held by the cache at its
        end, but for quantized caches; ``floor_kv_bytes``: of the prompts' tokens, and an encoder's, once and every
        sample's, as keys and values. ``peak_bytes``: most memory over the weights since the way was turned on, on
        CUDA. ``embedded_tokens``: tokens that the decoder's embedding saw in a call, where a hook can count them.
        ``ran``: what our report says ran. ``experts``: of ours over mixtures, how many of a layer's the rows of a step
        choose, the mean of layers and steps, and ``of_experts``, how many it has; ``weights_floor_ms``: what reading
        the chosen ones and all other weights once takes at the rate of a copy. Times are medians.
        """
        way = find_way(way_name)
        mode = (way.enable or {}).get("mode")
        if mode == "graph" and self.device.type != "cuda":  # said before weights are made
            red: str | None = f"not run: mode={mode!r} needs a CUDA device, got {self.device.type}"
        else:
            red = self.red(case, way_name)
        if red:
            return dict.fromkeys(_COLUMNS) | {"status": red}
        return timed.guarded(_COLUMNS, lambda: self._measured(self.model(case, way), case, way))

    def _measured(self, model: PreTrainedModel, case: GenerateCase, way: GenerateWay) -> dict[str, Any]:
        call, most = caller(model, case, way), case.new_tokens
        few = min(most, self.warm_up or most)
        compare = few == most and self.check and case.dtype == "float32" and way.exact and way.enable is not None
        stock = None
        if compare:
            with timed.seeded(self.device):
                stock = caller(model, case, replace(way, enable=None))(most)
        timed.collect()
        before = timed.begin_peak(self.device)
        with using(model, way):
            first: list[Tensor] = []
            with timed.seeded(self.device), compilations() as compiled:
                first_call = timed.wall_seconds(lambda: first.append(call(few)), self.device)
            captures = None if (report := fd.explain(model).last_call) is None else report.captures
            if stock is not None and not torch.equal(stock, first[0]):
                return {"status": "wrong: other tokens than stock in this very case"}
            slow = first_call > self.budget_s
            if not slow:
                call(1)
            if not (slow or way.hooks):
                call(few)  # compilers record in the second call
            prefills, decodes, whole = timed.prefill_and_decode(
                model, call, most, repeats=self.repeats, budget_s=self.budget_s
            )
            peak = timed.peak_over(self.device, before)
            last = None if way.enable is None else fd.explain(model).last_call
            parts = last is not None and last.rows_at_once > 0  # of which no call returns its cache
            ran = None if way.enable is None else timed.what_ran(model)
            memory = {} if parts else self._memory(model, case, way, call, last, slow=slow or few < most)
        memory["peak_bytes"] = peak
        drawn = sum(case.lengths()) - case.samples
        result = timed.step_columns(decodes, most - 1, drawn) | {
            "first_call_s": first_call,
            "first_compiled": len(compiled),
            "first_compile_s": sum(compiled),
            "first_captures": captures,
            "ran": ran,
            "steps": most - 1,
        }
        if not way.attention:
            return result
        result |= {
            "prefill_s": timed.percentiles(prefills).p50,
            "single_prefill_s": self._single_prefill(model, case, way),
        }
        if way.enable is not None and not (way.beams or way.single):  # whose steps are of other rows or tokens
            with suppress(torch.OutOfMemoryError):  # of stock's passes: what was timed stays
                memory |= self._experts(model, case, first[0][:, -few:])
        return result | {"total_s": timed.percentiles(whole).p50} | memory

    def _experts(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> dict[str, Any]:
        """The columns about experts of a call that drew these tokens, ``[rows, tokens]``."""
        given = given_of(case.shape)
        if not (mixtures := mixtures_of(model)) or type(given) is not TokenIds or case.finish:
            return {}
        prompts = given.arguments(model, case)["input_ids"]
        counts = experts_of_steps(model, prompts, drawn)
        found: dict[str, Any] = {"experts": float(counts.double().mean()), "of_experts": len(mixtures[0].gate_up_proj)}
        return found | {"weights_floor_ms": 1e3 * read_bytes(model, counts) / self._copy_rate}

    def _single_prefill(self, model: PreTrainedModel, case: GenerateCase, way: GenerateWay) -> float:
        key = case.shape, case.dtype, way.slim, case.context
        if key not in self._single_prefills:
            call = caller(model, GenerateCase(case.shape, case.context, 1, case.new_tokens, case.dtype), GenerateWay())
            call(1)
            samples = timed.wall_samples(lambda: call(1), self.device, repeats=self.repeats, budget_s=self.budget_s)
            self._single_prefills[key] = timed.percentiles(samples).p50
        return self._single_prefills[key]

    def _memory(
        self,
        model: PreTrainedModel,
        case: GenerateCase,
        way: GenerateWay,
        call: Callable[..., Any],
        last: CallReport | None,
        *,
        slow: bool,
    ) -> dict[str, Any]:
        """Bytes of the cache that a call returns, or the report of an earlier one has, and tokens embedded, where
        counting does not change the way; of slow calls of ours by the report alone."""
        counts = way.hooks or self.device.type == "cpu"
        decoder: Any = model.get_decoder() if model.config.is_encoder_decoder else model
        counting: AbstractContextManager[list[int]] = nullcontext([])
        if counts:
            counting = timed.counted_tokens(decoder.get_input_embeddings())
        with counting as counted:
            held = None if last is None else last.nbytes.allocated
            if (given_of(case.shape).returns_cache and not slow) or (last is None and not way.beams):
                cache = call(case.new_tokens, return_dict=True)[CACHE]
                held = None if cache is None or isinstance(cache, QuantizedCache) else cache_bytes(cache)
            elif counts and not slow:
                call(case.new_tokens)
        return {
            "kv_bytes": held,
            "floor_kv_bytes": floor_kv_bytes(model, case),
            "embedded_tokens": sum(counted) or None,
        }


_COLUMNS = (
    *("status", "prefill_s", "single_prefill_s", "ms_per_step", "ms_per_step_p20", "ms_per_step_p80", "total_s"),
    *("kv_bytes", "floor_kv_bytes", "peak_bytes", "embedded_tokens"),
    *("first_call_s", "first_compiled", "first_compile_s", "first_captures", "tokens_per_s", "steps", "ran"),
    *("experts", "of_experts", "weights_floor_ms"),
)


_WARM_UP = 24  # tokens of the calls that capture and compile
_STEPS_BETWEEN_LOOKS = 64  # between comparisons with the budget, each of which synchronizes with the device


class CompletionBench(Bench):
    """Measures growing completions: one call, timed at several lengths of its completions.

    A call ends after `budget_s` seconds of decoding; spans that it did not finish have no time.
    """

    def __init__(self, device: torch.device, *, check: bool = True, budget_s: float = 120.0):
        super().__init__(device, check=check)
        self.budget_s = budget_s
        self._timed: dict[tuple[GenerateCase, tuple[int, ...], str], dict[str, Any]] = {}

    def measure(self, case: CompletionCase, way_name: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``ms_per_step``: mean over the steps of the span. ``kv_floor_ms``: what reading the keys and values of a step
        takes at the rate of a copy, measured in the same run; of a slim model those of the ordinary one.
        ``peak_bytes``: most memory over the weights in the whole call. ``ran``: what our report says ran.
        """
        key = case.call, case.marks, way_name
        if key not in self._timed:  # once for all spans of the call
            red = self.red(case.call, way_name)
            measure = lambda: self._timed_call(case, find_way(way_name))  # noqa: E731
            self._timed[key] = {"status": red} if red else timed.guarded((), measure)
        found = dict(self._timed[key])
        times, bytes_per_token = found.pop("times", {}), found.pop("bytes_per_token", 0)
        result = dict.fromkeys(_SPAN_COLUMNS) | found
        if result["status"] != "ok":
            return result
        if case.span not in times:
            return result | {"status": f"not run: cut short after {self.budget_s:g} s"}
        floor_s = case.kv_tokens() * bytes_per_token / self._copy_rate
        return result | {"ms_per_step": times[case.span], "kv_floor_ms": 1e3 * floor_s}

    def _timed_call(self, case: CompletionCase, way: GenerateWay) -> dict[str, Any]:
        model = self.model(case.call, way)
        timed.collect()
        before = timed.begin_peak(self.device)
        with using(model, way):
            call = caller(model, case.call, way)
            for _ in range(1 + way.compiles):  # compilers record in the second call
                call(_WARM_UP)
            timed.collect()
            timed.begin_peak(self.device)
            clock = StepClock(case.call.context, case.marks, self.device, self.budget_s)
            with timed.seeded(self.device):
                caller(model, case.call, way, stopping=clock)(case.call.new_tokens)
            ran = None if way.enable is None else timed.what_ran(model)
        return {
            "times": clock.ms_per_step(),
            "bytes_per_token": kv_bytes_per_token(model),
            "peak_bytes": timed.peak_over(self.device, before),
            "ran": ran,
        }


_SPAN_COLUMNS = ("status", "ms_per_step", "kv_floor_ms", "peak_bytes", "ran")


class StepClock(HostStoppingCriteria):
    """Times a call when its completions have `marks` tokens, and ends it after `budget_s` seconds.

    CUDA events take the time, so that steps do not wait for the host.
    """

    def __init__(self, prompt_length: int, marks: tuple[int, ...], device: torch.device, budget_s: float):
        self.prompt_length, self.marks, self.device, self.budget_s = prompt_length, marks, device, budget_s
        self._taken: dict[int, Any] = {}
        self._start: float | None = None

    def is_over(self, length: int) -> bool:
        """Take the time if the length is at a mark; return whether the call has taken too long."""
        tokens = length - self.prompt_length
        if tokens in self.marks:
            self._taken[tokens] = self._now()
        if tokens % _STEPS_BETWEEN_LOOKS:
            return False
        now = timed.idle_time(self.device)
        self._start = self._start or now
        return now - self._start > self.budget_s

    def ms_per_step(self) -> dict[tuple[int, int], float]:
        """Milliseconds of a step in each span that was finished."""
        timed.synchronize(self.device)
        return {
            (first, last): self._ms(self._taken[first], self._taken[last]) / (last - first)
            for first, last in pairwise(self.marks)
            if last in self._taken
        }

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _ms(self, before: Any, after: Any) -> float:
        if self.device.type != "cuda":
            return 1e3 * float(after - before)
        return float(before.elapsed_time(after))
