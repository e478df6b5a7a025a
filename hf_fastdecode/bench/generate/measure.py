"""`generate` measured end to end, in every way of running it: prefill apart from decode, with the memory it takes.

A way of ours is measured only after its tokens were found to be stock's in fp32, where it can run in fp32, and its
logits to err at most twice as much as stock's in half precision.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import QuantizedCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import cache_bytes

from ...measurement.status import NotAvailableError, status_of
from ...measurement.timing import Times, percentiles, wall_samples, wall_seconds
from .calls import batch_caller, caller, kv_bytes_per_token, load
from .cases import GenerateCase
from .check import check_way
from .ways import GenerateWay, find_way, using

_BATCH_STEPS = 4  # steps timed of `generate_batch`


class GenerateBench:
    """Measures `generate` on one device.

    Args:
        device: Where to run.
        repeats: Timed runs of each call, at most.
        check: Measure one of our ways only after its check.
        budget_s: Seconds after which a call is not repeated.
    """

    def __init__(self, device: torch.device, *, repeats: int = 3, check: bool = True, budget_s: float = 20.0):
        self.device, self.repeats, self.check, self.budget_s = device, repeats, check, budget_s
        self._loaded: tuple[tuple[str, str, str | None], PreTrainedModel] | None = None
        self._single_prefills: dict[tuple[str, str, str | None, int], float] = {}
        self._checked: dict[tuple[str, str], str | None] = {}

    def measure(self, case: GenerateCase, way_name: str) -> dict[str, Any]:
        """The columns of one way's row.

        ``first_call_s``: seconds of the first call of the way, with what it captures and compiles. ``prefill_s``:
        seconds to the first token of all samples; ``single_prefill_s``: stock's, of one sample. ``ms_per_step``:
        ``(time(new_tokens) - time(1)) / (new_tokens - 1)``. ``tokens_per_s``: tokens drawn after the first one of each
        sample, over the time for them. ``total_s``: seconds of the whole call. ``kv_bytes``: held by the cache at its
        end, but for quantized caches; ``floor_kv_bytes``: of the prompts' tokens once and every sample's, as keys and
        values. ``peak_bytes``: most memory over the weights since the way was turned on, on CUDA. ``embedded_tokens``:
        tokens that the embedding saw in a call, where a hook can count them. ``ran``: what our report says ran. Times
        are medians.
        """
        way = find_way(way_name)
        result = dict.fromkeys(_COLUMNS)
        mode = (way.enable or {}).get("mode")
        if mode in ("graph", "compile") and self.device.type != "cuda":  # said before weights are made
            return result | {"status": f"not run: mode={mode!r} needs a CUDA device, got {self.device.type}"}
        if self.check and way.exact and way.enable is not None and (red := self._red(case, way_name, way)):
            return result | {"status": red}
        try:
            return result | {"status": "ok"} | self._measured(self._model(case, way), case, way)
        except Exception as error:
            return result | {"status": status_of(error)}
        finally:
            collect()

    def _red(self, case: GenerateCase, way_name: str, way: GenerateWay) -> str | None:
        """Why the way must not be measured: its check found it wrong, or it does not run at all."""
        key = way_name, case.dtype
        if key not in self._checked:
            self._checked[key] = check_way(way, self.device, getattr(torch, case.dtype))
        return self._checked[key]

    def _model(self, case: GenerateCase, way: GenerateWay) -> PreTrainedModel:
        key = case.shape, case.dtype, way.slim
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None
            collect()
            self._loaded = key, load(case.shape, self.device, getattr(torch, case.dtype), way.slim)
        return self._loaded[1]

    def _measured(self, model: PreTrainedModel, case: GenerateCase, way: GenerateWay) -> dict[str, Any]:
        call = batch_caller(model, case) if way.batch else caller(model, case, way)
        most = min(case.new_tokens, 1 + _BATCH_STEPS) if way.batch else case.new_tokens
        compare = self.check and case.dtype == "float32" and way.exact and way.enable is not None
        stock = _seeded(lambda: caller(model, case, GenerateWay(beams=way.beams))(most)) if compare else None
        collect()
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with using(model, way):
            first: list[Tensor] = []
            first_call = wall_seconds(lambda: first.append(_seeded(lambda: call(most))), self.device)
            if stock is not None and not torch.equal(stock, first[0]):
                return {"status": "wrong: other tokens than stock in this very case"}
            call(1)
            if not way.hooks and not way.batch:
                call(most)  # compilers record in the second call

            def captured() -> bool:
                last = fd.explain(model).last_call if way.enable is not None else None
                return last is not None and last.captures > 0

            short = percentiles(self._samples(lambda: call(1), captured))
            whole = self._samples(lambda: call(most), captured)
            memory = {} if way.batch else self._memory(model, case, way, call)
            ran = what_ran(model, way)
        if self.device.type == "cuda":
            memory["peak_bytes"] = torch.cuda.max_memory_allocated(self.device) - before
        steps = percentiles([1e3 * (seconds - short.p50) / (most - 1) for seconds in whole])
        drawn = case.samples * (most - 1) if way.batch else sum(case.lengths()) - case.samples
        result = _times(steps, drawn, most) | {"first_call_s": first_call, "ran": ran, "steps": most - 1}
        if way.attention is not None:
            return result
        result |= {"prefill_s": short.p50, "single_prefill_s": self._single_prefill(model, case, way)}
        if most < case.new_tokens:
            return result | memory
        return result | {"total_s": percentiles(whole).p50} | memory

    def _samples(self, call: Callable[[], Any], warming: Callable[[], bool] = lambda: False) -> list[float]:
        return wall_samples(call, self.device, repeats=self.repeats, budget_s=self.budget_s, warming=warming)

    def _single_prefill(self, model: PreTrainedModel, case: GenerateCase, way: GenerateWay) -> float:
        key = case.shape, case.dtype, way.slim, case.context
        if key not in self._single_prefills:
            call = caller(model, GenerateCase(case.shape, case.context, 1, case.new_tokens, case.dtype), GenerateWay())
            call(1)
            self._single_prefills[key] = percentiles(self._samples(lambda: call(1))).p50
        return self._single_prefills[key]

    def _memory(
        self, model: PreTrainedModel, case: GenerateCase, way: GenerateWay, call: Callable[..., Any]
    ) -> dict[str, Any]:
        """Bytes of the cache that a call returns, and tokens embedded, where counting does not change the way."""
        counted: list[int] = []
        counts = way.hooks or self.device.type == "cpu"
        hook = model.get_input_embeddings().register_forward_hook(
            lambda module, args, out: counted.append(args[0].numel())
        )
        if not counts:
            hook.remove()
        try:
            cache = call(case.new_tokens, return_dict=True)[CACHE]
        finally:
            hook.remove()
        tokens = case.prompt_tokens + sum(case.lengths())
        counted_whole = cache is not None and not isinstance(cache, QuantizedCache)
        return {
            "kv_bytes": cache_bytes(cache) if counted_whole else None,
            "floor_kv_bytes": tokens * kv_bytes_per_token(model),
            "embedded_tokens": sum(counted) if counts else None,
        }


_COLUMNS = (
    *("status", "prefill_s", "single_prefill_s", "ms_per_step", "ms_per_step_p20", "ms_per_step_p80", "total_s"),
    *("kv_bytes", "floor_kv_bytes", "peak_bytes", "embedded_tokens"),
    *("first_call_s", "tokens_per_s", "steps", "ran"),
)


def _seeded(call: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return call()


def _times(steps: Times, drawn: int, most: int) -> dict[str, Any]:
    seconds = 1e-3 * steps.p50 * (most - 1)  # the difference of two times, which noise may turn around
    return {
        "ms_per_step": steps.p50,
        "ms_per_step_p20": steps.p20,
        "ms_per_step_p80": steps.p80,
        "tokens_per_s": drawn / seconds if seconds > 0 else None,
    }


def what_ran(model: PreTrainedModel, way: GenerateWay) -> str | None:
    """What the report says of the last call.

    Raises:
        NotAvailableError: It ran stock, which is not what was to be measured.
    """
    if way.enable is None:
        return None
    call = fd.explain(model).last_call
    if call is None or call.path != "shared":
        raise NotAvailableError(f"it ran stock: {'no call' if call is None else call.reason}")
    words = [call.mode, f"sampler {call.sampler}"]
    words += [f"{call.waves} waves"] if call.waves > 1 else []
    words += [f"{call.compactions} compactions"] if call.compactions else []
    return ", ".join(words)


def collect() -> None:
    """Free the device memory that nothing refers to."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
