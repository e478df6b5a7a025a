"""Writes a table of docs/slim-measurements.md: bytes and errors of each cache of the embedded model.

Run ``python -m tools.slim_table`` from a clone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hf_fastdecode.assets import load_embedded
from hf_fastdecode.conversion.calibration import calibration_ids, model_inputs, record
from hf_fastdecode.conversion.fit.attention import AttentionInputs, AttentionWeights, Rotation
from hf_fastdecode.conversion.fit.layer_plan import CacheError, LayerPlan, fit_layer
from hf_fastdecode.conversion.fit.value_coordinates import key_statistics
from hf_fastdecode.conversion.layer_converter import below
from hf_fastdecode.patches.architectures.slim_llama import FAMILY

from .pages import DOCS, replace_table
from .unfitted_keys import ErrorsOfPaper

PAGE: Final = DOCS / "slim-measurements.md"
HEADER: Final = "| cache | of KV's bytes | error of V | error of the layer's output |\n|---|---|---|---|\n"
COORDINATES: Final = (0, 32, 8, 4)
"""V-coordinates, as parts of the width of the values; 0 for none."""

UNFITTED: Final = "keys alone, `K W_K^-1 W_V` (the paper)"
FITTED: Final = "keys alone, fitted (plan `k`)"
"""Less their mean, with a map whose rounding is fitted to a text."""

SHORT: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class Row:
    """One cache, on all layers.

    Attributes:
        name: What is cached.
        share: Of the bytes of keys and values in bf16.
        value_errors: Smallest and largest of the layers' relative errors of the values.
        output_errors: The same of the attention output.
    """

    name: str
    share: float
    value_errors: tuple[float, float]
    output_errors: tuple[float, float]

    def line(self) -> str:
        """A line of the table."""
        return f"| {self.name} | {self.share:.1%} | {_span(self.value_errors)} | {_span(self.output_errors)} |"


def rows() -> list[Row]:
    """Measure, on the second half of the built-in text; offsets and roundings are fitted to the first."""
    layers, rotation = _layers()
    half = len(layers[0][1]) // 2
    texts = [AttentionInputs(seen, rotation=rotation) for _, seen in layers]
    judges = [ErrorsOfPaper(own, text.part(slice(half, None))) for (own, _), text in zip(layers, texts)]
    ordinary = [judge.ordinary(torch.bfloat16) for judge in judges]
    table = [_row("keys and values, bf16", ordinary, ordinary)]
    for dtype in (torch.int8, torch.float8_e4m3fn):
        table.append(_row(cache_name(None, dtype), [judge.ordinary(dtype) for judge in judges], ordinary))
    for dtype in (torch.bfloat16, torch.float16, torch.int8):
        table.append(_row(f"{UNFITTED}, {SHORT[dtype]}", [judge.unfitted_keys(dtype) for judge in judges], ordinary))
        fitted = [key_statistics(own, seen[:half], dtype) for own, seen in layers]
        for part in COORDINATES:
            rank = len(fitted[0].directions) // part if part else 0
            found = [judge.value_coordinates(one, rank, dtype) for judge, one in zip(judges, fitted)]
            table.append(_row(cache_name(part, dtype), found, ordinary))
    plans = [fit_layer(own, text, cache_dtype=torch.int8)[0] for (own, _), text in zip(layers, texts)]
    for dtypes in (("float16", "bfloat16"), ("int8", "float16", "bfloat16")):
        for tolerance in (2.0, 1.0):
            name = f"**the plan{', int8' if 'int8' in dtypes else ''}, tolerance {tolerance:g}**"
            table.append(_row(name, [_chosen(plan, tolerance, dtypes) for plan in plans], ordinary))
    return table


def _chosen(plan: LayerPlan, tolerance: float, dtypes: Sequence[str]) -> CacheError:
    """The choices of a plan of another tolerance, and of caches in these dtypes."""
    strict = replace(plan, tolerance=tolerance)
    return next(one for one in strict.candidates if one.dtype in dtypes and strict.accepts(one))


def cache_name(part: int | None, dtype: torch.dtype) -> str:
    """Name of a cache: keys and values for None, keys alone of a plan for 0, else with d / `part` V-coordinates."""
    keys = f"keys + d/{part} V-coordinates" if part else FITTED
    return f"{'keys and values' if part is None else keys}, {SHORT[dtype]}"


def _layers() -> tuple[list[tuple[AttentionWeights, Tensor]], Rotation]:
    """Attention of the embedded model in bf16, what it sees on the built-in text, and that text's RoPE."""
    model, tokenizer = load_embedded(torch.bfloat16)
    family, ids = FAMILY, calibration_ids(tokenizer)
    found = []
    recorded = record(model, family, model_inputs(family, model.config, ids))
    for index, prefix in enumerate(family.attentions(model.config)):
        own = below(prefix, model.state_dict())
        found.append((family.weights(model.config, family.plain(model.config, own), index), recorded[index].inputs))
    rotation = family.rotation(model.config, len(ids))
    assert rotation is not None
    return found, rotation


def _row(name: str, found: Sequence[CacheError], ordinary: Sequence[CacheError]) -> Row:
    share = sum(one.bytes_per_token for one in found) / sum(one.bytes_per_token for one in ordinary)
    values, outputs = ([getattr(one, f"{part}_error") for one in found] for part in ("value", "output"))
    return Row(name, share, (min(values), max(values)), (min(outputs), max(outputs)))


def _span(errors: tuple[float, float]) -> str:
    low, high = (f"{100 * error:.{0 if error >= 0.1 else 2}{'f' if error >= 0.1 else 'g'}}" for error in errors)
    return f"{low} %" if low == high else f"{low} to {high} %"


def main() -> None:
    """Measure, and write the table into the page."""
    table = HEADER + "".join(f"{row.line()}\n" for row in rows())
    replace_table(PAGE, "tools.slim_table", table)
    print(table)


if __name__ == "__main__":
    main()
