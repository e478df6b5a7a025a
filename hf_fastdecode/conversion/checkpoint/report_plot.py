"""Plot of a conversion report: condition numbers and errors per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_report(report: dict[str, Any], path: Path) -> None:
    """Draw, per layer, the condition number of ``W_K`` and the output errors of measured caches, to a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = report["layers"]
    numbers = list(range(len(layers)))
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    conditions = [layer["measured"]["condition"] for layer in layers]
    known = [(at, value) for at, value in zip(numbers, conditions) if value is not None]
    above.bar([at for at, _ in known], [value for _, value in known], color="#3b6fb6")
    above.set_yscale("log")
    above.set_ylabel("condition number of $W_K$")
    above.set_title(f"{report['source']} in {report['dtype']}: {report['saved']:.0%} of the KV cache saved")
    measured = [layer["measured"] for layer in layers]
    alone = [_of_keys(layer) for layer in layers]
    for baseline, name, color in (("ordinary", "", "#9aa0a6"), ("ordinary_int8", ", int8", "#c9a227")):
        if all(one[baseline] for one in measured):
            errors = [one[baseline]["output_error"] for one in measured]
            below.plot(numbers, errors, "o-", color=color, label=f"keys and values{name}")
            allowed = [error * report["tolerance"] for error in errors]
            below.plot(numbers, allowed, ":", color=color, label=f"tolerance{name}")
    below.plot(numbers, alone, "x--", color="#c46a8d", label="keys alone")
    chosen = _above_zero([layer["output_error"] for layer in layers], measured)
    below.plot(numbers, chosen, "s-", color="#1b7f5c", label="chosen")
    for at, (layer, error) in enumerate(zip(layers, chosen)):
        name = f"k+{layer['rank']}" if layer["rank"] else layer["plan"]
        if layer.get("cache_dtype"):
            name += f" {layer['cache_dtype']}"
        if not layer["output_error"]:
            name += ", exact"
        below.annotate(name, (at, error), textcoords="offset points", xytext=(0, 7), ha="center")
    below.set_yscale("log")
    below.set_ylabel("relative error of the layer's output")
    below.set_xlabel("layer")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _above_zero(errors: list[float], measured: list[dict[str, Any]]) -> list[float]:
    """Errors for a logarithmic axis, which has no 0: exact caches are drawn below all keys and values."""
    lowest = min((one["ordinary"]["output_error"] for one in measured if one["ordinary"]["output_error"]), default=1.0)
    return [error or lowest / 10 for error in errors]


def _of_keys(layer: dict[str, Any]) -> float:
    """Output error of keys alone, not in 8 bits; nan where it was not measured."""
    measured = layer["measured"]
    alone = (one for one in measured["candidates"] if (one["plan"], one["dtype"]) == ("k", measured["cache_dtype"]))
    return next((one["output_error"] for one in alone), float("nan"))
