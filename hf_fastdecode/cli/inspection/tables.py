"""What `inspect` counts, as tables for a person: sizes with and without sharing, and caches of one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_fastdecode.cache.accounting import StockShared
from hf_fastdecode.conversion.fit.layer_plan import dtype_name
from hf_fastdecode.conversion.sizes import LayerCache

from ...cache.stores import Kind
from ...dtypes import short_dtype
from ..console import bytes_text
from ..convert_table import cache_name
from .report import ContextCaches, ModelReport, Sharing

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
    """A table for each model and context, with the reason where a model is refused; then notes on all."""
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
    return "-" if cache.layer.plan == "e" else short_dtype(dtype_name(cache.dtype))


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


def sharing_text(found: Sharing) -> RenderableType:
    """A model's shape, then a table over contexts and numbers of samples."""
    latent = {store.kind is Kind.LATENT for store in found.sizes.stores}
    stored = "K and V" if latent == {False} else "latents" if latent == {True} else "K and V, or latents"
    window = f"{found.sizes.local_layers} of the layers attend to {found.sizes.window or 0:,} tokens only"
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("model", f"{found.model} ({found.model_type})"),
        *_attention_facts(found),
        *([("window", window)] if found.sizes.window is not None else []),
        ("KV per token", f"{found.bytes_per_token:,} bytes ({found.dtype}, {stored}, all layers)"),
        ("longest row", f"{found.max_positions:,} tokens" if found.max_positions else "no bound in the config"),
        ("can share", {True: "yes", False: f"no: {found.reason}", None: f"unknown: {found.reason}"}[found.can_share]),
    ):
        facts.add_row(Text(label, style="bold"), value)
    halfway = found.new_tokens // 2
    table = Table(
        title=f"n samples of one context, {found.new_tokens} new tokens each",
        caption=f"reads: of one step, halfway ({halfway} tokens in); Bifurcated attention, equations 5 and 6",
        title_justify="left",
        title_style="bold",
        caption_justify="left",
    )
    sizes = (f"{what}\n{column}" for what in ("KV", "reads") for column in ("stock", "shared", "ratio"))
    for name in ("\ncontext", "\nn", *sizes):
        table.add_column(name, justify="right")
    notes: dict[str, int] = {}
    for row in found.rows:
        stock = None if row.stock_reason is None else f"runs stock: {row.stock_reason}"
        mark, noted = (f"[{notes.setdefault(text, len(notes) + 1)}]" if text else "" for text in (stock, row.note))
        context = Text(f"{noted} {row.context:,}".lstrip())
        table.add_row(context, str(row.samples), *_pair(row.kv_bytes, mark), *_pair(row.step_bytes, mark))
    lines = [Text(f"[{number}] {text}") for text, number in notes.items()]
    return Group(facts, Text(), table, *lines)


def _attention_facts(found: Sharing) -> Iterator[tuple[str, str]]:
    """Heads of each kind of layer."""
    kinds = Counter(
        store if store.kind is Kind.LATENT else replace(store, kind=Kind.FULL, window=None)
        for store in found.sizes.stores
    )
    for shape, layers in kinds.items():
        if shape.kind is Kind.LATENT:
            yield (
                "attention",
                f"latent: {layers} layers, h = {shape.query_heads} query heads over {shape.head_dim} numbers of a "
                f"token, {shape.value_dim} of them its latent",
            )
            continue
        yield (
            "attention",
            f"{shape.attention}: {layers} layers, h = {shape.query_heads} query heads, g = {shape.kv_heads} KV heads, "
            f"p = h/g = {shape.group_size}, d = {shape.head_dim} numbers per head",
        )


def _pair(pair: StockShared, mark: str) -> tuple[Text, Text, Text]:
    if mark:
        return Text(bytes_text(pair.stock)), Text("stock"), Text(mark)
    return Text(bytes_text(pair.stock)), Text(bytes_text(pair.shared)), Text(f"{pair.ratio:.1f}x")
