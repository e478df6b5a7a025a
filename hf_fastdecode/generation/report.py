"""Reports of which path a call ran and why, as `hf_fastdecode.explain` returns them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any
from weakref import ref

from ..cache.accounting import CacheBytes, within
from ..cache.layers.attention import SharedContextLayer
from ..cache.layers.state import StateLayer
from ..cache.shared import SharedContextCache
from ..errors import one_line


@dataclass(frozen=True)
class ParallelReport:
    """Report of how processes computed a shared call together.

    Attributes:
        kind: What they divided: ``sequence`` for the context, also where weights were split, or ``tensor`` for weights
            alone, as by tensor parallelism.
        ranks: Number of processes that divided it; `CallReport.ranks` counts all that made the call together.
        stored_tokens: Tokens whose keys and values (of its own heads) this process stores at the end of the call:
            those of nodes, and with divided contexts also those that rows appended.
        tokens: Such tokens in all, each counted once.
        collectives: Communications in each decode step because of divided contexts, beside those of split weights.
    """

    kind: str
    ranks: int
    stored_tokens: int
    tokens: int
    collectives: int

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"weights are split between {self.ranks} processes"
        return (
            f"context is divided between {self.ranks} processes: {self.stored_tokens} of {self.tokens} tokens are "
            f"stored here, {self.collectives} collectives in each step"
        )


@dataclass
class CallReport:
    """Report of one `generate` call.

    Attributes:
        path: ``shared``, ``stock``, or ``failed`` when the call raised.
        reason: Reason for this path, or the error raised.
        rows: Sequences decoded; 0 if the call fell back to stock before its prompts were compared.
        padded_length: Padded length of the prompts.
        forest: Description of the nodes.
        prefilled_tokens: Tokens computed before the decode steps.
        computed_again: Prompts whose last token was computed again, as the first step: all of them were stored before.
        captured_prefill_tokens: How many of the prefilled tokens captured passes computed.
        prefill_reason: Why prefill passes that were to be captured ran eagerly; empty if none did.
        known_tokens: For each prompt, its tokens found in a given or kept cache; None without one.
        kept_bytes: Bytes of keys and values kept for later calls, with ``reuse_prefix``.
        layers: For each layer, the attention operators used.
        context_width: Padded length of the prompts, as far as nodes or `own_tokens` hold them.
        cache: Weak reference to the call's cache.
        own_tokens: Tokens of prompts that are stored in suffixes, because one row alone has them.
        suffix_length: Tokens in each row's suffix, without those of prompts.
        stored_suffix: How many of the suffix's tokens this process stores.
        stored_tokens: Tokens in node storage of this process, including unused ones.
        layer_sizes: For each layer with keys and values, bytes per token of nodes, of suffixes and of transformers'
            cache, and its window if that hides any token.
        state_bytes: Bytes of a row's states in all layers.
        kept_states: Number of prompt ends at which states are kept; rows begin with copies of these.
        mode: How the decode steps ran: ``eager`` or ``graph``.
        mode_reason: Reason for the mode.
        fused: The model's modules that ran as kernels: norms, rotary embeddings, gated activations,
            mixtures of experts and their routers; empty if none did.
        sampler: Sampling code used: ``hf`` or ``fast``.
        sampler_reason: Reason for the sampler.
        captures: CUDA graphs captured in this call.
        compactions: Number of times finished rows were compacted away.
        waves: Number of parts of the batch that decoded one after another, by `max_rows` or to fit in memory; 0 if not
            split.
        rows_at_once: Most rows that decoded at once; 0 if all did.
        waves_reason: Why rows that did not fit decoded in waves; empty if they took the places of finished ones.
        refilled: Number of waiting rows that took the places of finished ones.
        ranks: Number of processes that made the call together, as by tensor or sequence parallelism.
        inputs: Distinct inputs of the model's encoder, whose keys and values decoders read; 0 without an encoder.
        input_bytes: Bytes of their keys and values in all layers.
        stock_input_bytes: Bytes of one input's in transformers' cache, which holds them once per row.
        parallel: How several processes computed a shared call; None otherwise.
        gathered: Bytes of whole parameters that were gathered for the call (FSDP, ZeRO-3), and the seconds that
            took; None where none were.
        inner: The reports of the calls that the model's own `generate` made, if it made several, such as Whisper's for
            segments and temperatures; see `of_inner`.
    """

    path: str = "stock"
    reason: str = ""
    rows: int = 0
    padded_length: int = 0
    forest: str = ""
    prefilled_tokens: int = 0
    computed_again: int = 0
    captured_prefill_tokens: int = 0
    prefill_reason: str = ""
    known_tokens: tuple[int, ...] | None = None
    kept_bytes: int = 0
    layers: list[str] = field(default_factory=list)
    context_width: int = 0
    cache: ref[SharedContextCache] | None = field(default=None, repr=False, compare=False)
    own_tokens: int = 0
    suffix_length: int = 0
    stored_suffix: int = 0
    stored_tokens: int = 0
    layer_sizes: list[tuple[int, int, int, int | None]] = field(default_factory=list)
    state_bytes: int = 0
    kept_states: int = 0
    mode: str = "eager"
    mode_reason: str = ""
    fused: str = ""
    sampler: str = "hf"
    sampler_reason: str = ""
    captures: int = 0
    compactions: int = 0
    waves: int = 0
    rows_at_once: int = 0
    waves_reason: str = ""
    refilled: int = 0
    ranks: int = 1
    inputs: int = 0
    input_bytes: int = 0
    stock_input_bytes: int = 0
    parallel: ParallelReport | None = None
    gathered: tuple[int, float] | None = None
    inner: tuple[CallReport, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cache": None}  # weak references cannot be pickled

    def observe(self, cache: SharedContextCache) -> None:
        if not self.layers or self.suffix_length == 0:
            self.layers = [_what_ran(layer) for layer in cache.layers]
            self.layer_sizes = [
                (
                    layer.storage.bytes_per_token,
                    layer.storage.suffix_bytes_per_token,
                    layer.stock_bytes_per_token,
                    layer.window,
                )
                for layer in cache.attention_layers
            ]
            self.state_bytes = sum(layer.row_bytes for layer in cache.state_layers)
            self.kept_states = max((len(layer.ends) for layer in cache.state_layers), default=0)
        self.suffix_length = cache.suffix_length - cache.state.suffixes.longest_prompt
        self.stored_suffix = cache.state.division.suffix_shard.count(self.suffix_length)
        if self.parallel is not None and cache.state.division.is_divided:
            stored = cache.stored_node_tokens + self.rows * self.stored_suffix
            tokens = cache.node_tokens + self.rows * self.suffix_length
            self.parallel = replace(self.parallel, stored_tokens=stored, tokens=tokens)

    def observe_nodes(self, cache: SharedContextCache) -> None:
        """Record the nodes that were prefilled, and how processes divided them."""
        self.forest, self.stored_tokens = repr(cache.forest), cache.stored_node_tokens
        if cache.inputs is not None:
            self.inputs, self.input_bytes = cache.inputs.count, cache.inputs.nbytes
            self.stock_input_bytes = cache.inputs.stock_row_bytes
        if self.ranks > 1:
            kind, ranks, layers = "tensor", self.ranks, 0
            if (division := cache.state.division).is_divided:
                kind, ranks, layers = "sequence", division.ranks, len(cache.attention_layers)
            self.parallel = ParallelReport(kind, ranks, cache.stored_node_tokens, cache.node_tokens, layers)

    def fail(self, error: BaseException) -> None:
        self.path, self.reason = "failed", type(error).__name__
        with suppress(Exception):  # a failing __str__ must not mask the error
            self.reason += f": {error}" if str(error) else ""

    @property
    def nbytes(self) -> CacheBytes:
        """Bytes of keys, values and states at the end of the call, here and in a stock cache."""
        of_nodes = sum(size for size, *_ in self.layer_sizes)
        of_suffixes = sum(size for _, size, *_ in self.layer_sizes)
        in_suffixes = self.rows * self.stored_suffix + self.own_tokens
        stored = self.stored_tokens * of_nodes + in_suffixes * of_suffixes
        stored += (self.rows + self.kept_states) * self.state_bytes + self.input_bytes
        length = self.context_width + self.suffix_length
        stock = self.rows * sum(size * within(length, window) for *_, size, window in self.layer_sizes)
        stock += self.rows * (self.state_bytes + self.stock_input_bytes)
        return CacheBytes(stored=stored, allocated=stored, stock=stock)

    @classmethod
    def of_inner(cls, inner: Sequence[CallReport]) -> CallReport:
        """The report of a call whose model's own `generate` made several calls of transformers'.

        All fields but `path`, `reason` and `inner` are those of the inner call that shared with most rows, or of the
        last one if none did.
        """
        shared = [one for one in inner if one.path == "shared"]
        main = max(shared, key=lambda one: one.rows, default=inner[-1])
        reason = f"{len(shared)} of its {len(inner)} inner calls share, the one with most rows as below"
        if not shared:
            reason = f"none of its {len(inner)} inner calls shares; the last: {main.reason}"
        if inner[-1].path == "failed":
            return replace(main, path="failed", reason=inner[-1].reason, inner=tuple(inner))
        return replace(main, reason=reason, inner=tuple(inner))

    def lines(self) -> list[str]:
        lines = [f"last generate call: {self.path} ({self.reason})", *_inner_lines(self.inner)]
        nbytes, seconds = self.gathered or (0, 0.0)
        if nbytes:  # else there is nothing to gather, or a user has done so
            lines.append(f"  parameters gathered: {nbytes:,} bytes in {seconds:.3f} s")
        if self.path != "shared":
            return lines
        stored, _, stock = self.nbytes
        return [
            *lines,
            f"  {self.forest}",
            f"  tokens prefilled: {self.prefilled_tokens} (stock: {self.rows * self.padded_length})",
            *_prefill(self),
            f"  {'KV and state' if self.state_bytes else 'KV'} bytes: {stored:,} (stock: {stock:,})",
            *([f"  of these, for encoder inputs ({self.inputs}): {self.input_bytes:,}"] if self.inputs else []),
            *([f"  KV bytes kept for later calls: {self.kept_bytes:,}"] if self.kept_bytes else []),
            f"  steps: {self.mode} ({self.mode_reason})",
            *([f"  {self.parallel}"] if self.parallel else []),
            *([f"  as kernels: {self.fused}"] if self.fused else []),
            f"  sampler: {self.sampler} ({self.sampler_reason})",
            *_events(self),
            *_layer_lines(self.layers),
        ]


@dataclass
class ForwardReport:
    """Report of one forward pass of the model, or of its decoder, without a cache.

    Attributes:
        path: ``shared``, ``stock``, or ``failed`` when the pass raised.
        reason: Reason for this path, or the error raised.
        rows: Rows given; 0 if the pass fell back to stock before they were compared.
        tokens: Real tokens given in all rows, without padding.
        computed: Distinct tokens, which ran through the layers, or would have.
        kept: Further tokens whose keys, values and hidden states an earlier pass computed (`reuse_prefix`), or
            whose hidden states alone (``log_probs="trainer"``).
        replayed: Real tokens whose routing was replayed (`replay_routing`).
    """

    path: str = "stock"
    reason: str = ""
    rows: int = 0
    tokens: int = 0
    computed: int = 0
    kept: int = 0
    replayed: int = 0

    def fail(self, error: BaseException) -> None:
        self.path, self.reason = "failed", one_line(error)

    def __str__(self) -> str:
        replayed = f"; routing of {self.replayed} tokens replayed" if self.replayed else ""
        text = f"last forward pass without a cache: {self.path} ({self.reason}{replayed})"
        if self.path != "shared":
            return text
        kept = f", {self.kept} kept from earlier passes" if self.kept else ""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{text}: {self.computed} tokens computed for {self.tokens} in {rows}{kept}"


@dataclass(frozen=True, repr=False)
class Report:
    """Report of a model, returned by `hf_fastdecode.explain`; ``str(report)`` is readable text of 80 columns.

    A Python prompt and a notebook show that text.

    Attributes:
        model: Class name of the model.
        enabled: Whether `enable` is in effect.
        layer_count: Number of decoder layers; None if the config has none.
        model_reason: Why `generate` of this model can never share context, or None.
        last_call: The last `generate` call since `enable`, or None.
        generates: Whether the model has a `generate`; of others, `model_reason` says that they have none.
        last_forward: The last forward pass without a cache since `enable`; None before the first, and where none is
            seen, as of compiled models.
    """

    model: str
    enabled: bool
    layer_count: int | None
    model_reason: str | None
    last_call: CallReport | None
    generates: bool = True
    last_forward: ForwardReport | None = None

    def __str__(self) -> str:
        if not self.enabled:
            return f"{self.model}: not enabled; call hf_fastdecode.enable(model)"
        able = "stock decoding" if self.model_reason else "shared-context KV"
        why = f" ({self.model_reason})" if self.model_reason else ""
        if not self.generates:
            able, why = f"{self.model_reason}", ""
        layers = "" if self.layer_count is None else f"{self.layer_count} layers, "
        lines = [f"{self.model}: enabled, {layers}{able}{why}"]
        if self.generates:
            lines += self.last_call.lines() if self.last_call else ["no generate call yet"]
        if self.last_forward or not self.generates:
            lines.append(str(self.last_forward or "no forward pass without a cache yet"))
        return "\n".join(folded for line in lines for folded in _fold(line))

    __repr__ = __str__


def _what_ran(layer: object) -> str:
    ran: list[str] = []
    if isinstance(layer, StateLayer):
        ran.append("a state for each row")
    if isinstance(layer, SharedContextLayer):
        ran += (f"{phase}: {what}" for phase, what in layer.ran.items())
    return "; ".join(ran) or "stores nothing"


_COLUMNS = 80


def _inner_lines(inner: Sequence[CallReport]) -> list[str]:
    lines, first = [], 1
    for (path, reason), run in groupby((one.path, one.reason) for one in inner):
        count = len(list(run))
        numbers = f"call {first}" if count == 1 else f"calls {first}-{first + count - 1}"
        lines.append(f"  inner {numbers}: {path} ({reason})")
        first += count
    return lines


def _prefill(call: CallReport) -> list[str]:
    lines = []
    if call.computed_again:
        lines.append(f"  beside them, the last token of each prompt, again, as the first step: {call.computed_again}")
    if call.own_tokens:
        lines.append(f"  of these, stored with one row alone: {call.own_tokens}")
    if call.captured_prefill_tokens:
        lines.append(f"  of these, by captured passes: {call.captured_prefill_tokens}")
    if call.prefill_reason:
        lines.append(f"  prefill passes cannot be captured: {call.prefill_reason}")
    if call.known_tokens is not None:
        least, most = min(call.known_tokens), max(call.known_tokens)
        each = f"{least}" if least == most else f"{least} to {most}"
        lines.append(f"  tokens of each prompt that were stored before: {each}")
    return lines


def _events(call: CallReport) -> list[str]:
    counts = {
        "CUDA graphs captured": call.captures,
        "compactions of finished rows": call.compactions,
        "waves of rows, one after another": call.waves,
    }
    lines = [f"  {what}: {count}" for what, count in counts.items() if count]
    if call.rows_at_once:
        how = f"in waves: {call.waves_reason}" if call.waves_reason else f"{call.refilled} in places of finished ones"
        lines.append(f"  rows at once: {call.rows_at_once} of {call.rows}, {how}")
    return lines


def _layer_lines(layers: Sequence[str]) -> list[str]:
    """One line for all layers with equal reports, such as ``layers 0-2, 4-6: a state for each row``."""
    runs: dict[str, list[str]] = {}
    first = 0
    for what, run in groupby(layers):
        last = first + len(list(run)) - 1
        runs.setdefault(what, []).append(f"{first}" if first == last else f"{first}-{last}")
        first = last + 1
    return [
        f"  layer{'' if len(which) == 1 and which[0].isdigit() else 's'} {', '.join(which)}: {what}"
        for what, which in runs.items()
    ]


def _fold(line: str) -> list[str]:
    text = line.lstrip(" ")
    indent = line[: len(line) - len(text)]
    wrap = textwrap.TextWrapper(
        _COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
    return wrap.wrap(text) or [""]
