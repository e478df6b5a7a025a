"""Decode steps of whole models measured: one GPU, the context divided, or the model split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.measurement import SAMPLING
from hf_fastdecode.measurement.calls import collect, idle_time, seeded, step_columns, what_ran
from hf_fastdecode.measurement.rows import status_of

from .cases import StepCase
from .models import make_model, random_context, random_prompt, random_stock_context
from .processes import OneProcess, PeerStatusError, Processes

_CHECKED_CONTEXT, _CHECKED_ROWS, _CHECKED_TOKENS = 200, 4, 12


class StepBench:
    """Measures steps on the processes, all of which call it alike; with `check`, only ways with stock's tokens."""

    def __init__(self, processes: Processes, *, repeats: int = 2, check: bool = True):
        self.processes, self.repeats, self.check = processes, repeats, check
        self._model: tuple[tuple[Any, ...], PreTrainedModel] | None = None
        self._checked: dict[str, str | None] = {}

    def measure(self, case: StepCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``ms_per_step``: ``(time(new_tokens) - time(1)) / (new_tokens - 1)`` of calls that are given the context's
        cache. ``first_token_s``: seconds of computing the context, where it is computed. ``prefill_peak_bytes``,
        ``decode_peak_bytes``: most memory of a process meanwhile, weights and cache among it. ``kv_bytes``: keys and
        values of the context on one process. ``ran``: what our report says ran. A way's tokens are first checked on a
        tiny model: in fp32 they are stock's.
        """
        result: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"status": "ok"}
        try:
            if way == "one-gpu":
                if self.processes.rank and self._model is not None and self._model[0][2] is not None:
                    self.drop()  # rank 0 lets go of its part of the split model
                found = self.processes.alone(lambda: self._measured(case, way, OneProcess(self.processes.device)))
                return result | self.processes.first(found)
            if self.check and (red := self._red(way)):
                return result | {"status": red}
            return result | self._measured(case, way, self.processes)
        except Exception as error:
            self.drop()
            return result | {"status": str(error) if isinstance(error, PeerStatusError) else status_of(error)}
        finally:
            collect()

    def drop(self) -> None:
        """Let go of the model."""
        self._model = None
        collect()

    def _measured(self, case: StepCase, way: str, processes: Processes | OneProcess) -> dict[str, Any]:
        model = self._of(case, way)
        ids = random_prompt(model, case.context)
        measured = _stock if way.startswith("stock") else _ours
        with self._enabled(model, way):
            found = measured(model, case, ids, self.repeats)
        return {name: _largest(processes, one) for name, one in found.items()}

    def _of(self, case: StepCase, way: str) -> PreTrainedModel:
        """The model of a way; kept until another is asked for."""
        split, whole_heads = self._split(way)
        key = case.shape, case.dtype, split, whole_heads
        if self._model is None or self._model[0] != key:
            self.drop()
            dtype: torch.dtype = getattr(torch, case.dtype)
            self._model = (
                key,
                make_model(case.shape, self.processes.device, dtype, split=split, whole_heads=whole_heads),
            )
        return self._model[1]

    def _split(self, way: str) -> tuple[int | None, bool]:
        """How many processes a way's weights are split between, and whether each has all attention heads."""
        return self.processes.count if way in ("tensor", "stock-tensor", "helix") else None, way == "helix"

    @contextmanager
    def _enabled(self, model: PreTrainedModel, way: str) -> Iterator[None]:
        if way == "stock-tensor":
            yield
            return
        # The kernels of captured steps take no fp32, as the check's model is.
        mode = "graph" if self.processes.device.type == "cuda" and model.dtype != torch.float32 else "auto"
        with fd.enabled(model, mode=mode, sequence_parallel="auto" if way in ("sequence", "helix") else False):
            yield

    def _red(self, way: str) -> str | None:
        """What a row says of a way whose tokens are not stock's on a tiny model in fp32; on every process alike."""
        if way == "stock-tensor":
            return None
        if way not in self._checked:
            split, whole_heads = self._split(way)
            shape = "tiny" if self.processes.count <= 2 else "tiny-8-heads"  # tensor parallelism splits KV heads
            model = make_model(shape, self.processes.device, torch.float32, split=split, whole_heads=whole_heads)
            ids = random_prompt(model, _CHECKED_CONTEXT)

            def tokens() -> list[Any]:
                drawn: list[Any] = _generate(
                    model, ids, _CHECKED_TOKENS, None, num_return_sequences=_CHECKED_ROWS
                ).tolist()
                return drawn

            stock = tokens()
            with self._enabled(model, way):
                same = tokens() == stock
            right = all(self.processes.gathered(same))
            self._checked[way] = None if right else "wrong: other tokens than stock in fp32"
            del model
            collect()
        return self._checked[way]


_COLUMNS = (
    *("status", "ms_per_step", "ms_per_step_p20", "ms_per_step_p80", "tokens_per_s", "first_token_s"),
    *("decode_peak_bytes", "prefill_peak_bytes", "kv_bytes", "ran"),
)


def _largest(processes: Processes | OneProcess, one: Any) -> Any:
    """A column of all processes: the largest time or size."""
    found = processes.gathered(one)
    return max(found) if isinstance(one, int | float) else found[0]


def _ours(model: PreTrainedModel, case: StepCase, ids: Tensor, repeats: int) -> dict[str, Any]:
    """Steps of an enabled model over a kept cache."""
    found: dict[str, Any] = {}
    if case.fill == "prefill":
        fd.prefill(model, ids[:, : min(4096, case.context // 2)])  # compiles
        cache, seconds, peak = _watched(model, lambda: fd.prefill(model, ids[:, :-1]))
        found = {"first_token_s": seconds, "prefill_peak_bytes": peak}
    else:
        cache = random_context(model, ids[:, :-1])

    def call(new_tokens: int) -> Tensor:
        return _generate(model, ids, new_tokens, cache, num_return_sequences=case.rows)

    return found | _steps(model, call, case, repeats) | {"kv_bytes": cache.nbytes.stored, "ran": what_ran(model)}


def _stock(model: PreTrainedModel, case: StepCase, ids: Tensor, repeats: int) -> dict[str, Any]:
    """Steps of transformers, each call of which is given a cache of its own, as it appends to it."""
    found: dict[str, Any] = {}
    if case.fill == "prefill":
        _generate(model, ids[:, : min(4096, case.context // 2)], 1, None)
        _, seconds, peak = _watched(model, lambda: _generate(model, ids, 1, None))
        found = {"first_token_s": seconds, "prefill_peak_bytes": peak}
    every = ids.expand(case.rows, -1)

    def call(new_tokens: int) -> Tensor:
        return _generate(model, every, new_tokens, random_stock_context(model, ids[:, :-1], case.rows))

    return found | _steps(model, call, case, repeats)


def _generate(model: PreTrainedModel, ids: Tensor, new_tokens: int, cache: Any, **more: Any) -> Tensor:
    given = {} if cache is None else {CACHE: cache}
    with seeded(model.device):
        tokens: Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            **given,
            **SAMPLING,
            **more,
        )
    return tokens


def _steps(model: PreTrainedModel, call: Callable[[int], Tensor], case: StepCase, repeats: int) -> dict[str, Any]:
    """Times of a step; every process makes as many calls."""
    for _ in range(2):  # captures steps, and compiles what they run
        call(min(4, case.new_tokens))
    decodes = []
    _, first, _ = _watched(model, lambda: call(1))
    peak = 0
    for _ in range(repeats):
        first = min(first, _watched(model, lambda: call(1))[1])
        _, seconds, now = _watched(model, lambda: call(case.new_tokens))
        decodes.append(seconds)
        peak = max(peak, now or 0)
    steps = case.new_tokens - 1
    found = step_columns([seconds - first for seconds in decodes], steps, steps * case.rows)
    return found | {"decode_peak_bytes": peak or None}


def _watched(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[Any, float, int | None]:
    """What a call returns, its seconds, and the most bytes that this process's device held meanwhile."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = idle_time(device)
    result = call()
    seconds = idle_time(device) - start
    return result, seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
