"""Measured operators as Markdown tables: a line for each case, a column for each way."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean, linear_regression

from hf_fastdecode.measurement.rows import Measurement, by, markdown

from ..page_tables import cell, microseconds

LEAST_FLOOR_US = 15.0  # below, launches are longer than the work
_WAYS = (
    *("ours", "flashinfer-cascade", "recipe", "hydragen", "bifurcated", "bifurcated-compiled"),
    *("flashinfer-decode", "fasttree", "plain", "sketch"),
    *("without-own-nodes", "ours-prefix", "sketch-prefix", "ours-suffix", "sketch-suffix"),
)


def is_part(way: str) -> bool:
    """Whether a way does a part of a case, whose bytes and operations its floor counts."""
    return way.endswith(("-prefix", "-suffix"))


def one_node(row: Measurement) -> bool:
    """Whether all rows share one context and nothing else."""
    return row["nodes"] == f"1x{row['context']}"


def ops_table(rows: Sequence[Measurement]) -> str:
    """Microseconds of each way, and our time over the floor; floors are of the first way that is ours, if one is."""
    ways = [way for way in _WAYS if any(row["way"] == way for row in rows)]
    ours = next((way for way in ways if way.startswith("ours")), None)
    left_out = {"prefix": "suffix", "suffix": "context"}
    parts = {way.rpartition("-")[2] if is_part(way) else "" for way in ways}
    hidden = {left_out.get(next(iter(parts)))} if len(parts) == 1 else set()
    if len({row["head_dim"] for row in rows}) == 1:
        hidden.add("head_dim")
    columns = [name for name in ("rows", "context", "suffix", "heads", "head_dim") if name not in hidden]
    lines = []
    for case in by(rows, "case", "dtype"):
        first = case.get(ours or "") or next(iter(case.values()))
        context = f"{int(first['context']):,}" if one_node(first) else first["nodes"]
        shown = {**first, "context": context, "heads": f"{first['heads']}/{first['kv_heads']}"}
        cells = [*(shown[name] for name in columns), f"{float(first['floor_us']):.1f}"]
        cells += [cell(case.get(way), microseconds) for way in ways]
        if ours:
            cells.append(cell(case.get(ours), lambda row: f"{float(row['over_floor']):.2f}x"))
        lines.append(cells)
    unchecked = "" if all(row["error_ratio"] for row in rows if _ok(row)) else "; not all checked"
    names = [*columns, "floor", *ways, *([f"{ours} over floor"] if ours else [])]
    return markdown(names, lines, f"{_where(rows)}; microseconds, medians, cold L2{unchecked}.")


def ops_digest(rows: Sequence[Measurement]) -> str:
    """A line for each head layout and n of many cases of one shared context.

    Geometric means of our time over the floor, where that is at least `LEAST_FLOOR_US`, and of other ways' times over
    ours; after these the least ratio, and the number of cases.
    """
    others = [way for way in ("plain", "recipe", "sketch", "hydragen") if any(row["way"] == way for row in rows)]
    cases = [case for case in by(rows, "case", "dtype") if _ok(case.get("ours")) and one_node(case["ours"])]
    groups: dict[tuple[int, ...], list[dict[str, Measurement]]] = {}
    for case in cases:
        key = tuple(int(case["ours"][column]) for column in ("heads", "kv_heads", "rows"))
        groups.setdefault(key, []).append(case)
    found = [(f"{heads}/{kv_heads}", f"{n:,}", groups[heads, kv_heads, n]) for heads, kv_heads, n in sorted(groups)]
    lines = []
    for name, n, group in [*found, ("all", "all", cases)]:
        over = [float(c["ours"]["over_floor"]) for c in group]
        long = [float(c["ours"]["over_floor"]) for c in group if float(c["ours"]["floor_us"]) >= LEAST_FLOOR_US]
        cells = [f"{geometric_mean(over):.2f}x"]
        cells.append(f"{geometric_mean(long):.2f}x ({len(long)} of {len(group)})" if long else f"(0 of {len(group)})")
        for way in others:
            gains = [float(c[way]["us_p50"]) / float(c["ours"]["us_p50"]) for c in group if _ok(c.get(way))]
            fitting = "" if len(gains) == len(group) else f"; {len(gains)} of {len(group)}"
            cells.append(f"{geometric_mean(gains):.2f}x ({min(gains):.2f}x{fitting})" if gains else "does not fit")
        lines.append([name, n, *cells])
    floors = ["over the floor", f"where that is {LEAST_FLOOR_US:g} us or more"]
    note = "geometric means over contexts and suffixes of ratios of medians, cold L2; (k of n): so many of n cases"
    return markdown(
        ["heads", "n", *floors, *(f"{way} over ours (least)" for way in others)], lines, f"{_where(rows)}; {note}."
    )


def ops_trees_table(rows: Sequence[Measurement]) -> str:
    """A line for each tree: for each head layout the floor, our time, and the times over ours of ways that ran."""
    others = [way for way in _WAYS if way != "ours" and any(row["way"] == way for row in rows)]
    trees: dict[tuple[str, ...], dict[str, dict[str, Measurement]]] = {}
    for case in by(rows, "case", "dtype"):
        first = next(iter(case.values()))
        layout = f"{first['heads']}/{first['kv_heads']}"
        trees.setdefault((first["nodes"], first["rows"], first["suffix"]), {})[layout] = case
    layouts = list(dict.fromkeys(layout for tree in trees.values() for layout in tree))
    ran = {
        layout: [way for way in others if any(_ok(tree.get(layout, {}).get(way)) for tree in trees.values())]
        for layout in layouts
    }
    lines: list[list[str]] = []
    gains: dict[str, list[float]] = {way: [] for way in others}
    for (nodes, count, suffix), tree in trees.items():
        cells = [nodes or "none", f"{count}x{suffix}"]
        for layout in layouts:
            case = tree.get(layout, {})
            cells.append(
                cell(case.get("ours"), lambda row: f"{float(row['us_p50']):.1f} ({float(row['floor_us']):.1f})")
            )
            for way in ran[layout]:
                if _ok(case.get("ours")) and _ok(case.get(way)):
                    gains[way].append(float(case[way]["us_p50"]) / float(case["ours"]["us_p50"]))
                    cells.append(f"{gains[way][-1]:.2f}x")
                else:
                    cells.append(cell(case.get(way), microseconds))
        lines.append(cells)
    names = ["shared nodes", "rows"]
    for layout in layouts:
        names += [f"{layout}: ours (floor)", *(f"{way} over ours" for way in ran[layout])]
    sums = "; ".join(
        f"{way} over ours: {geometric_mean(found):.2f}x, least {min(found):.2f}x, of {len(found)}"
        for way, found in gains.items()
        if found
    )
    return markdown(names, lines, f"{_where(rows)}; microseconds, medians, cold L2. {sums}.")


def fixed_parts_table(rows: Sequence[Measurement]) -> str:
    """Lines through our microseconds against the context: the time of each 1K tokens, and the time without any.

    Of one sample, and of the kernel of nodes alone: elsewhere suffixes take their part. A line needs three contexts.
    """
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        alone = row["way"] == "ours-prefix" or (row["way"] == "ours" and row["rows"] == "1")
        if alone and row["status"] == "ok" and one_node(row):
            key = tuple(row[name] for name in ("way", "rows", "heads", "kv_heads", "suffix"))
            groups.setdefault(key, []).append(row)
    lines = []
    for (way, count, heads, kv_heads, suffix), found in groups.items():
        contexts = [int(row["context"]) for row in found]
        if len(contexts) < 3:
            continue
        times = [float(row["us_p50"]) for row in found]
        per_token, fixed = linear_regression(contexts, times)
        farthest = max(abs(fixed + per_token * at - time) / time for at, time in zip(contexts, times, strict=True))
        key_bytes = 4 * int(kv_heads) * int(found[0]["head_dim"])
        flops = 4 * int(count) * int(heads) * int(found[0]["head_dim"])
        wide = flops / float(found[0]["matmul_tflop_per_s"]) > key_bytes / float(found[0]["copy_tb_per_s"])
        rate = f"{flops / per_token / 1e6:.0f} TFLOP/s" if wide else f"{key_bytes / per_token / 1e6:.2f} TB/s"
        cells = [way, count, f"{heads}/{kv_heads}", "" if way == "ours-prefix" else suffix]
        cells += [f"{min(contexts):,} to {max(contexts):,}", f"{fixed:.1f} us", f"{1024 * per_token:.2f} us", rate]
        lines.append([*cells, f"{farthest:.0%}"])
    names = ["way", "rows", "heads", "suffix", "contexts", "fixed", "each 1K tokens", "rate", "farthest from the line"]
    return markdown(names, lines)


def _ok(row: Measurement | None) -> bool:
    return row is not None and row["status"] == "ok"


def _where(rows: Sequence[Measurement]) -> str:
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
