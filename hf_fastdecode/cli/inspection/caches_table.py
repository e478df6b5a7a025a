"""Caches of one or several models, as tables for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_fastdecode.conversion.fit.cache_errors import dtype_name
from hf_fastdecode.conversion.sizes.slim_checkpoint import LayerCache

from ..console import bytes_text
from ..convert_table import SHORT_DTYPES, cache_name
from .report import ContextCaches, ModelReport

_CAPTION: Final = (
    "Bytes are of one row. Reads, per token: a row's cache once, and its share of the weight matrices. At most: the "
    "speed-up if reads took all the time."
)
_BOUNDS: Final = (
    "These are bounds from sizes: `convert-checkpoint --dry-run` measures which caches a model's layers can have."
)
_SLIM: Final = (
    "Slim models come near their speed-up on a GPU with `hf_fastdecode.enable` only; in transformers' own loop they "
    "are slower than ordinary ones (docs/slim.md)."
)
_COORDINATES: Final = "keys + d/32: keys and d/32 V-coordinates (docs/slim.md), d being the width of the values."
_ENCODER: Final = (
    "E: the encoder's output, once for all cross-attention layers (option 2), and what self-attention caches. On "
    "chip, as in the paper, E is stored but not read from memory; otherwise every layer reads it."
)


def caches_text(reports: Sequence[ModelReport], batches: Sequence[int]) -> RenderableType:
    """A table for each model and context, with the reason where the model is refused; then what they have in common.

    Args:
        reports: Of the models.
        batches: Rows, for the reads per token.
    """
    parts: list[RenderableType] = []
    for report in reports:
        if report.slim_layers is not None:
            parts += [_layers(report, report.slim_layers), Text()]
        parts += [_table(report, caches, batches) for caches in report.caches]
        if report.refused is not None:
            parts.append(Text(f"refused: {report.refused}", style="yellow"))
        parts.append(Text())
    return Group(*parts, Text(" ".join(_notes(reports))))


def _notes(reports: Sequence[ModelReport]) -> Iterator[str]:
    yield _CAPTION
    if any(report.slim_layers is None for report in reports):
        yield _BOUNDS
    if any(report.slim_layers is not None for report in reports):
        yield _SLIM
    if any(report.sharing is not None and report.refused is None for report in reports):
        yield _COORDINATES
    if any(caches.encoder_tokens is not None for report in reports for caches in report.caches):
        yield _ENCODER


def _layers(report: ModelReport, layers: Sequence[LayerCache]) -> Table:
    """What the layers of a slim checkpoint cache; neighbours that cache the same in one line."""
    table = Table(title=Text(f"{report.model}: what its layers cache", style="bold"), title_justify="left")
    table.add_column("layers")
    table.add_column("cache")
    table.add_column("in")
    table.add_column("bytes per token", justify="right")
    encoded = report.caches[0].encoder_tokens is not None
    for kind, own in (("self", layers[::2]), ("cross", layers[1::2])) if encoded else (("", layers),):
        for same, run in groupby(enumerate(own), key=lambda place: place[1]):
            places = [index for index, _ in run]
            name = f"{places[0]} to {places[-1]}" if len(places) > 1 else str(places[0])
            size = f"{same.bytes_per_token:,}"
            table.add_row(f"{kind} {name}".lstrip(), cache_name(same.layer.to_dict()), _dtype(same), size)
    return table


def _dtype(cache: LayerCache) -> str:
    return "-" if cache.layer.plan == "e" else SHORT_DTYPES[dtype_name(cache.dtype)]


def _table(report: ModelReport, caches: ContextCaches, batches: Sequence[int]) -> Table:
    title = f"{report.model}: caches of {caches.context:,} tokens"
    if caches.encoder_tokens is not None:
        title += f" and {caches.encoder_tokens:,} of the encoder"
    table = Table(title=Text(f"{title}, {report.dtype}", style="bold"), title_justify="left")
    table.add_column("\ncache")
    for name in ("\nbytes", "of\nKV"):
        table.add_column(name, justify="right")
    for rows in batches:
        table.add_column(f"reads\nbatch {rows}", justify="right")
        table.add_column("at\nmost", justify="right")
    for size in caches.sizes:
        cells = [size.name, bytes_text(size.stored), f"{size.stored / caches.sizes[0].stored:.1%}"]
        for rows in batches:
            reads, speedup = size.reads(rows), caches.speedup(size, rows)
            cells += ["-" if reads is None else bytes_text(reads), "-" if speedup is None else f"{speedup:.2f}x"]
        table.add_row(*cells)
    return table
