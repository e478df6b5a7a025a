"""`generate` measured end to end, in every way of running it: prefill and decode separately, and memory.

A way of ours is measured only after its tokens were found to be stock's in fp32, where it can run in fp32, and its
logits to err at most twice as much as stock's in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import QuantizedCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import cache_bytes
from hf_fastdecode.generation.report import CallReport
from hf_fastdecode.measurement.calls import (
    begin_peak,
    collect,
    counted_tokens,
    peak_over,
    percentiles,
    prefill_and_decode,
    seeded,
    step_columns,
    wall_samples,
    wall_seconds,
    what_ran,
)
from hf_fastdecode.measurement.rows import status_of

from .calls import LatestModel, batch_caller, caller, floor_kv_bytes
from .cases import GenerateCase
from .check import check_way, small_case
from .inputs.shapes import given_of
from .ways import GenerateWay, find_way, using

_BATCH_STEPS = 4  # steps timed of `generate_batch`


class GenerateBench:
    """Measures `generate` on one device; with `check`, one of our ways only after its check.

    Each call is timed `repeats` times at most, and not again after `budget_s` seconds. If a way's first call takes
    longer than that, it runs no more often than its times need.
    """

    def __init__(self, device: torch.device, *, repeats: int = 3, check: bool = True, budget_s: float = 20.0):
        self.device, self.repeats, self.check, self.budget_s = device, repeats, check, budget_s
        self._model = LatestModel(device)
        self._single_prefills: dict[tuple[str, str, str | None, int], float] = {}
        self._checked: dict[tuple[str, str, GenerateCase], str | None] = {}

    def measure(self, case: GenerateCase, way_name: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``first_call_s``: seconds of the first call of the way, with what it captures and compiles. ``prefill_s``:
        seconds to the first token of all samples; ``single_prefill_s``: stock's, of one sample. ``ms_per_step``:
        ``(time(new_tokens) - time(1)) / (new_tokens - 1)``. ``tokens_per_s``: tokens drawn after the first one of each
        sample, over the time for them. ``total_s``: seconds of the whole call. ``kv_bytes``: held by the cache at its
        end, but for quantized caches; ``floor_kv_bytes``: of the prompts' tokens, and an encoder's, once and every
        sample's, as keys and values. ``peak_bytes``: most memory over the weights since the way was turned on, on
        CUDA. ``embedded_tokens``: tokens that the decoder's embedding saw in a call, where a hook can count them.
        ``ran``: what our report says ran. Times are medians.
        """
        way = find_way(way_name)
        result = dict.fromkeys(_COLUMNS)
        mode = (way.enable or {}).get("mode")
        if mode == "graph" and self.device.type != "cuda":  # said before weights are made
            return result | {"status": f"not run: mode={mode!r} needs a CUDA device, got {self.device.type}"}
        if self.check and way.exact and way.enable is not None and (red := self._red(case, way_name, way)):
            return result | {"status": red}
        try:
            return result | {"status": "ok"} | self._measured(self._model.of(case, way), case, way)
        except Exception as error:
            return result | {"status": status_of(error)}
        finally:
            collect()

    def _red(self, case: GenerateCase, way_name: str, way: GenerateWay) -> str | None:
        """Why the way must not be measured: its check found it wrong, or it does not run at all."""
        small = small_case(case.shape)
        key = way_name, case.dtype, small
        if key not in self._checked:
            self._checked[key] = check_way(way, self.device, getattr(torch, case.dtype), small)
        return self._checked[key]

    def _measured(self, model: PreTrainedModel, case: GenerateCase, way: GenerateWay) -> dict[str, Any]:
        call = batch_caller(model, case) if way.batch else caller(model, case, way)
        most = min(case.new_tokens, 1 + _BATCH_STEPS) if way.batch else case.new_tokens
        compare = self.check and case.dtype == "float32" and way.exact and way.enable is not None
        stock = None
        if compare:
            with seeded(self.device):
                stock = caller(model, case, replace(way, enable=None, attention=None))(most)
        collect()
        before = begin_peak(self.device)
        with using(model, way):
            first: list[Tensor] = []
            with seeded(self.device):
                first_call = wall_seconds(lambda: first.append(call(most)), self.device)
            if stock is not None and not torch.equal(stock, first[0]):
                return {"status": "wrong: other tokens than stock in this very case"}
            slow = first_call > self.budget_s
            if not slow:
                call(1)
            if not (slow or way.hooks or way.batch):
                call(most)  # compilers record in the second call
            prefills, decodes, whole = prefill_and_decode(
                model, call, most, repeats=self.repeats, budget_s=self.budget_s
            )
            peak = peak_over(self.device, before)
            last = None if way.enable is None else fd.explain(model).last_call
            parts = way.batch or (last is not None and last.rows_at_once > 0)  # of which no call returns its cache
            ran = None if way.enable is None else what_ran(model)
            memory = {} if parts else self._memory(model, case, way, call, last, slow=slow)
        memory["peak_bytes"] = peak
        drawn = case.samples * (most - 1) if way.batch else sum(case.lengths()) - case.samples
        result = step_columns(decodes, most - 1, drawn) | {"first_call_s": first_call, "ran": ran, "steps": most - 1}
        if way.attention is not None:
            return result
        result |= {"prefill_s": percentiles(prefills).p50, "single_prefill_s": self._single_prefill(model, case, way)}
        if most < case.new_tokens:
            return result | memory
        return result | {"total_s": percentiles(whole).p50} | memory

    def _single_prefill(self, model: PreTrainedModel, case: GenerateCase, way: GenerateWay) -> float:
        key = case.shape, case.dtype, way.slim, case.context
        if key not in self._single_prefills:
            call = caller(model, GenerateCase(case.shape, case.context, 1, case.new_tokens, case.dtype), GenerateWay())
            call(1)
            samples = wall_samples(lambda: call(1), self.device, repeats=self.repeats, budget_s=self.budget_s)
            self._single_prefills[key] = percentiles(samples).p50
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
            counting = counted_tokens(decoder.get_input_embeddings())
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
    *("first_call_s", "tokens_per_s", "steps", "ran"),
)
