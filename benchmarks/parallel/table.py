"""Measured and predicted decoding over several GPUs as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_fastdecode.measurement.rows import Measurement, by, markdown

from ..page_tables import cell, microseconds
from .cases import ATTENTION_WAYS, COLLECTIVES, STEP_WAYS
from .cost_model import DEVICE, Cluster, Heads, Prediction, fitted, predict_row


def parallel_table(rows: Sequence[Measurement]) -> str:
    kind = rows[0]["case"].partition("-")[0]
    return {"steps": steps_table, "attention": attention_table, "collective": collectives_table}[kind](rows)


def steps_table(rows: Sequence[Measurement]) -> str:
    """Milliseconds of a step and peak memory of a GPU, a line for each case."""
    ways = [way for way in STEP_WAYS if any(row["way"] == way for row in rows)]
    lines = []
    for case in by(rows, "shape", "context", "rows", "ranks", "fill"):
        first = next(iter(case.values()))
        cells = [first["shape"], f"{int(first['context']):,}", first["rows"]]
        cells += [cell(case.get(way), _step) for way in ways]
        lines.append(cells)
    note = (
        f"{_where(rows[0])}; milliseconds a step (GiB that the fuller GPU holds at most while decoding), medians; "
        "weights are random"
    )
    if any(row["fill"] == "random" for row in rows):
        note += ", and so are keys and values of contexts without a first token"
    if any(row.get("first_token_s") for row in rows):
        note += "; in brackets seconds to the first token, and GiB at most until then"
    if any("no-check" in row["command"] and not row["way"].startswith("stock") for row in rows):
        note += "; measured without the check that compares tokens with stock's first"
    return markdown(["model", "context", "rows", *ways], lines, f"{note}.")


def _step(row: Measurement) -> str:
    text = f"{float(row['ms_per_step']):.2f}"
    if row["decode_peak_bytes"]:
        text += f" ({_gib(row['decode_peak_bytes'])})"
    if row["first_token_s"]:
        peak = f", {_gib(row['prefill_peak_bytes'])}" if row["prefill_peak_bytes"] else ""
        text += f" [{float(row['first_token_s']):.2f} s{peak}]"
    return text


def attention_table(rows: Sequence[Measurement]) -> str:
    """Microseconds of a layer, communication and memory, a line for each measurement."""
    lines = []
    for row in rows:
        cells = [row["shape"], f"{int(row['context']):,}", row["rows"], row["way"]]
        if row["status"] != "ok":
            lines.append([*cells, row["status"].partition(":")[0], *[""] * 6])
            continue
        share = f"{100 * float(row['communication_share']):.0f} %" if row["communication_share"] else ""
        cells += [f"{float(row['us_p50']):.1f}", f"{float(row['us_per_step']) / 1e3:.2f}", share]
        cells += [_beside(row, "sent_bytes", "paper_sent_bytes", _mb), _beside(row, "peak_bytes", "paper_bytes", _gib)]
        cells += [
            f"{float(row['error_ratio']):.2f}" if row["error_ratio"] else "",
            "yes" if row["captured"] == "True" else "no",
        ]
        lines.append(cells)
    first = rows[0]
    names = ["layers of", "context", "rows", "way", "us a layer", "ms a step", "communication", "MB sent (paper)"]
    names += ["GiB held (paper)", "error", "graph"]
    note = (
        f"{_where(first)}; {first['dtype']}, medians of the slower GPU; communication: what a step takes longer than "
        "each GPU's part alone, of the step; sent: by one GPU in a step of all layers, and by equations 10 and 14 of "
        "the paper, in fp32 for partials; held: at most, and by equations 8 and 9; error: times PyTorch's"
    )
    return markdown(names, lines, f"{note}.")


def attention_times_table(rows: Sequence[Measurement]) -> str:
    """Microseconds of a layer alone, a line for each case."""
    ways = [way for way in ATTENTION_WAYS if any(row["way"] == way for row in rows)]
    lines = []
    for case in by(rows, "shape", "context", "rows"):
        first = next(iter(case.values()))
        cells = [first["shape"], f"{int(first['context']):,}", first["rows"]]
        lines.append([*cells, *(cell(case.get(way), microseconds) for way in ways)])
    note = f"{_where(rows[0])}; {rows[0]['dtype']}, microseconds of a layer, medians of the slower GPU"
    return markdown(["layers of", "context", "rows", *ways], lines, f"{note}.")


def _beside(row: Measurement, name: str, paper: str, shown: Callable[[str], str]) -> str:
    text = shown(row[name]) if row[name] else ""
    return f"{text} ({shown(row[paper])})".strip() if row[paper] else text


_PREDICTED: dict[str, Callable[[Prediction], float]] = {
    "tree": lambda found: found.one_gather_s,
    "three-all-reduces": lambda found: found.tree_s,
    "ring": lambda found: found.ring_s,
}


def predicted_table(rows: Sequence[Measurement]) -> str:
    """Measured attention of 8b-gqa beside the cost model's prediction, fitted without the rows of as many GPUs."""
    rows, lines = [row for row in rows if row["device"] == DEVICE], []
    shown = [row for row in rows if row["shape"] == "8b-gqa" and row["rows"] == "1" and row["way"] in _PREDICTED]
    shown.sort(key=lambda row: (int(row["context"]), int(row["ranks"])))
    for case in by(shown, "context", "ranks"):
        first = next(iter(case.values()))
        others = fitted(row for row in rows if row["way"] == "one-gpu" or row["ranks"] != first["ranks"])
        found = predict_row(others, first)
        cells = [f"{int(first['context']):,}", first["ranks"]]
        for way, seconds in _PREDICTED.items():
            cells += [cell(case.get(way), microseconds), _predicted(1e6 * seconds(found), case.get(way))]
        lines.append(cells)
    names = ["context", "GPUs", *(name for way in _PREDICTED for name in (way, "predicted"))]
    note = (
        f"{DEVICE}, 8b-gqa; microseconds of a layer and row, measured and predicted, each number of GPUs by a fit to "
        f"rows of one GPU and of the other numbers. The fit to all, which the simulation takes: {fitted(rows)}"
    )
    return markdown(names, lines, f"{note}.")


def _predicted(us: float, row: Measurement | None) -> str:
    if row is None or row["status"] != "ok":
        return f"{us:.1f}"
    off = round(us / float(row["us_p50"]) - 1, 3) + 0.0  # no minus before a zero
    return f"{us:.1f} ({off:+.1%})"


def collectives_table(rows: Sequence[Measurement]) -> str:
    """Microseconds of collectives, a line for each size."""
    ways = [way for way in COLLECTIVES if any(row["way"] == way for row in rows)]
    lines = [
        [f"{int(next(iter(case.values()))['bytes']) >> 10:,}", *(cell(case.get(way), _collective) for way in ways)]
        for case in by(rows, "bytes", "ranks")
    ]
    note = (
        f"{_where(rows[0])}; microseconds of one of 32 in a row (GB/s that a GPU sends), medians of the slower GPU, "
        "in a CUDA graph where there are GPUs"
    )
    return markdown(["KiB of each GPU", *ways], lines, f"{note}.")


def _collective(row: Measurement) -> str:
    return f"{float(row['us_p50']):.1f} ({float(row['gb_per_s']):.0f})"


def _where(row: Measurement) -> str:
    return f"{row['ranks']} x {row['device']}, torch {row['torch']}, transformers {row['transformers']}"


def _gib(size: str) -> str:
    number = float(size) / 2**30
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def _mb(size: str) -> str:
    number = float(size) / 1e6
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def scaling_table(found: Sequence[Prediction], cluster: Cluster, heads: Heads) -> str:
    """The predictions as a Markdown table."""
    lines = []
    for one in found:
        times = (one.attend_s, one.ring_s, one.tree_s, one.one_gather_s)
        cells = [f"{one.context:,}", f"{one.gpus:,}", *map(_predicted_us, times)]
        lines.append([*cells, f"{one.ring_s / one.tree_s:,.1f}x", f"{one.ring_s / one.one_gather_s:,.1f}x"])
    names = ["context", "GPUs", "its part alone", "ring", "tree", "one all-gather"]
    names += ["ring over tree", "ring over one all-gather"]
    note = f"Predicted, not measured: microseconds of a layer and row, {heads}, 2 bytes a number; {cluster}."
    return markdown(names, lines, note)


def _predicted_us(seconds: float) -> str:
    number = 1e6 * seconds
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"
