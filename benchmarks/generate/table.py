"""Measured calls of `generate` and growing completions as Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from hf_fastdecode.measurement.rows import Measurement, by, markdown
from hf_fastdecode.measurement.shapes import SHAPES

from ..page_tables import cell
from .cases import KINDS, LOOPS, TREE, GenerateCase, PromptTree
from .shapes import INPUT_SHAPES, split_shape

CEILING = "-no-attention"
"""Ends the name of a way that is a ceiling."""
# The way that stands for this package where only one is shown: the default, else the fastest mode measured.
_OURS = ("shared", "graph", "eager")
# Model types of shapes whose layers store the keys and values of every token, in stock caches too.
_STORE_ALL = ("llama", "qwen3", "qwen3_vl", "falcon")
_SPAN = ("shape", "context", "samples", "new_tokens", "dtype", "from_token", "to_token")


def where_measured(rows: Sequence[Measurement]) -> str:
    first = rows[0]
    return f"{first['device']}, {first['dtype']}, torch {first['torch']}, transformers {first['transformers']}"


def cases_of(rows: Sequence[Measurement]) -> list[dict[str, Measurement]]:
    """The measurements of each case by way, in the order given."""
    return by(rows, "shape", "context", "samples", "new_tokens", "dtype", "finish")


def generate_table(rows: Sequence[Measurement]) -> str:
    """Milliseconds a step in each way, and what share of the no-attention ceiling's throughput is reached."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    ceilings = {way.removesuffix(CEILING): way for way in ways if way.endswith(CEILING)}
    names = ["model", "context", "n", "new tokens", *ways, *(f"{way}, of ceiling" for way in ceilings if way in ways)]
    lines = []
    for case in cases_of(rows):
        first = next(iter(case.values()))
        cells = [_model(first), *_point(first), first["new_tokens"]]
        cells += [cell(case.get(way), _step) for way in ways]
        cells += [_share(case.get(way), case.get(top)) for way, top in ceilings.items() if way in ways]
        lines.append(cells)
    return markdown(names, lines, f"{where_measured(rows)}; ms/step, {timed(rows)}.")


def timed(rows: Sequence[Measurement]) -> str:
    """Whether the times of rows are medians, and of which ways they are of one call."""
    measured = [row for row in rows if row["status"] == "ok"]
    once = [row for row in measured if row.get("ms_per_step_p20") and row["ms_per_step_p20"] == row["ms_per_step_p80"]]
    if not once:
        return "medians"
    if len(once) == len(measured):
        return "of one timed call each"
    ways = {row["way"] for row in once}
    if all(row in once for row in measured if row["way"] in ways):
        return f"medians, {' and '.join(sorted(ways))}: one timed call"
    return "medians, some of one timed call"


def finish_table(rows: Sequence[Measurement]) -> str:
    """Seconds of decoding when rows finish one after another, beside all rows running to the end, if measured."""
    pairs: dict[tuple[str, ...], dict[bool, Measurement]] = {}
    for row in rows:
        first, spread, last = row.get("finish", "").partition("-")
        if spread:
            key = tuple(row[name] for name in ("shape", "context", "samples", "new_tokens", "way"))
            pairs.setdefault(key, {})[first == last] = row
    lines = []
    for (shape, context, samples, new_tokens, way), pair in pairs.items():
        if len(pair) < 2:
            continue
        times = [float(pair[whole].get("ms_per_step") or 0) * (int(new_tokens) - 1) / 1e3 for whole in (True, False)]
        shown = [f"{seconds:.2f} s" if seconds else "" for seconds in times]
        ratio = f"{times[1] / times[0]:.2f}" if all(times) else ""
        lines.append([shape, f"{int(context):,}", samples, way, *shown, ratio])
    return markdown(["model", "context", "n", "way", "all to the end", "rows finish", "ratio"], lines) if lines else ""


def many_rows_table(rows: Sequence[Measurement]) -> str:
    """Seconds of whole calls of many rows, most of which may end early, tokens a second, and what ran, in each way."""
    lines = []
    for row in rows:
        shown = [row["status"], "", ""]
        if row["status"] == "ok":
            shown = [f"{float(row['total_s']):.2f} s", f"{float(row['tokens_per_s']):,.0f}", row["ran"]]
        mean = row["finish"].removeprefix("~") or row["new_tokens"]
        lines.append([row["shape"], *_point(row), f"{mean} of {row['new_tokens']}", row["way"], *shown])
    names = ["model", "context", "n", "mean tokens, of at most", "way", "whole call", "tokens/s", "what ran"]
    return markdown(names, lines, f"{where_measured(rows)}; medians, or of one timed call.")


def generate_tables(rows: Sequence[Measurement]) -> str:
    """Both tables, the second where rows finish one after another; or that of rows most of which end early."""
    if all(row.get("finish", "").startswith("~") for row in rows):
        return many_rows_table(rows)
    return generate_table(rows) + (f"\n{finished}" if (finished := finish_table(rows)) else "")


def _seconds(row: Measurement, name: str) -> str:
    found = row.get(name)
    if not found:
        return ""
    return f"{float(found):.{2 if float(found) > 0.1 else 3}f}"


def first_calls_table(rows: Sequence[Measurement]) -> str:
    """Seconds of the calls of a fresh process."""
    times = {
        "first_call_s": "call 1",
        "second_call_s": "2",
        "third_call_s": "3",
        "tenth_call_s": "10",
        "more_rows_s": "half as many rows more",
        "longer_prompt_s": "twice the context",
        "reused_first_token_s": "first token with `reuse_prefix`",
    }
    times = {name: title for name, title in times.items() if any(row.get(name) for row in rows)}
    lines = [
        [row["shape"], *_point(row), row["way"], row["caches"]]
        + [cell(row, partial(_seconds, name=name)) for name in times]
        for row in rows
    ]
    names = ["model", "context", "n", "way", "caches", *times.values()]
    return markdown(names, lines, f"{where_measured(rows)}, {rows[0]['new_tokens']} new tokens; seconds of one call.")


def profile_table(rows: Sequence[Measurement]) -> str:
    """Breakdown of the time of first tokens and of steps."""
    lines = []
    for row in rows:
        cells = [row["shape"], *_point(row), row["part"], row["way"], cell(row, lambda one: f"{float(one['ms']):.2f}")]
        if row["status"] == "ok":
            cells += [f"{float(row[f'{name}_ms']):.2f}" for name in ("busy", *KINDS)]
            cells += [f"{int(row['launches']):,}", _LONG_NAMES.sub("", row["largest"])]
        lines.append(cells + [""] * (len(_PROFILE) - len(cells)))
    kinds = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    note = (
        f"{where_measured(rows)}; milliseconds: by the clock, while the GPU runs anything, and sums of kernels, each "
        f"from where those before it end ({kinds}); launches are of kernels and copies"
    )
    return markdown(_PROFILE, lines, f"{note}.")


_LONG_NAMES = re.compile(r"(?<=\b\w{20})\w+")  # what libraries name their kernels after the first letters
_PROFILE = ("model", "context", "n", "of", "way", "clock", "busy", *KINDS, "launches", "largest kernels")


def stock_beside_shared(rows: Sequence[Measurement]) -> str:
    """One line for each case, stock → ours, or ours alone, and where it was measured, vLLM."""
    vllm = any(row["way"] == "vllm" for row in rows)
    lines = []
    for ways in cases_of(rows):
        if (shared := _ours(ways)) is None:
            continue
        stock = ways.get("stock")
        times = (("prefill_s", 2, "s"), ("ms_per_step", 1, "ms"), ("total_s", 2, "s"))
        cells = [shared["shape"], *_point(shared), *(_change(stock, shared, *one) for one in times)]
        gains = stock is not None and stock["status"] == "ok"
        cells.append(f"{float(stock['total_s']) / float(shared['total_s']):.1f}x" if stock and gains else "")
        cells.append(stored(stock, shared))
        lines.append([*cells, cell(ways.get("vllm"), _vllm_call)] if vllm else cells)
    names = ["model", "context", "n", "time to first token", "a step", "whole call", "speed-up", "KV cache"]
    names += ["vLLM: first token; a step; whole call"] if vllm else []
    new = " or ".join(sorted({row["new_tokens"] for row in rows}, key=int))
    note = f"{where_measured(rows)}, {new} new tokens; stock → `enable(model)`; {timed(rows)}."
    return markdown(names, lines, note)


def _vllm_call(row: Measurement) -> str:
    return f"{float(row['prefill_s']):.2f} s; {float(row['ms_per_step']):.1f} ms; {float(row['total_s']):.2f} s"


def trees_table(rows: Sequence[Measurement]) -> str:
    """One line for each tree of prompts: a step of it, and its KV cache beside stock's, which has no nodes."""
    lines = []
    for row in rows:
        sizes = float(row["kv_bytes"]), stock_kv_bytes({**row, "status": "computed"}, row)
        cells = [row["shape"], row["samples"], row["way"], f"{float(row['ms_per_step']):.1f} ms"]
        lines.append([*cells, *(f"{size / 2**30:.1f} GiB" for size in sizes)])
    return markdown(["model", "rows", "way", "a step", "KV cache", "stock's KV cache"], lines)


def loops_table(rows: Sequence[Measurement]) -> str:
    """One line for each case of a loop of transformers, stock → with a shared-context cache."""
    times = (("prefill_s", 2, "s"), ("ms_per_step", 2, "ms"), ("total_s", 2, "s"))
    lines = []
    for ways in cases_of(rows):
        for loop in (name for name in LOOPS if name in ways):
            stock, ours = ways[f"stock-{loop}"], ways[loop]
            changes = [_change(stock, ours, *one) for one in times]
            changes.append(" → ".join(f"{float(row['peak_bytes']) / 2**30:.2f} GiB" for row in (stock, ours)))
            lines.append([ours["shape"], loop, *_point(ours), *changes, ours["ran"].partition(",")[0]])
    names = ["model", "loop", "context", "n", "time to first token", "a step", "whole call", "memory over the weights"]
    names.append("steps ran")
    return markdown(names, lines, f"{where_measured(rows)}, {rows[0]['new_tokens']} new tokens; {timed(rows)}.")


def steps_apart_table(rows: Sequence[Measurement]) -> str:
    """A step of each mode beside the same loop without attention, and what attention takes in a layer."""
    lines = []
    for ways in cases_of(rows):
        for mode, row in ways.items():
            ceiling = ways.get(mode + CEILING)
            if ceiling is None or {row["status"], ceiling["status"]} != {"ok"}:
                continue
            step, without = float(row["ms_per_step"]), float(ceiling["ms_per_step"])
            layers = SHAPES[row["shape"]]["num_hidden_layers"]
            times = [f"{value:.2f} ms" for value in (step, without, step - without)]
            lines.append([row["shape"], *_point(row), mode, *times, f"{1e3 * (step - without) / layers:.0f} us"])
    return markdown(["model", "context", "n", "mode", "a step", "without attention", "attention", "of a layer"], lines)


def with_experts(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows whose experts were counted."""
    return [row for row in rows if row.get("experts")]


def experts_table(rows: Sequence[Measurement]) -> str:
    """A line for each of `with_experts`: experts of a layer that a step's rows choose, a step, and reading weights."""
    lines = []
    for row in rows:
        counted = f"{float(row['experts']):.1f} of {row['of_experts']}"
        step, floor = (float(row[name] or 0) for name in ("ms_per_step", "weights_floor_ms"))
        cells = [row["shape"], *_point(row), row["way"], counted, f"{step:.2f} ms"]
        lines.append([*cells, *([f"{floor:.2f} ms", f"{step / floor:.2f}x"] if floor else ["", ""])])
    names = ["model", "context", "n", "way", "experts of a layer", "a step", "reading weights", "over it"]
    return markdown(names, lines, f"{where_measured(rows)}; means over layers and steps, steps: medians.")


def completions_table(rows: Sequence[Measurement]) -> str:
    """Milliseconds of a step in each way, a line for each span, beside what reading the keys and values takes."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for case in by(rows, *_SPAN):
        first = next(iter(case.values()))
        floor = next((row["kv_floor_ms"] for row in case.values() if row["kv_floor_ms"]), "")
        cells = [first["shape"], *_point(first), f"{int(first['from_token']):,} to {int(first['to_token']):,}"]
        cells.append(f"{float(floor):.2f}" if floor else "")
        lines.append([*cells, *(cell(case.get(way), _step) for way in ways)])
    names = ["model", "context", "n", "tokens of a completion", "reading keys and values", *ways]
    return markdown(names, lines, f"{where_measured(rows)}; ms, means over the steps of one call.")


def steps_and_memory_table(rows: Sequence[Measurement]) -> str:
    """A line for each case and way: a step, and the most memory over the weights, or why there is none."""
    times = {"ms_per_step": "a step", "kv_floor_ms": "reading keys and values"}
    times = {name: title for name, title in times.items() if name in rows[0]}
    lines = []
    for row in rows:
        found = [row["status"], *[""] * len(times)]
        if row["status"] == "ok":
            found = [*(f"{float(row[name]):.2f} ms" for name in times), f"{float(row['peak_bytes']) / 2**30:.1f} GiB"]
        lines.append([row["shape"], *_point(row), row["way"], *found])
    names = ["model", "context", "n", "way", *times.values(), "memory over the weights"]
    return markdown(names, lines, f"{where_measured(rows)}; means over the steps of one call.")


def _ours(ways: Mapping[str, Measurement]) -> Measurement | None:
    """The measurement that stands for this package among those of a case, if one is right."""
    return next((ways[way] for way in _OURS if way in ways and ways[way]["status"] == "ok"), None)


def stock_kv_bytes(stock: Measurement, shared: Measurement) -> float:
    """Bytes of a stock cache at the end: measured, or where it did not fit, what its tokens would take.

    Every row is as long as the longest one, whose last token is drawn and not stored.
    """
    if stock["status"] == "ok":
        return float(stock["kv_bytes"])
    context, samples, new = (int(stock[name]) for name in ("context", "samples", "new_tokens"))
    tree = PromptTree.of_row(stock["shape"])
    drawn = sum(GenerateCase(stock["shape"], context, samples, new, finish=stock.get("finish", "")).lengths())
    per_token = float(shared["floor_kv_bytes"]) / ((tree.tokens if tree else context) + drawn)
    return samples * (context + new - 1) * per_token


def stored(stock: Measurement | None, shared: Measurement) -> str:
    """GiB of caches at the end; stock's is not computed for layers that store other than all keys and values."""
    if not shared.get("kv_bytes"):
        return ""
    after = f"{float(shared['kv_bytes']) / 2**30:.2f} GiB"
    if stock is None:
        return after
    if stock["status"] != "ok" and model_type_of(stock) not in (*_STORE_ALL, None):
        return f"{stock['status']} → {after}"
    return f"{stock_kv_bytes(stock, shared) / 2**30:.2f} → {after}"


def model_type_of(row: Measurement) -> str | None:
    shape, _ = split_shape(row["shape"].partition(TREE)[0])
    if shape in INPUT_SHAPES:
        return INPUT_SHAPES[shape].model_type
    return SHAPES[shape]["model_type"] if shape in SHAPES else None


def _change(stock: Measurement | None, shared: Measurement, column: str, digits: int, unit: str) -> str:
    after = f"{float(shared[column]):.{digits}f} {unit}"
    if stock is None:
        return after
    before = "out of memory" if stock["status"] != "ok" else f"{float(stock[column]):.{digits}f} {unit}"
    return f"{before} → {after}"


def _share(row: Measurement | None, ceiling: Measurement | None) -> str:
    if row is None or ceiling is None or not (row.get("ms_per_step") and ceiling.get("ms_per_step")):
        return ""
    return f"{float(ceiling['ms_per_step']) / float(row['ms_per_step']):.0%}"


def _model(row: Measurement) -> str:
    return row["shape"] + (f", rows finish {row['finish']}" if row.get("finish") else "")


def _point(row: Measurement) -> tuple[str, str]:
    return f"{int(row['context']):,}", row["samples"]


def _step(row: Measurement) -> str:
    return f"{float(row['ms_per_step']):.2f}"
