"""Sizes with and without sharing, as a table for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_fastdecode.cache.accounting import StockShared
from hf_fastdecode.cache.layout import Kind

from ..console import bytes_text
from .sharing import Sharing


def sharing_text(found: Sharing) -> RenderableType:
    """A model's shape, then a table over contexts and numbers of samples."""
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("model", f"{found.model} ({found.model_type})"),
        *_attention_facts(found),
        *_window_fact(found),
        ("KV per token", f"{found.bytes_per_token:,} bytes ({found.dtype}, K and V, all layers)"),
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
    kinds = Counter(replace(store, kind=Kind.FULL, window=None) for store in found.sizes.stores)
    for shape, layers in kinds.items():
        yield (
            "attention",
            f"{shape.attention}: {layers} layers, h = {shape.query_heads} query heads, g = {shape.kv_heads} KV heads, "
            f"p = h/g = {shape.group_size}, d = {shape.head_dim} numbers per head",
        )


def _window_fact(found: Sharing) -> Iterator[tuple[str, str]]:
    sizes = found.sizes
    if sizes.window is not None:
        yield "window", f"{sizes.local_layers} of the layers attend to {sizes.window:,} tokens only"


def _pair(pair: StockShared, mark: str) -> tuple[Text, Text, Text]:
    if mark:
        return Text(bytes_text(pair.stock)), Text("stock"), Text(mark)
    return Text(bytes_text(pair.stock)), Text(bytes_text(pair.shared)), Text(f"{pair.ratio:.1f}x")
