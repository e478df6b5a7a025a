"""Decode steps of whole models measured, with random weights: one GPU, the context divided, or the model split."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.forest import Forest, Span
from hf_fastdecode.attention.kv import Segment
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.cli.console import quiet_libraries
from hf_fastdecode.measurement import SAMPLING
from hf_fastdecode.measurement.calls import begin_peak, collect, seeded, step_columns, wall_seconds, what_ran
from hf_fastdecode.measurement.shapes import config_of, random_model

from ..latest import Latest
from .cases import StepCase
from .processes import OneProcess, Processes, guarded_by_all

_CHECKED_CONTEXT, _CHECKED_ROWS, _CHECKED_TOKENS = 200, 4, 12


class StepBench:
    """Measures steps on the processes, all of which call it alike; with `check`, only ways with stock's tokens."""

    def __init__(self, processes: Processes, *, repeats: int = 2, check: bool = True):
        self.processes, self.repeats, self.check = processes, repeats, check
        self._model: Latest[PreTrainedModel] = Latest()
        self._checked: dict[str, str | None] = {}

    def measure(self, case: StepCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``ms_per_step``: ``(time(new_tokens) - time(1)) / (new_tokens - 1)`` of calls that are given the context's
        cache. ``first_token_s``: seconds of computing the context, where it is computed. ``prefill_peak_bytes``,
        ``decode_peak_bytes``: most memory of a process meanwhile, weights and cache among it. ``kv_bytes``: keys and
        values of the context on one process. ``ran``: what our report says ran. A way's tokens are first checked on a
        tiny model: in fp32 they are stock's.
        """
        return guarded_by_all(_COLUMNS, self.drop, lambda: self._checked_and_measured(case, way))

    def _checked_and_measured(self, case: StepCase, way: str) -> dict[str, Any]:
        if way == "one-gpu":
            if self.processes.rank:
                self.drop()  # this rank's part of a split model, which rank 0 drops too
            found = self.processes.alone(lambda: self._measured(case, way, OneProcess(self.processes.device)))
            columns: dict[str, Any] = self.processes.first(found)
            return columns
        if self.check and (red := self._red(way)):
            return {"status": red}
        return self._measured(case, way, self.processes)

    def drop(self) -> None:
        self._model.drop()

    def _measured(self, case: StepCase, way: str, processes: Processes | OneProcess) -> dict[str, Any]:
        split, whole_heads = self._split(way)
        dtype: torch.dtype = getattr(torch, case.dtype)
        model = self._model.of(
            (case.shape, case.dtype, split, whole_heads),
            lambda: make_model(case.shape, processes.device, dtype, split=split, whole_heads=whole_heads),
        )
        ids = random_prompt(model, case.context)
        measured = _stock if way.startswith("stock") else _ours
        with self._enabled(model, way):
            found = measured(model, case, ids, self.repeats)
        return {name: _largest(processes, one) for name, one in found.items()}

    def _split(self, way: str) -> tuple[int | None, bool]:
        """Processes that a way's weights are split between, and whether each has all attention heads."""
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
        """The status of a way whose tokens are not stock's on a tiny model in fp32, on every process; else None."""
        if way == "stock-tensor":
            return None
        if way not in self._checked:
            split, whole_heads = self._split(way)
            shape = "tiny" if self.processes.count <= 2 else "tiny-8-heads"  # tensor parallelism splits KV heads
            model = make_model(shape, self.processes.device, torch.float32, split=split, whole_heads=whole_heads)
            ids = random_prompt(model, _CHECKED_CONTEXT)

            def tokens() -> Tensor:
                return _generate(model, ids, _CHECKED_TOKENS, None, num_return_sequences=_CHECKED_ROWS)

            stock = tokens()
            with self._enabled(model, way):
                same = torch.equal(tokens(), stock)
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
    found = processes.gathered(one)
    return max(found) if isinstance(one, int | float) else found[0]


def _ours(model: PreTrainedModel, case: StepCase, ids: Tensor, repeats: int) -> dict[str, Any]:
    """Steps of an enabled model over a kept cache."""
    found: dict[str, Any] = {}
    if case.fill == "prefill":
        fd.prefill(model, ids[:, : min(4096, case.context // 2)])  # compiles
        cache, found = _first_token(model, lambda: fd.prefill(model, ids[:, :-1]))
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
        _, found = _first_token(model, lambda: _generate(model, ids, 1, None))
    every = ids.expand(case.rows, -1)

    def call(new_tokens: int) -> Tensor:
        return _generate(model, every, new_tokens, random_stock_context(model, ids[:, :-1], case.rows))

    return found | _steps(model, call, case, repeats)


def _first_token(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    result, seconds, peak = _watched(model, call)
    return result, {"first_token_s": seconds, "prefill_peak_bytes": peak}


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
    first = min(_watched(model, lambda: call(1))[1] for _ in range(1 + repeats))
    watched = [_watched(model, lambda: call(case.new_tokens))[1:] for _ in range(repeats)]
    steps = case.new_tokens - 1
    found = step_columns([seconds - first for seconds, _ in watched], steps, steps * case.rows)
    return found | {"decode_peak_bytes": max(peak or 0 for _, peak in watched) or None}


def _watched(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[Any, float, int | None]:
    """The result of a call, its seconds, and the most bytes that this process's device held meanwhile."""
    device, found = model.device, []
    begin_peak(device)
    seconds = wall_seconds(lambda: found.append(call()), device)
    return found[0], seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


_FEW = 64  # tokens of a context that are computed, so that its cache has the layout of the model's

_POSITIONS = 1 << 21  # longer than any context that is measured


def make_model(
    shape: str, device: torch.device, dtype: torch.dtype, *, split: int | None, whole_heads: bool = False
) -> PreTrainedModel:
    """A model with random weights, whole on every process, or split; with `whole_heads` all but attention heads."""
    if split is None:
        return random_model(shape, device, dtype, positions=_POSITIONS)
    from transformers.distributed import DistributedConfig

    config = config_of(shape, dtype, positions=_POSITIONS)
    with torch.device("meta"):
        family: type[PreTrainedModel] = type(AutoModelForCausalLM.from_config(config))
    plan = fd.sequence_parallel_plan(config) if whole_heads else None
    torch.manual_seed(0)
    # Without a checkpoint every weight is missing, and is drawn as a new model's is.
    with quiet_libraries(), warnings.catch_warnings(action="ignore"):
        model = family.from_pretrained(
            None,
            config=config,
            state_dict={},
            dtype=dtype,
            distributed_config=DistributedConfig(tp_size=split, tp_plan=plan),
        )
    return model.eval()


def random_prompt(model: PreTrainedModel, context: int) -> Tensor:
    """Random ids ``[1, context]``, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (1, context), generator=generator).to(model.device)


def random_context(model: PreTrainedModel, ids: Tensor) -> SharedContextCache:
    """A cache as `hf_fastdecode.prefill` returns one for a prompt ``[1, length]``, with random keys and values.

    Its first tokens are computed; then its node is replaced by a longer one, of which this process draws its part.
    """
    cache = fd.prefill(model, ids[:, :_FEW])
    tokens = ids[0].cpu()
    state = cache.state
    state.padded_length += len(tokens) - state.segment_lengths[0]
    cache.segment_tokens[0], state.segment_lengths[0] = tokens, len(tokens)
    state.forest = Forest.from_paths([(Span(0, 0, len(tokens)),)])
    stored = state.stored_length(0)
    for layer in cache.attention_layers:
        few = layer.storage.segments[0]
        parts = (part.new_empty(part.shape[0], stored, part.shape[2]).normal_() for part in few)
        layer.storage.replace_segments({0: Segment._make(parts)})
    return cache


@torch.no_grad()
def random_stock_context(model: PreTrainedModel, ids: Tensor, rows: int) -> Any:
    """transformers' cache of a prompt ``[1, length]`` for so many rows, with random keys and values."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :_FEW], use_cache=True, logits_to_keep=1, **{CACHE: cache})
    for layer in cache.layers:
        heads, width = layer.keys.shape[1], layer.keys.shape[3]
        for name in ("keys", "values"):
            drawn = layer.keys.new_empty(rows, heads, ids.shape[1], width).normal_()
            setattr(layer, name, drawn)
    return cache
