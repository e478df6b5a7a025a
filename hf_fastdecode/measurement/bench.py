"""Stock `generate` beside the enabled one, on one loaded model: first call, first token, step, whole call, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .._compat import CACHE
from ..api import enabled, explain
from ..cache.shared import cache_bytes
from . import SAMPLING, calls
from .figures import COLOURS, add_legend, add_title, new_figure, save, style_axis
from .rows import Case, Measurement, by, markdown

WAYS: Final = ("stock", "shared")
"""transformers' `generate`, and that of the enabled model."""
_COLUMNS: Final = (
    *("status", "first_call_s", "prefill_s", "ms_per_step", "ms_per_step_p20", "ms_per_step_p80", "tokens_per_s"),
    *("total_s", "kv_bytes", "peak_bytes", "ran"),
)
_FIRST_ID: Final = 3  # those below are special in many vocabularies
_BUDGET_S: Final = 20.0  # seconds after which a call is not repeated


@dataclass(frozen=True)
class BenchCase(Case):
    """`samples` completions of `new_tokens` tokens of one prompt of `context` random tokens, by the model `shape`."""

    shape: str
    context: int
    samples: int
    new_tokens: int
    dtype: str


class StockBesideEnabled:
    """Measures a model in both ways, `repeats` times at most, `enable` being options of ours; no token ends a row."""

    def __init__(self, model: Any, enable: dict[str, Any], *, repeats: int):
        self.model, self.enable, self.repeats = model, enable, repeats
        self._stock: dict[BenchCase, Tensor] = {}
        self._warm = False  # whether libraries are initialized, which is not part of a way's first call
        model.generation_config.eos_token_id = None

    def measure(self, case: BenchCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``first_call_s``: seconds of the first call, with what it compiles and captures. ``prefill_s``: seconds of a
        call of one token. ``ms_per_step``: ``(time(new_tokens) - time(1)) / (new_tokens - 1)``. ``total_s``: seconds
        of the whole call. ``kv_bytes``: held by the cache at its end. ``peak_bytes``: most memory over the weights,
        on CUDA. ``ran``: what the report says of the enabled model's call. Times are medians. In float32, tokens that
        are not stock's make the status ``wrong``.
        """
        return calls.guarded(_COLUMNS, lambda: self._measured(case, way))

    def _measured(self, case: BenchCase, way: str) -> dict[str, Any]:
        model, device, shared = self.model, self.model.device, way == "shared"
        call = self._caller(case)
        if not self._warm:
            self._caller(replace(case, context=1, samples=1))(2)
            self._warm = True
        if shared and case.dtype == "float32" and case not in self._stock:
            with calls.seeded(device):
                self._stock[case] = call(case.new_tokens)
        calls.collect()
        before = calls.begin_peak(device)
        with enabled(model, **self.enable) if shared else nullcontext():
            first: list[Any] = []
            with calls.seeded(device):
                seconds = calls.wall_seconds(
                    lambda: first.append(call(case.new_tokens, return_dict_in_generate=not shared)), device
                )
            tokens = first[0] if shared else first[0].sequences
            held = None if shared else cache_bytes(first[0][CACHE])
            first.clear()
            if shared and not torch.equal(tokens, self._stock.get(case, tokens)):
                return {"status": "wrong: other tokens than stock from the same seed"}
            if not shared and case.dtype == "float32":
                self._stock[case] = tokens
            call(1)
            if shared:
                call(case.new_tokens)  # what the second call captures
            prefills, decodes, whole = calls.prefill_and_decode(
                model, call, case.new_tokens, repeats=self.repeats, budget_s=_BUDGET_S
            )
            ran = calls.what_ran(model) if shared else None
            last = explain(model).last_call if shared else None
        return {
            "first_call_s": seconds,
            "prefill_s": calls.percentiles(prefills).p50,
            **calls.step_columns(decodes, case.new_tokens - 1, case.samples * (case.new_tokens - 1)),
            "total_s": calls.percentiles(whole).p50,
            "kv_bytes": held if last is None else last.nbytes.allocated,
            "peak_bytes": calls.peak_over(device, before),
            "ran": ran,
        }

    def _caller(self, case: BenchCase) -> Callable[..., Any]:
        generator, vocabulary = torch.Generator().manual_seed(0), self.model.config.get_text_config().vocab_size
        ids = torch.randint(_FIRST_ID, vocabulary, (1, case.context), generator=generator).to(self.model.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "num_return_sequences": case.samples}

        def call(new_tokens: int, **arguments: Any) -> Any:
            return self.model.generate(**given, **SAMPLING, max_new_tokens=new_tokens, **arguments)

        return call


@dataclass(frozen=True)
class _Quantity:
    """A number of a measurement: its column, its name, and how it is shown: in units of `unit`, after division."""

    column: str
    name: str
    unit: str
    divided_by: float = 1.0

    def of(self, row: Measurement) -> float | None:
        return float(row[self.column]) / self.divided_by if row.get(self.column) else None

    def text(self, row: Measurement, missing: str = "") -> str:
        value = self.of(row)
        return missing if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_QUANTITIES: Final = (
    _Quantity("first_call_s", "first call", "s"),
    _Quantity("prefill_s", "first token", "s"),
    _Quantity("ms_per_step", "a step", "ms"),
    _Quantity("total_s", "whole call", "s"),
    _Quantity("kv_bytes", "KV cache", "MiB", 2**20),
    _Quantity("peak_bytes", "peak memory", "GiB", 2**30),
)


def bench_table(rows: Sequence[Measurement]) -> str:
    """Three lines for each case: stock, enabled, and how many times less time or memory the enabled model takes."""
    shown = [one for one in _QUANTITIES if any(row.get(one.column) for row in rows)]
    lines = []
    for ways in _cases(rows):
        for way, name in zip(WAYS, ("stock", "enabled")):
            row = ways[way]
            cells = [f"{text} {one.unit}" if (text := one.text(row)) else "" for one in shown]
            if row["status"] != "ok":
                cells[0] = row["status"].partition(":")[0]
            lines.append([f"{int(row['context']):,}", row["samples"], name, *cells])
        pairs = [(one.of(ways["stock"]), one.of(ways["shared"])) for one in shown]
        if all(row["status"] == "ok" for row in ways.values()):
            ratios = [f"{stock / ours:.1f}x" if stock and ours else "" for stock, ours in pairs]
            lines.append(["", "", "stock / enabled", *ratios])
    ran = "; ".join(dict.fromkeys(row["ran"] for row in rows if row["ran"]))
    compared = "tokens are stock's" if rows[0]["dtype"] == "float32" else "tokens are compared in float32 only"
    note = f"{_about(rows)}; medians; {compared}; enabled ran: {ran or 'nothing'}"
    return markdown(["context", "n", "", *(one.name for one in shown)], lines, f"{note}.")


def draw_bench(rows: Sequence[Measurement], path: Path) -> Path:
    """Draw a panel for each number, with two bars for each case; writes a PNG file."""
    shown = [one for one in _QUANTITIES if any(row.get(one.column) for row in rows)]
    figure, axes = new_figure(len(shown), 3, (9.6, 3.0 * -(-len(shown) // 3) + 0.6))
    cases = _cases(rows)
    for axis, one in zip(axes, shown):
        for shift, way, name in ((-0.2, "stock", "transformers"), (0.2, "shared", "hf_fastdecode")):
            positions, heights = [at + shift for at in range(len(cases))], [one.of(ways[way]) or 0.0 for ways in cases]
            bars = axis.bar(positions, heights, 0.38, color=COLOURS[way], label=name)
            axis.bar_label(bars, [one.text(ways[way], "not measured") for ways in cases], fontsize=7)
        axis.set_xticks(
            range(len(cases)), [f"{ways['stock']['context']}x{ways['stock']['samples']}" for ways in cases]
        )
        axis.set_title(f"{one.name}, {one.unit}", fontsize=9)
        style_axis(axis)
        axis.margins(y=0.15)
    add_title(figure, f"{_about(rows)}; CONTEXTxSAMPLES")
    add_legend(figure)
    return save(figure, path)


def _cases(rows: Sequence[Measurement]) -> list[dict[str, Measurement]]:
    return by(rows, "shape", "context", "samples", "new_tokens", "dtype")


def _about(rows: Sequence[Measurement]) -> str:
    first = rows[0]
    versions = f"torch {first['torch']}, transformers {first['transformers']}"
    return f"{first['shape']}, {first['dtype']}, {first['device']}, {versions}, {first['new_tokens']} new tokens"
