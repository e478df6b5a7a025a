"""The constants of the dispatcher's cost model, fitted to rows of operators.

``python -m tools.calibrate ROWS.csv`` prints what to paste into ``attention/launch/dispatch.py``, and how
well the model then tells the time and the winner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from benchmarks.ops.cases import NodeSpec
from benchmarks.ops.inputs import make_forest
from hf_fastdecode.attention.forest import Forest
from hf_fastdecode.attention.launch.dispatch import (
    KERNELS,
    LIBRARY,
    PLAIN,
    Candidate,
    Costs,
    Heads,
    estimated_costs,
    predict,
)
from hf_fastdecode.files import read_rows
from hf_fastdecode.measurement.rows import Measurement

# A way's rows, in some variants, are a candidate's times; plain decoding reads nodes and suffixes alike.
_WAYS = {("ours", "kernels"): KERNELS, ("recipe", ""): LIBRARY, ("plain", ""): PLAIN}
_FITTED = {
    KERNELS: ("launch", "bandwidth", "suffix_bandwidth", "rate"),
    LIBRARY: ("launch", "bandwidth", "suffix_bandwidth", "rate"),
    PLAIN: ("launch", "bandwidth"),
}
_START = estimated_costs(132, None)  # the constants in use for an H200
_PULL = 1e-6  # towards the start, so that a constant that no row depends on stays where it was


@dataclass(frozen=True)
class Measured:
    """One candidate's time in one case.

    Attributes:
        candidate: A name of `dispatch`.
        case: What names the case, with the dtype.
        forest: Its nodes.
        suffix: Tokens in a row's suffix.
        heads: Its head layout.
        seconds: The median.
    """

    candidate: str
    case: str
    forest: Forest
    suffix: int
    heads: Heads
    seconds: float

    def ratio(self, costs: Costs) -> float:
        """Predicted over measured."""
        return predict(self.forest, self.suffix, self.heads, costs)[self.candidate] / self.seconds


def measured(rows: Sequence[Measurement]) -> list[Measured]:
    """Points of the candidates from rows of ``benchmarks ops`` that are ``ok``; other ways are left out."""
    found = []
    for row in rows:
        name = _WAYS.get((row["way"], row["variant"])) or _WAYS.get((row["way"], ""))
        if name is None or row["status"] != "ok":
            continue
        heads, kv_heads, head_dim = (int(row[column]) for column in ("heads", "kv_heads", "head_dim"))
        layout = Heads(heads, kv_heads, head_dim, itemsize=getattr(torch, row["dtype"]).itemsize)
        forest = _forest(int(row["rows"]), row["nodes"])
        case = f"{row['case']} {row['dtype']}"
        found.append(Measured(name, case, forest, int(row["suffix"]), layout, 1e-6 * float(row["us_p50"])))
    return found


def _forest(rows: int, words: str) -> Forest:
    """The forest of a row's ``nodes``, such as ``1x2400+8x512``, in which each depth divides the rows evenly."""
    nodes: list[NodeSpec] = []
    for depth, level in enumerate(words.split("+") if words else []):
        runs = [run.split("x") for run in level.split(",")]
        lengths = [int(length) for count, length in runs for _ in range(int(count))]
        each, rest = divmod(rows, len(lengths))
        if rest:
            raise ValueError(f"nodes {words!r} do not divide {rows} rows evenly at depth {depth}")
        nodes += [NodeSpec(length, index * each, each, depth) for index, length in enumerate(lengths)]
    return make_forest(rows, tuple(nodes))


def fit(points: Sequence[Measured], start: Costs = _START) -> Costs:
    """Costs with the least mean square of log(predicted / measured).

    A candidate with fewer rows than constants stays as it was.
    """
    costs = start
    for name, constants in _FITTED.items():
        own = [point for point in points if point.candidate == name]
        if len(own) >= len(constants):
            costs = _fit_one(own, name, constants, costs)
    return costs


def _fit_one(points: Sequence[Measured], name: str, constants: Sequence[str], start: Costs) -> Costs:
    try:
        from scipy.optimize import minimize
    except ImportError as error:
        raise ImportError("fitting needs scipy, which the dev extra brings; `pip install scipy`") from error
    before = [math.log(getattr(getattr(start, name), constant)) for constant in constants]

    def costs_at(logs: Sequence[float]) -> Costs:
        values = {constant: math.exp(value) for constant, value in zip(constants, logs, strict=True)}
        if name == PLAIN:
            values["suffix_bandwidth"] = values["bandwidth"]
        return replace(start, **{name: replace(getattr(start, name), **values)})

    def loss(logs: Sequence[float]) -> float:
        costs = costs_at(logs)
        error = sum(math.log(point.ratio(costs)) ** 2 for point in points) / len(points)
        return error + _PULL * sum((x - y) ** 2 for x, y in zip(logs, before, strict=True))

    found = minimize(loss, before, method="Nelder-Mead")
    return costs_at([float(x) for x in found.x])


def literal(costs: Costs) -> str:
    """Python for the costs, to paste."""

    def candidate(name: str) -> str:
        values = zip(fields(Candidate), astuple(getattr(costs, name)), strict=True)
        shown = [f"{field.name}={_number(value)}" for field, value in values if math.isfinite(value)]
        return f"    {name}=Candidate({', '.join(shown)}),"

    kept = [field.name for field in fields(Costs) if field.name not in _FITTED]
    rates = [f"    {name}={_number(getattr(costs, name))},  # not fitted" for name in kept]
    return "\n".join(["Costs(", *(candidate(name) for name in _FITTED), *rates, ")"])


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits}e{int(exponent)}"


def report(points: Sequence[Measured], costs: Costs) -> str:
    """Report of how well costs predict times and winners, and of what a wrong choice costs."""
    lines = []
    for name, constants in _FITTED.items():
        own = {point: point.ratio(costs) for point in points if point.candidate == name}
        if not own:
            lines.append(f"{name}: no rows, not fitted")
            continue
        worst = max(own, key=lambda point: abs(math.log(own[point])))
        note = "" if len(own) >= len(constants) else f", too few for {len(constants)} constants: not fitted"
        lines.append(
            f"{name}: {len(own)} rows{note}; predicted over measured: median {median(own.values()):.2f}, "
            f"worst {own[worst]:.2f} ({worst.case})"
        )
    cases: dict[str, list[Measured]] = {}
    for point in points:
        cases.setdefault(point.case, []).append(point)
    losses = {}
    for case, ways in cases.items():
        if len(ways) > 1:
            chosen = min(ways, key=lambda point: point.ratio(costs) * point.seconds)
            losses[case] = chosen.seconds / min(point.seconds for point in ways)
    if losses:
        right = sum(loss == 1 for loss in losses.values())
        farthest = max(losses, key=lambda case: losses[case])
        lines.append(
            f"the predicted winner is the measured one in {right} of {len(losses)} cases; "
            f"the worst choice takes {losses[farthest]:.2f}x the best one's time ({farthest})"
        )
    return "\n".join(lines)


def main(
    path: Annotated[Path, typer.Argument(help="CSV file of `python -m benchmarks ops`.", exists=True, dir_okay=False)],
) -> None:
    """Fit the cost model's constants to measured rows of `python -m benchmarks ops`, one set for each device."""
    rows = read_rows(path)
    for device in dict.fromkeys(row["device"] for row in rows):
        points = measured([row for row in rows if row["device"] == device])
        if not points:
            typer.echo(f"# {device}: no row of ours, recipe or plain is ok")
            continue
        costs = fit(points)
        typer.echo(f"# {device}\n{literal(costs)}\n\nfitted:\n{report(points, costs)}")
        typer.echo(f"\nwith the constants in use for an H200:\n{report(points, _START)}")


if __name__ == "__main__":
    typer.run(main)
