"""Counts of `inspect` for one model, and their tables: keys and values, with and without sharing, and slim caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Final

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from hf_fastdecode.api import enabled, prefill
from hf_fastdecode.cache.accounting import KVSizes, StockShared, memory_io
from hf_fastdecode.conversion.families import is_slim, ordinary_config, refusal
from hf_fastdecode.conversion.fit.layer_plan import dtype_name
from hf_fastdecode.conversion.sizes import (
    CacheSize,
    LayerCache,
    checkpoint_caches,
    decoder_caches,
    decoder_matrices,
    empty_model,
    encoder_decoder_caches,
    layer_caches,
)
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.options import Options
from hf_fastdecode.generation.support import rope_limit

from ...cache.stores import Kind
from ...dtypes import parse_dtype, short_dtype
from ...errors import InputError, one_line
from ...model_names import max_positions
from ..console import bytes_text
from ..convert import cache_name

_CONTEXTS: Final = (512, 2048, 8192, 32768, 131072)
_PROBE: Final = 8  # tokens of a forward pass that only tells whether it can be made
_HEADS: Final = ("query_heads", "kv_heads", "head_dim", "group_size", "attention")
_SHOWN: Final = 3  # of these, the longest that the model takes; the shortest where it sets no bound


@dataclass(frozen=True)
class Measurement:
    context: int  # tokens that the samples share
    samples: int
    kv_bytes: StockShared  # at the end, when every row has its new tokens
    step_elements: StockShared | None  # of K in a layer without a window, halfway: Bifurcated attention, eqs. 5 and 6
    step_bytes: StockShared  # of keys and values that all layers read in that step
    stock_reason: str | None  # why such a call runs stock
    note: str | None  # what else is to be known of it


@dataclass(frozen=True)
class Sharing:
    sizes: KVSizes
    bytes_per_token: int  # of keys and values, in all layers
    max_positions: int | None  # most tokens in a row
    new_tokens: int  # of each row
    can_share: bool | None  # None when that could not be found out
    reason: str  # why it cannot, or why that is unknown
    rows: list[Measurement]  # for each context, each number of samples

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["sizes"]
        for row, measured in zip(fields["rows"], self.rows, strict=True):
            for name in ("kv_bytes", "step_elements", "step_bytes"):
                pair: StockShared | None = getattr(measured, name)
                row[name] = None if pair is None else {**pair._asdict(), "ratio": round(pair.ratio, 4)}
        return {**fields, **self._shape()}

    def _shape(self) -> dict[str, Any]:
        """Layers and heads; where layers differ in heads, each kind of layer beside nulls."""
        sizes = self.sizes
        alike = sizes.alike
        heads = {name: alike and getattr(alike, name) for name in _HEADS}
        windows = {"local_layers": sizes.local_layers, "window": sizes.window, "chunked": sizes.chunked}
        differ = {} if alike else {"kinds": [asdict(one) | {"layers": n} for one, n in Counter(sizes.stores).items()]}
        return {"layers": sizes.layers} | heads | windows | differ


def count_sharing(
    config: Any,
    model: PreTrainedModel | str,
    contexts: Sequence[int],
    samples: Sequence[int],
    *,
    new_tokens: int,
    dtype: torch.dtype,
) -> Sharing:
    """Count for a decoder-only model, whose config may not be countable (a ValueError).

    Without contexts, up to three lengths that the model takes. The model is on the meta device, or the reason why it
    could not be built.
    """
    sizes = KVSizes.from_config(config)
    alike = sizes.alike
    can_share, reason = _can_share(model)
    limit = max_positions(config)
    rows = []
    for context in contexts or _default_contexts(limit, new_tokens):
        longest, note = context + new_tokens, None
        if limit is not None and longest > limit:
            note = (
                f"{longest} tokens are more than max_position_embeddings, {limit}: longer than the model was made for"
            )
        for count in samples:
            halfway = new_tokens // 2
            elements = None if alike is None else memory_io(alike.kv_heads, alike.head_dim, count, context, halfway)
            rows.append(
                Measurement(
                    context=context,
                    samples=count,
                    kv_bytes=sizes.kv_bytes(count, context, new_tokens, dtype.itemsize),
                    step_elements=elements,
                    step_bytes=sizes.step_bytes(count, context, halfway, dtype.itemsize),
                    stock_reason=reason
                    if can_share is False
                    else _stock_reason(config, sizes, context, new_tokens, count),
                    note=note,
                )
            )
    return Sharing(
        sizes=sizes,
        bytes_per_token=sizes.bytes_per_token(dtype.itemsize),
        max_positions=limit,
        new_tokens=new_tokens,
        can_share=can_share,
        reason=reason,
        rows=rows,
    )


def _can_share(model: PreTrainedModel | str) -> tuple[bool | None, str]:
    """Whether the model can share, and why not, by a forward pass on the meta device."""
    if isinstance(model, str):
        return None, model
    with enabled(model):
        try:
            prefill(model, torch.zeros(1, _PROBE, dtype=torch.long))
        except Exception as error:  # operators that need values, after the checks of the model, masks and layers
            if isinstance(error.__cause__, Unsupported):
                return False, str(error.__cause__)
    return True, ""


def _default_contexts(limit: int | None, new_tokens: int) -> Sequence[int]:
    if limit is None:
        return _CONTEXTS[:_SHOWN]
    return [context for context in _CONTEXTS if context + new_tokens <= limit][-_SHOWN:] or [
        max(1, limit - new_tokens)
    ]


def _stock_reason(config: Any, sizes: KVSizes, context: int, new_tokens: int, samples: int) -> str | None:
    """Why a call of this size runs stock although the model can share, or None."""
    longest = context + new_tokens
    rope = rope_limit(config.get_text_config(decoder=True))
    least = Options().fewest_saved
    if rope is not None and longest > rope:
        return f"its position embedding changes beyond {rope} tokens"
    if sizes.chunked and sizes.window is not None and longest > sizes.window:
        return f"chunks of {sizes.window} tokens are shorter than {longest}"
    if (saved := context * (samples - 1)) < least:
        return f"sharing would save {saved} tokens, fewer than {least}"
    return None


_UNLIMITED: Final = 512  # tokens, where a config sets no bound


@dataclass(frozen=True)
class ContextCaches:
    context: int  # tokens of the row
    encoder_tokens: int | None  # of the encoder's output; None for decoder-only models
    sizes: list[CacheSize]  # keys and values first

    def speedup(self, size: CacheSize, rows: int) -> float | None:
        """Reads per token of keys and values, divided by those of another cache; None when unknown."""
        ordinary, other = self.sizes[0].reads(rows), size.reads(rows)
        return None if ordinary is None or other is None else ordinary / other

    def to_json(self, batches: Sequence[int]) -> dict[str, Any]:
        kv = self.sizes[0].stored
        plain: dict[str, Any] = {"context": self.context}
        if self.encoder_tokens is not None:
            plain["encoder_tokens"] = self.encoder_tokens
        plain["sizes"] = [
            {
                "cache": size.name,
                "bytes": size.stored,
                "of_kv": round(size.stored / kv, 4),
                "bytes_read": size.read,
                "matrix_bytes": size.matrices,
                "per_token": [self._per_token(size, rows) for rows in batches],
            }
            for size in self.sizes
        ]
        return plain

    def _per_token(self, size: CacheSize, rows: int) -> dict[str, Any]:
        reads, speedup = size.reads(rows), self.speedup(size, rows)
        return {
            "batch": rows,
            "bytes_read": None if reads is None else round(reads),
            "speedup_at_most": None if speedup is None else round(speedup, 4),
        }


@dataclass(frozen=True)
class ModelReport:
    model: str
    model_type: str
    dtype: str
    sharing: Sharing | None  # None for encoder-decoders and slim checkpoints
    refused: str | None  # why `convert-checkpoint` refuses the model
    caches: list[ContextCaches]  # for each context
    slim_layers: list[LayerCache] | None = None  # what each layer of a slim checkpoint caches

    def to_json(self, batches: Sequence[int]) -> dict[str, Any]:
        fields = {"model": self.model, "model_type": self.model_type, "dtype": self.dtype}
        sharing = {} if self.sharing is None else self.sharing.to_json()
        caches = [one.to_json(batches) for one in self.caches]
        slim: dict[str, Any] = {"slim_refused": self.refused}
        if self.slim_layers is not None:
            slim["slim_layers"] = [
                {
                    "plan": one.layer.plan,
                    "rank": one.layer.rank,
                    "dtype": dtype_name(one.dtype),
                    "bytes_per_token": one.bytes_per_token,
                }
                for one in self.slim_layers
            ]
        return {**fields, **sharing, **slim, "caches": caches}


def inspect_model(
    name: str, config: Any, contexts: Sequence[int], samples: Sequence[int], *, new_tokens: int, dtype: str
) -> ModelReport:
    """Count for the config of a model of this name; raises an InputError if the config cannot be counted.

    Without contexts, lengths that the model takes. An encoder's tokens are the most that the config allows, else the
    context. The dtype ``auto`` is what the config says, else float32.
    """
    element, slim = _dtype(config, dtype), is_slim(config)
    ordinary = ordinary_config(config) if slim else config
    try:
        model: PreTrainedModel | str = empty_model(ordinary)
    except Exception as error:  # whatever the model's code raises
        model = f"the model could not be built from its config: {one_line(error)}"
    matrices = None if isinstance(model, str) else decoder_matrices(model)
    sharing = None
    caches = []
    try:
        if not config.is_encoder_decoder and not slim:
            sharing = count_sharing(config, model, contexts, samples, new_tokens=new_tokens, dtype=element)
        for context in contexts or [_longest(config)]:
            if config.is_encoder_decoder:
                encoded = getattr(config, "max_source_positions", None) or context
                sizes = encoder_decoder_caches(ordinary, context, encoded, element, matrices)
            else:
                encoded, sizes = None, decoder_caches(ordinary, context, element, matrices)
            if slim:  # in the place of the slim caches that the ordinary model could have
                sizes = [sizes[0], *checkpoint_caches(config, context, encoded, element, sizes[0]), sizes[-1]]
            caches.append(ContextCaches(context, encoded, sizes))
    except ValueError as error:
        raise InputError(f"cannot count the KV of {name}: {error}") from error
    layers = layer_caches(config, element) if slim else None
    refused = None if slim else refusal(config)
    return ModelReport(name, config.model_type, dtype_name(element), sharing, refused, caches, layers)


def _dtype(config: Any, name: str) -> torch.dtype:
    if name == "auto":
        given = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype or torch.float32
        return given if isinstance(given, torch.dtype) else getattr(torch, str(given))
    return getattr(torch, parse_dtype(name))


def _longest(config: Any) -> int:
    """Most tokens in a row, or 512 where the config sets no bound."""
    text = config.get_text_config(decoder=True)
    named = getattr(text, "max_target_positions", None) or max_positions(config) or getattr(text, "n_positions", None)
    return named or _UNLIMITED


_CAPTION: Final = (
    "Bytes are of one row. Reads, per token: a row's cache once, and its share of the weight matrices. At most: the "
    "speed-up if reads took all the time."
)
_BOUNDS: Final = (
    "These are bounds from sizes: `convert-checkpoint --dry-run` measures which caches a model's layers can have."
)
_SLIM: Final = (
    "Slim models come near their speed-up on a GPU with `hf_fastdecode.enable` only; in transformers' loop they "
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
    """The caches of a slim checkpoint's layers; neighbours that cache the same in one line."""
    table = Table(title=Text(f"{report.model}: what its layers cache", style="bold"), title_justify="left")
    table.add_column("layers")
    table.add_column("cache")
    table.add_column("in")
    table.add_column("bytes per token", justify="right")
    encoded = report.caches[0].encoder_tokens is not None
    for kind, of_kind in (("self", layers[::2]), ("cross", layers[1::2])) if encoded else (("", layers),):
        for same, run in groupby(enumerate(of_kind), key=lambda item: item[1]):
            indices = [index for index, _ in run]
            name = f"{indices[0]} to {indices[-1]}" if len(indices) > 1 else str(indices[0])
            size = f"{same.bytes_per_token:,}"
            dtype = "-" if same.layer.plan == "e" else short_dtype(dtype_name(same.dtype))
            table.add_row(f"{kind} {name}".lstrip(), cache_name(same.layer.to_dict()), dtype, size)
    return table


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


def sharing_text(report: ModelReport, found: Sharing) -> RenderableType:
    latent = {store.kind is Kind.LATENT for store in found.sizes.stores}
    stored = "K and V" if latent == {False} else "latents" if latent == {True} else "K and V, or latents"
    window = f"{found.sizes.local_layers} of the layers attend to {found.sizes.window or 0:,} tokens only"
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("model", f"{report.model} ({report.model_type})"),
        *_attention_facts(found),
        *([("window", window)] if found.sizes.window is not None else []),
        ("KV per token", f"{found.bytes_per_token:,} bytes ({report.dtype}, {stored}, all layers)"),
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
    kinds = Counter(
        store if store.kind is Kind.LATENT else replace(store, kind=Kind.FULL, window=None)
        for store in found.sizes.stores
    )
    for shape, layers in kinds.items():
        if shape.kind is Kind.LATENT:
            yield (
                "attention",
                f"latent: {layers} layers, h = {shape.query_heads} query heads over {shape.head_dim} elements of a "
                f"token, {shape.value_dim} of them its latent",
            )
            continue
        yield (
            "attention",
            f"{shape.attention}: {layers} layers, h = {shape.query_heads} query heads, g = {shape.kv_heads} KV heads, "
            f"p = h/g = {shape.group_size}, d = {shape.head_dim} elements per head",
        )


def _pair(pair: StockShared, mark: str) -> tuple[Text, Text, Text]:
    if mark:
        return Text(bytes_text(pair.stock)), Text("stock"), Text(mark)
    return Text(bytes_text(pair.stock)), Text(bytes_text(pair.shared)), Text(f"{pair.ratio:.1f}x")
