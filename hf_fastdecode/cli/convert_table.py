"""The report of a conversion, as a table for a person."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..dtypes import short_dtype
from .console import bytes_text

_EIGHT_BITS: Final = ("int8", "float8_e4m3fn")


def conversion_text(report: dict[str, Any]) -> RenderableType:
    """What each layer caches and why, and what is saved; for the way back, how exact it is."""
    return _full(report) if report["format"] == "full" else _slim(report)


def _slim(report: dict[str, Any]) -> RenderableType:
    table = Table(title=f"{report['source']} in {report['dtype']}, slim", title_justify="left", title_style="bold")
    table.add_column("layer", justify="right")
    table.add_column("caches", min_width=8)
    table.add_column("in")
    for name in ("cond\nW_K", "max\nW_KV", "bytes\nof KV", "V\nerror", "output\nerror", "error\nvs KV"):
        table.add_column(name, justify="right")
    for index, layer in enumerate(report["layers"]):
        measured, ordinary = layer["measured"], layer["measured"]["ordinary"]
        baseline = measured["ordinary_int8"] if layer["dtype"] in _EIGHT_BITS else ordinary
        table.add_row(
            _place(report, index),
            cache_name(layer),
            short_dtype(layer["dtype"]),
            _number(measured["condition"]),
            _number(measured["largest_key_to_value"]),
            f"{layer['bytes_per_token'] / ordinary['bytes_per_token']:.1%}",
            _error(layer["value_error"]),
            _error(layer["output_error"]),
            _ratio(layer["output_error"], baseline["output_error"]),
        )
    if "encoder_tokens" in report:
        sizes = (
            f"{bytes_text(report['cache_bytes'])} for {report['decoder_tokens']:,} tokens of the decoder and "
            f"{report['encoder_tokens']:,} of the encoder in the place of "
            f"{bytes_text(report['ordinary_cache_bytes'])}"
        )
    else:
        sizes = (
            f"{bytes_text(report['bytes_per_token'])} per token in the place of "
            f"{bytes_text(report['ordinary_bytes_per_token'])}"
        )
    closing = Text(
        f"{sizes}: {report['saved']:.1%} saved. Errors of values and of the "
        f"layer's output are relative, on the second half of {report['calibration_tokens']:,} tokens "
        f"({report['calibration']}); vs KV: output error over that of keys and values."
    )
    _append_eight_bits(report, closing)
    _append_warnings(report, closing)
    if features := report.get("calibration_features"):
        closing.append(f" The encoder read features ({features}).")
    for index, layer in enumerate(report["layers"]):
        reasons = {reason for plan, reason in layer["measured"]["refused"].items() if plan != "x"}  # RoPE rules it out
        for reason in sorted(reasons):
            closing.append(f"\nLayer {_place(report, index)}: {reason}.", style="yellow")
    _append_verification(report, closing)
    return Group(table, closing)


def _append_verification(report: dict[str, Any], closing: Text) -> None:
    """How far logits of the slim model are from those of the ordinary one, if that was asked for."""
    if checked := report.get("verification"):
        closing.append(
            f"\nVerified: relative error of logits against fp64 {checked['slim_error']:.3g} (bound "
            f"{checked['bound']:.3g}, ordinary {checked['ordinary_error']:.3g}); {checked['same_tokens']:.1%} of the "
            "most likely tokens are those of fp64."
        )


def _append_warnings(report: dict[str, Any], closing: Text) -> None:
    """Layers whose plan, which was asked for, exceeds the tolerance; and that a conversion saves nothing."""
    over = []
    for index, layer in enumerate(report["layers"]):
        name = "ordinary_int8" if layer["dtype"] in _EIGHT_BITS else "ordinary"
        if layer["output_error"] > report["tolerance"] * layer["measured"][name]["output_error"]:
            over.append(_place(report, index))
    if over:
        places = ", ".join(over)
        closing.append(f"\nLess accurate than --tolerance {report['tolerance']:g}: layers {places}.", style="yellow")
    if all(layer["plan"] == "kv" for layer in report["layers"]):
        closing.append("\nAll layers keep keys and values: this conversion saves nothing.", style="yellow")


def _append_eight_bits(report: dict[str, Any], closing: Text) -> None:
    """What int8 keys and values would take, and why layers are not in 8 bits though these were asked for."""
    baselines = [layer["measured"]["ordinary_int8"] for layer in report["layers"]]
    if not all(baselines):
        return
    sizes = [baseline["bytes_per_token"] for baseline in baselines]
    if "encoder_tokens" in report:
        total = sum(sizes[::2]) * report["decoder_tokens"] + sum(sizes[1::2]) * report["encoder_tokens"]
        taken = bytes_text(total)
    else:
        taken = f"{bytes_text(sum(sizes))} per token"
    compared = any(layer["dtype"] in _EIGHT_BITS for layer in report["layers"])
    closing.append(
        f"\nKeys and values in int8, scales included, take {taken}"
        f"{'; for layers in 8 bits, vs KV compares with these' if compared else ''}."
    )
    asked = report["plan"] != "auto" or report["rank"] is not None
    for index, layer in enumerate(report["layers"]):
        tried = [
            one
            for one in layer["measured"]["candidates"]
            if one["dtype"] in _EIGHT_BITS and (not asked or cache_name(one) == cache_name(layer))
        ]
        if layer["dtype"] in _EIGHT_BITS or not tried:
            continue
        best = min(tried, key=lambda one: one["output_error"])
        ratio = _ratio(best["output_error"], layer["measured"]["ordinary_int8"]["output_error"])
        closing.append(
            f"\nLayer {_place(report, index)}: not in {short_dtype(best['dtype'])}, which has at best {ratio} the "
            f"error of int8 keys and values ({cache_name(best)}).",
            style="yellow",
        )


def _full(report: dict[str, Any]) -> RenderableType:
    table = Table(title=f"{report['source']}, full again", title_justify="left", title_style="bold")
    table.add_column("layer", justify="right")
    table.add_column("was")
    table.add_column("error of W_V", justify="right")
    for index, layer in enumerate(report["layers"]):
        error = layer["recovered_error"]
        table.add_row(
            _place(report, index),
            cache_name(layer),
            "unknown" if error is None else "exact" if not error else f"{error:.2e}",
        )
    closing = Text(
        "W_V = W_K M + W_E B, computed in fp64; its relative error against the original weights, as measured when "
        "these were converted. All other weights are the same."
    )
    _append_verification(report, closing)
    return Group(table, closing)


def cache_name(layer: dict[str, Any]) -> str:
    """What a layer caches, of its plan and rank."""
    names = {"k": "keys", "kv": "keys, values", "k+r": f"keys+{layer['rank']}", "x": "inputs", "e": "nothing"}
    return names[layer["plan"]]


def _place(report: dict[str, Any], index: int) -> str:
    """Number of a layer; of encoder-decoder models, which of its attentions too."""
    if "encoder_tokens" not in report:
        return str(index)
    return f"{index // 2} {'cross' if index % 2 else 'self'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"  # of few digits, so that the table fits into 80 columns


def _error(value: float) -> str:
    if not value:
        return "exact"  # inputs that the model has in the cache's dtype
    return f"{value:.2%}" if value >= 1e-4 else _number(value)


def _ratio(error: float, ordinary: float) -> str:
    return f"{error / ordinary:.2f}x" if ordinary else "-"
