"""Bytes and errors of caches by spectrum of ``W_K``: a table and a picture for docs/slim-measurements.md.

Run ``python -m tools.slim_spectra`` from a clone: it writes rows, draws them, and puts the table into the page.

Layers are random, of a bf16 model. Queries, values and outputs have Gaussian weights. Keys have Gaussian weights too,
or log-uniform singular values with random singular vectors, of the same Frobenius norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from torch.nn.init import orthogonal_
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_fastdecode.conversion.fit.attention import AttentionInputs, AttentionWeights, Rotation
from hf_fastdecode.conversion.fit.layer_plan import RANK_SHARES, CacheError, fit_layer, share_name
from hf_fastdecode.conversion.fit.value_coordinates import key_statistics
from hf_fastdecode.conversion.layer_converter import AUTO, pick
from hf_fastdecode.files import read_rows, write_rows
from hf_fastdecode.measurement.rows import Measurement, head, line, provenance

from .pages import DOCS, replace_table
from .slim_table import FITTED, UNFITTED
from .unfitted_keys import ErrorsOfPaper

PAGE: Final = DOCS / "slim-measurements.md"
ROWS: Final = DOCS / "slim-spectra.csv"
PICTURE: Final = DOCS / "slim-spectra.png"

SPECTRA: Final = ("Gaussian", "1e2", "1e3", "1e4", "1e5", "1e6", "1e7")
"""Gaussian weights of keys, or the condition number of a log-uniform spectrum."""
EXACT: Final = "float32"
"""Dtype of weights that leaves spectra as they are drawn."""
STORED: Final = "bfloat16"
"""Dtype of the model; rounding the weights to it fills the low end of steep spectra."""

TOLERANCE: Final = 2.0
ORDINARY: Final = "keys and values, bf16"
PAPER: Final = (f"{UNFITTED}, bf16", f"{UNFITTED}, fp16")
KEYS: Final = (f"{FITTED}, bf16", f"{FITTED}, fp16")
INPUTS: Final = "inputs, bf16 (no RoPE)"

_WIDTH, _HEAD_DIM, _CALIBRATION, _MEASURED = 1024, 64, 1024, 512
# The query scale spreads a query's scores by about 3; in the embedded model standard deviations are 1.5 to 17.
_DECAY, _MEAN_SHARE, _QUERY_SCALE = 1.5, 1 / 3, 4.0


def measure(
    spectrum: str,
    weights_dtype: str = EXACT,
    *,
    width: int = _WIDTH,
    calibration: int = _CALIBRATION,
    measured: int = _MEASURED,
) -> list[dict[str, Any]]:
    """Bytes of each cache, and its errors on tokens that nothing was fitted to.

    Args:
        spectrum: One of `SPECTRA`.
        weights_dtype: `EXACT` or `STORED`.
        width: Of the model, a multiple of 64.
        calibration: Tokens of which one half fits matrices and the other chooses among them, as in a conversion.
        measured: Further tokens, for the errors.

    Returns:
        A row per cache, the last of the one that `auto` chooses.
    """
    generator = torch.Generator().manual_seed(0)
    weights = random_layer(spectrum, width, getattr(torch, weights_dtype), generator)
    inputs = activations(calibration + measured, width, generator)
    rotation = _rope(max(calibration, measured))
    known, unseen = inputs[:calibration], inputs[calibration:]
    calibrated = AttentionInputs(known, rotation=rotation.tokens(slice(calibration)))
    plan, statistics = fit_layer(weights, calibrated, tolerance=TOLERANCE)
    errors = ErrorsOfPaper(weights, AttentionInputs(unseen, rotation=rotation.tokens(slice(measured))))
    ordinary, bare = errors.ordinary(torch.bfloat16), ErrorsOfPaper(weights, AttentionInputs(unseen))
    ranks = {KEYS[1]: 0} | {
        f"keys + {share_name(share)} V-coordinates, fp16": int(width * share) for share in RANK_SHARES
    }
    of_fp16 = statistics["float16"]
    in_fp16 = {name: errors.value_coordinates(of_fp16, rank, torch.float16) for name, rank in ranks.items()}
    of_bf16 = key_statistics(weights, known[: calibration // 2], torch.bfloat16)
    in_bf16 = errors.value_coordinates(of_bf16, 0, torch.bfloat16)
    chosen = pick(plan, (AUTO, 0), 0)
    unfitted = {
        name: errors.unfitted_keys(dtype) for name, dtype in zip(PAPER, (torch.bfloat16, torch.float16), strict=True)
    }
    found = {ORDINARY: ordinary, **unfitted, KEYS[0]: in_bf16, **in_fp16, INPUTS: bare.of_inputs(torch.bfloat16)}
    found[AUTO] = next(
        one for one in (ordinary, *in_fp16.values()) if (one.plan, one.rank) == (chosen.plan, chosen.rank)
    )
    case = {"spectrum": spectrum, "weights": weights_dtype, "condition": plan.condition, "width": width}
    case |= {"calibration_tokens": calibration, "measured_tokens": measured}
    beside = {INPUTS: bare.ordinary(torch.bfloat16)}
    return [case | {"cache": name} | _columns(one, beside.get(name, ordinary)) for name, one in found.items()]


def _columns(one: CacheError, ordinary: CacheError) -> dict[str, Any]:
    shown = {name: getattr(one, name) for name in ("plan", "rank", "bytes_per_token", "value_error", "output_error")}
    return shown | {"error_ratio": one.output_error / ordinary.output_error}


def random_layer(spectrum: str, width: int, dtype: torch.dtype, generator: torch.Generator) -> AttentionWeights:
    """An attention layer with one of `SPECTRA`; all key projections have about one Frobenius norm."""

    def gaussian() -> Tensor:
        return torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)

    query, key, value, output = _QUERY_SCALE * gaussian(), gaussian(), gaussian(), gaussian()
    if spectrum != "Gaussian":
        left, right = (_directions(width, generator) for _ in range(2))
        key = left * torch.logspace(0, -math.log10(float(spectrum)), width, dtype=torch.float64) @ right
        key *= math.sqrt(width) / torch.linalg.norm(key)
    heads = width // _HEAD_DIM
    return AttentionWeights(query.to(dtype), key.to(dtype), value.to(dtype), output.to(dtype), heads)


def activations(tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """Random inputs of a layer's projections, ``[tokens, width]`` in bf16.

    Tokens are independent and normal around a common mean, which has a third of their mean square. The variance of
    principal component i, in a random direction, is proportional to ``i ** -1.5``. RMSNorm follows. The embedded
    model's layers have a quarter to a half, and powers of -1.4 to -1.7.
    """
    spread = torch.arange(1, width + 1, dtype=torch.float64).pow(-_DECAY / 2)
    spread *= math.sqrt(1 - _MEAN_SHARE) / torch.linalg.norm(spread)
    mean = math.sqrt(_MEAN_SHARE) * _directions(width, generator)[0]
    normal = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    return rms_norm(mean + normal * spread @ _directions(width, generator), (width,)).bfloat16()


def _directions(width: int, generator: torch.Generator) -> Tensor:
    return orthogonal_(torch.empty(width, width, dtype=torch.float64), generator=generator)


def _rope(tokens: int) -> Rotation:
    config = LlamaConfig(hidden_size=_HEAD_DIM, num_attention_heads=1)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), torch.arange(tokens)[None])
    return Rotation(cos[0], sin[0])


def table(rows: Sequence[Measurement]) -> str:
    """A line per cache, a column per spectrum; `auto` stands below, once per dtype of the weights."""
    exact, stored = ([row for row in rows if row["weights"] == dtype] for dtype in (EXACT, STORED))
    caches = list(dict.fromkeys(row["cache"] for row in exact if row["cache"] != AUTO))
    names = [
        f"{row['spectrum']}, {_power(row)}" if row["spectrum"] == "Gaussian" else row["spectrum"]
        for row in _of(exact, ORDINARY)
    ]
    lines = head(["cache", "bytes per token", *names])
    for cache in caches:
        own = _of(exact, cache)
        cells = [f"{100 * float(row['output_error']):.2f} %" if cache == ORDINARY else _multiple(row) for row in own]
        lines.append(line([cache, f"{int(own[0]['bytes_per_token']):,}", *cells]))
    lines += _choices(exact)
    lines.append(line(["condition number of `W_K` rounded to bf16", "", *map(_power, _of(stored, ORDINARY))]))
    return "\n".join([*lines, *_choices(stored, ", all weights in bf16")]) + "\n"


def _choices(rows: Sequence[Measurement], where: str = "") -> list[str]:
    own = _of(rows, AUTO)
    sizes = [f"{int(row['bytes_per_token']):,}" for row in own]
    return [
        line([f"**`auto`**{where}: bytes per token", "", *sizes]),
        line([f"**`auto`**{where}: error", "", *map(_multiple, own)]),
    ]


def _of(rows: Sequence[Measurement], cache: str) -> list[Measurement]:
    return [row for row in rows if row["cache"] == cache]


def _power(row: Measurement) -> str:
    digits, exponent = f"{float(row['condition']):.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def _multiple(row: Measurement) -> str:
    ratio = float(row["error_ratio"])
    if ratio == 0:
        return "**exact**"
    shown = f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"
    return f"**{shown}**" if ratio <= TOLERANCE else shown


def draw(rows: Sequence[Measurement], path: Path) -> None:
    """Draw errors against bytes, a line per spectrum, with the choices of `auto` and its tolerance.

    Args:
        rows: As `measure` has them.
        path: A PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    exact = [row for row in rows if row["weights"] == EXACT]
    for index, spectrum in enumerate(SPECTRA):
        own = [row for row in exact if row["spectrum"] == spectrum]
        colour = "k" if spectrum == "Gaussian" else pyplot.get_cmap("viridis")(index / len(SPECTRA))
        in_fp16 = [row for row in own if row["cache"].endswith("fp16") and row["cache"] not in PAPER]
        axes.plot(*_points(in_fp16), "o-", color=colour, markersize=4, label=f"keys + V-coordinates, fp16; {spectrum}")
        axes.plot(*_points(_of(own, KEYS[0])), "x", color=colour, markersize=9, markeredgewidth=2, zorder=3)
        axes.plot(*_points(_of(own, AUTO)), "o", color=colour, markersize=12, markerfacecolor="none")
    (ordinary, *_) = _of(exact, ORDINARY)
    axes.plot(*_points([ordinary]), "k*", markersize=10, label=ORDINARY)
    axes.plot([], [], "kx", markersize=9, markeredgewidth=2, label=KEYS[0])
    axes.plot([], [], "ko", markersize=12, markerfacecolor="none", label="chosen by auto")
    axes.axhline(TOLERANCE, color="k", linestyle="--", linewidth=1, label=f"tolerance, {TOLERANCE:g}")
    axes.set_yscale("log")
    axes.set_xlabel("bytes per token")
    axes.set_ylabel("error of the layer's output over that of keys and values")
    axes.set_title(f"Spectra of $W_K$, by condition number; d = {ordinary['width']}, RoPE")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _points(rows: Sequence[Measurement]) -> tuple[list[int], list[float]]:
    return [int(row["bytes_per_token"]) for row in rows], [float(row["error_ratio"]) for row in rows]


def main() -> None:
    """Measure all spectra, and write rows, picture and table."""
    where = provenance("cpu")
    found = [
        where | row
        for weights_dtype in (EXACT, STORED)
        for spectrum in SPECTRA
        for row in measure(spectrum, weights_dtype)
    ]
    write_rows(ROWS, found)
    rows = read_rows(ROWS)
    draw(rows, PICTURE)
    replace_table(PAGE, "tools.slim_spectra", table(rows))
    print(table(rows), end="")


if __name__ == "__main__":
    main()
