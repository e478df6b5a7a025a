"""Rows as Markdown tables: a line for each case, a column for each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean

from ..measurement.rows import Row

CEILING = "-no-attention"
LEAST_FLOOR_US = 15.0  # below, launches are longer than the work
_OP_WAYS = (
    *("ours", "flashinfer-cascade", "recipe", "hydragen", "bifurcated", "bifurcated-compiled"),
    *("flashinfer-decode", "plain", "sketch"),
    *("without-own-nodes", "ours-prefix", "sketch-prefix", "ours-suffix", "sketch-suffix"),
)


def is_part(way: str) -> bool:
    """Whether a way does a part of a case, whose bytes and operations its floor is of."""
    return way.endswith(("-prefix", "-suffix"))


def ops_table(rows: Sequence[Row]) -> str:
    """Microseconds of each way, and our time over the floor; floors are of the first way that is ours, if one is."""
    ways = [way for way in _OP_WAYS if any(row["way"] == way for row in rows)]
    ours = next((way for way in ways if way.startswith("ours")), None)
    left_out = {"prefix": "suffix", "suffix": "context"}
    parts = {way.rpartition("-")[2] if is_part(way) else "" for way in ways}
    hidden = {left_out.get(next(iter(parts)))} if len(parts) == 1 else set()
    if len({row["head_dim"] for row in rows}) == 1:
        hidden.add("head_dim")
    columns = [name for name in ("rows", "context", "suffix", "heads", "head_dim") if name not in hidden]
    lines = head([*columns, "floor", *ways, *([f"{ours} over floor"] if ours else [])])
    for case in by(rows, "case", "dtype"):
        first = case.get(ours or "") or next(iter(case.values()))
        shown = {**first, "context": _context(first), "heads": f"{first['heads']}/{first['kv_heads']}"}
        cells = [*(shown[name] for name in columns), f"{float(first['floor_us']):.1f}"]
        cells += [cell(case.get(way), lambda row: f"{float(row['us_p50']):.1f}") for way in ways]
        if ours:
            cells.append(cell(case.get(ours), lambda row: f"{float(row['over_floor']):.2f}x"))
        lines.append(line(cells))
    unchecked = "" if all(row["error_ratio"] for row in rows if _ok(row)) else "; not all checked"
    return "\n".join(lines) + f"\n\n{_ops_where(rows)}; microseconds, medians, cold L2{unchecked}.\n"


def ops_digest(rows: Sequence[Row]) -> str:
    """A line for each head layout and n of many cases of one shared context.

    Geometric means of our time over the floor, where that is at least `LEAST_FLOOR_US`, and of other ways' times over
    ours; behind these the least of them, and how many there were.
    """
    others = [way for way in ("plain", "recipe", "sketch", "hydragen") if any(row["way"] == way for row in rows)]
    cases = [case for case in by(rows, "case", "dtype") if _ok(case.get("ours")) and one_node(case["ours"])]
    floors = ["over the floor", f"where that is {LEAST_FLOOR_US:g} us or more"]
    lines = head(["heads", "n", *floors, *(f"{way} over ours (least)" for way in others)])
    groups: dict[tuple[int, ...], list[dict[str, Row]]] = {}
    for case in cases:
        key = tuple(int(case["ours"][column]) for column in ("heads", "kv_heads", "rows"))
        groups.setdefault(key, []).append(case)
    found = [(f"{heads}/{kv_heads}", f"{n:,}", groups[heads, kv_heads, n]) for heads, kv_heads, n in sorted(groups)]
    for name, n, group in [*found, ("all", "all", cases)]:
        over = [float(c["ours"]["over_floor"]) for c in group]
        long = [float(c["ours"]["over_floor"]) for c in group if float(c["ours"]["floor_us"]) >= LEAST_FLOOR_US]
        cells = [f"{geometric_mean(over):.2f}x"]
        cells.append(f"{geometric_mean(long):.2f}x ({len(long)} of {len(group)})" if long else f"(0 of {len(group)})")
        for way in others:
            gains = [float(c[way]["us_p50"]) / float(c["ours"]["us_p50"]) for c in group if _ok(c.get(way))]
            fitting = "" if len(gains) == len(group) else f"; {len(gains)} of {len(group)}"
            cells.append(f"{geometric_mean(gains):.2f}x ({min(gains):.2f}x{fitting})" if gains else "does not fit")
        lines.append(line([name, n, *cells]))
    note = "geometric means over contexts and suffixes of ratios of medians, cold L2"
    return "\n".join(lines) + f"\n\n{_ops_where(rows)}; {note}; (k of n): so many of n cases.\n"


def one_node(row: Row) -> bool:
    """Whether all rows share one context and nothing else."""
    return row["nodes"] == f"1x{row['context']}"


def _ok(row: Row | None) -> bool:
    return row is not None and row["status"] == "ok"


def generate_where(rows: Sequence[Row]) -> str:
    """What rows of `generate` were measured on."""
    first = rows[0]
    return f"{first['device']}, {first['dtype']}, torch {first['torch']}, transformers {first['transformers']}"


def _ops_where(rows: Sequence[Row]) -> str:
    first = rows[0]
    copy, matmul = (sorted({float(row[name]) for row in rows}) for name in ("copy_tb_per_s", "matmul_tflop_per_s"))
    where = f"{first['device']}, {first['dtype']}, torch {first['torch']}; ceilings {_range(copy, 2)} TB/s and "
    return where + f"{_range(matmul, 0)} TFLOP/s"


def _range(ordered: Sequence[float], decimals: int) -> str:
    """The least and the largest as text, with two digits at least, or one of them when they read the same."""
    least, most = (
        format(number, f".{decimals}f" if number >= 10 ** (1 - decimals) else ".2g")
        for number in (ordered[0], ordered[-1])
    )
    return least if least == most else f"{least} to {most}"


def generate_table(rows: Sequence[Row]) -> str:
    """Milliseconds a step in each way, and what share of the no-attention ceiling's throughput is reached."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    ceilings = {way.removesuffix(CEILING): way for way in ways if way.endswith(CEILING)}
    of_ceiling = [f"{way}, of ceiling" for way in ceilings if way in ways]
    lines = head(["model", "context", "n", "new tokens", *ways, *of_ceiling])
    for case in cases_of(rows):
        first = next(iter(case.values()))
        cells = [_model(first), f"{int(first['context']):,}", first["samples"], first["new_tokens"]]
        cells += [cell(case.get(way), lambda row: f"{float(row['ms_per_step']):.2f}") for way in ways]
        cells += [share(case.get(way), case.get(top)) for way, top in ceilings.items() if way in ways]
        lines.append(line(cells))
    once = [
        row for row in rows if row["status"] == "ok" and row.get("ms_per_step_p20", "") == row.get("ms_per_step_p80")
    ]
    of = (
        "of one timed call each"
        if len(once) == len(rows)
        else "medians, some of one timed call"
        if once
        else "medians"
    )
    return "\n".join(lines) + f"\n\n{generate_where(rows)}; ms/step, {of}.\n"


def first_calls_table(rows: Sequence[Row]) -> str:
    """Seconds of each way's first call, beside those of a later one."""
    lines = head(["model", "context", "n", "new tokens", "way", "first call", "later calls"])
    for row in rows:
        seconds = [f"{float(row[name]):.1f} s" for name in ("first_call_s", "total_s")]
        case = [_model(row), f"{int(row['context']):,}", row["samples"], row["new_tokens"], row["way"]]
        lines.append(line([*case, *seconds]))
    return "\n".join(lines) + f"\n\n{generate_where(rows)}.\n"


def finish_table(rows: Sequence[Row]) -> str:
    """Seconds of decoding when rows finish one after another, beside all rows running to the end."""
    lines = head(["model", "context", "n", "way", "all to the end", "rows finish", "ratio"])
    pairs: dict[tuple[str, ...], dict[bool, Row]] = {}
    for row in rows:
        if row.get("finish"):
            first, _, last = row["finish"].partition("-")
            key = tuple(row[name] for name in ("shape", "context", "samples", "new_tokens", "way"))
            pairs.setdefault(key, {})[first == last] = row
    for (shape, context, samples, _, way), pair in pairs.items():
        if len(pair) < 2:
            continue
        whole, apart = _decoding(pair[True]), _decoding(pair[False])
        ratio = f"{apart / whole:.2f}" if whole and apart else ""
        shown = [f"{seconds:.2f} s" if seconds else "" for seconds in (whole, apart)]
        lines.append(line([shape, f"{int(context):,}", samples, way, *shown, ratio]))
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def paper_table(rows: Sequence[Row], published: dict[tuple[int, int], float], unit: str) -> str:
    """`generate_table` with the paper's own numbers behind it."""
    text = generate_table(rows)
    if not published:
        return text
    lines = text.split("\n")
    lines[0] += f" published: {unit} |"
    lines[1] += "---|"
    for index, case in enumerate(cases_of(rows)):
        first = next(iter(case.values()))
        value = published.get((int(first["context"]), int(first["samples"])))
        lines[2 + index] += f" {'' if value is None else f'{value:g}'} |"
    return "\n".join(lines)


def share(row: Row | None, ceiling: Row | None) -> str:
    """Throughput of a way over that of its ceiling."""
    if row is None or ceiling is None or not (row.get("ms_per_step") and ceiling.get("ms_per_step")):
        return ""
    return f"{float(ceiling['ms_per_step']) / float(row['ms_per_step']):.0%}"


def _decoding(row: Row) -> float | None:
    if not row.get("ms_per_step"):
        return None
    return float(row["ms_per_step"]) * (int(row["new_tokens"]) - 1) / 1e3


def cases_of(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of each case of `generate` by way, in the order of the rows."""
    return by(rows, "shape", "context", "samples", "new_tokens", "dtype", "finish")


def by(rows: Sequence[Row], *columns: str) -> list[dict[str, Row]]:
    """The rows of each case by way, in the order of the rows."""
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row.get(name, "") for name in columns), {})[row["way"]] = row
    return list(cases.values())


def cell(row: Row | None, shown: Callable[[Row], str]) -> str:
    """The value, or why there is none."""
    if row is None:
        return ""
    return shown(row) if row["status"] == "ok" else row["status"].partition(":")[0]


def _context(row: Row) -> str:
    """Tokens on the longest path, or the nodes when there are several."""
    return f"{int(row['context']):,}" if one_node(row) else row["nodes"]


def _model(row: Row) -> str:
    return row["shape"] + (f", rows finish {row['finish']}" if row.get("finish") else "")


def head(names: Sequence[str]) -> list[str]:
    """The two lines that a table begins with."""
    return [line(names), "|" + "---|" * len(names)]


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"
