"""Handles that cache layers return from ``update`` in place of key and value tensors, for steps and for prefill.

They attend as the pass in progress says (`state.Pass`), which an eager pass finds as it goes and a captured one knows
before.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ..attention.forest import Forest, Span
from ..attention.kv import (
    ExpandedKV,
    ForestKV,
    Partial,
    Scoring,
    Segment,
    SharedKV,
    SuffixLengths,
    merge,
    unwritten_partial,
)
from ..attention.launch.kernel_call import kernel_attention
from ..attention.launch.plan import NO_OWN_NODES, HeadShape, choose_own_nodes
from ..attention.launch.step_tables import RestTables, StepTables
from ..attention.torch_operators import decode_ops
from ..attention.torch_operators.decode_ops import biased_causal_attention, nodes_attention
from ..attention.torch_operators.operators import cannot_run
from ..attention.torch_operators.prefill_ops import causal_attention
from ..errors import Unsupported
from ..kernels.forest_decode.limits import refusal
from .layers.latent import ExpandedLayer, Widths, as_wide
from .state import Pass, SharedState
from .storage import TokenStorage
from .stores import Kind, Store

_CHOOSES_ON = frozenset({"cuda"})
"""Types of devices on which ``backend="auto"`` runs the kernels where these support a layer."""


class StoredLayer:
    """One cache layer as seen by attention; base of `SharedContextLayer`.

    Attributes:
        window: Window of the last pass, where it hid any token.
        report_note: What the last pass had beyond causal attention, for reports.
        ran: For reports: phase -> operators that computed it.
        ran_for: The forest and operators that ``ran["decode"]`` describes.
    """

    def __init__(self, state: SharedState, index: int, store: Store, storage: TokenStorage):
        self.state, self.index, self.store, self.storage = state, index, store, storage
        self.window: int | None = None
        self.report_note = ""
        self.ran: dict[str, str] = {}
        self.ran_for: tuple[Forest, str] | None = None

    @property
    def forest(self) -> Forest:
        """The forest of nodes; raises ValueError while the number of rows is not known."""
        if self.state.forest is None:
            raise ValueError("this cache layer holds no suffix yet; run a forward pass with the cache first")
        return self.state.forest

    @property
    def segments(self) -> dict[int, Segment]:
        """Nodes as the kernels read them."""
        return {number: self.storage.read_by_kernels(parts) for number, parts in self.storage.segments.items()}

    @property
    def suffix(self) -> Segment | None:
        """Suffixes by storage row; None where they are stored in a layout of their own."""
        if self.storage.captured_in_place:
            return None
        assert self.storage.suffix is not None  # allocated in update() or reserve()
        return self.storage.read_by_kernels(self.storage.suffix)

    @property
    def version(self) -> object:
        return self.storage.version

    @property
    def stock_bytes_per_token(self) -> int:
        """Bytes of a token in transformers' cache; 0 while the layer holds none."""
        stored, store = self.storage.suffix_bytes_per_token, self.store
        return stored * store.stock_numbers // store.numbers if store.stock_numbers else stored

    def attend_nodes(self, query: Tensor, scale: float) -> Partial:
        """Attention ``[rows, heads, queries, head_dim]`` to the nodes here, at least one, in fp32."""
        nodes, forest = self.storage.nodes_for_steps(), self.state.step_forest
        assert forest is not None
        return nodes_attention(query, forest, nodes, scale, backend=self.state.torch_backend)

    def note(self, scoring: Scoring) -> None:
        self.window, self.report_note = scoring.window, scoring.report_note

    def report(self, phase: str, did: str, why: str = "") -> None:
        """Record the operators that computed a phase, and why they were chosen."""
        read = ""
        if phase == "decode" and self.store.kind is Kind.LATENT:
            read = ", as latents"
            if (expanded := self.expanded) is not None:
                size = f"{expanded.nodes.nbytes / 1e6:.3g} MB"
                read += f"; {len(expanded.forest.nodes)} node(s) as keys and values made once ({size})"
        self.ran[phase] = did + read + self.report_note + why

    @property
    def expanded(self) -> EagerNodes | None:
        """Nodes with latents that eager steps read as keys and values; None if there are none."""
        expanded, forest = self.state.expanded, self.state.expanded_forest
        if expanded is None or forest is None:
            return None
        return EagerNodes(self.state, forest, expanded.layers[self.index])


@dataclass(frozen=True)
class EagerNodes:
    """The expanded nodes of a layer in an eager step, of which there is at least one."""

    state: SharedState
    forest: Forest
    nodes: ExpandedLayer

    def tables(self, index: int, query: Tensor) -> StepTables | None:
        """Tables by which kernels find them; None where PyTorch's operators compute."""
        state, forest, nodes, device = self.state, self.forest, self.nodes, query.device
        if state.backend != "triton" and not (state.backend == "auto" and device.type in _CHOOSES_ON):
            return None
        stored = [part for segment in nodes.segments.values() for part in segment]
        taken = nodes.widths.as_kernels_take(query)
        keys = taken[..., : nodes.widths.stored]
        if refusal(taken, keys, keys, stored) is not None:
            return None

        def make() -> StepTables:
            return RestTables(nodes.shape.rest, forest.rows, [index], forest, device, NO_OWN_NODES)

        tables = state.tables_for(device, nodes.shape, forest, make, dominate=False)
        tables.follow(forest, SuffixLengths(), {index: nodes})
        return tables


@dataclass(frozen=True)
class ExpandedOfStep(ExpandedKV):
    """The expanded nodes of a layer: `tables` find them in a captured step, `eager` has them in an eager one."""

    index: int
    widths: Widths
    tables: StepTables | None = None
    eager: EagerNodes | None = None

    def attend(self, query: Tensor, scoring: Scoring, own: Partial) -> Tensor:
        if (eager := self.eager) is None:
            assert self.tables is not None
            return self._by_kernels(self.tables, query, scoring, own)
        if (tables := eager.tables(self.index, query)) is not None:
            with suppress(Unsupported):  # a kernel failed
                return self._by_kernels(tables, query, scoring, own)
        options: dict[str, Any] = {"softcap": scoring.softcap, "backend": eager.state.torch_backend}
        part = nodes_attention(query, eager.forest, eager.nodes.whole, scoring.scale, **options)
        return merge(Partial(own.out.to(part.out.dtype), own.lse), part).out.to(query.dtype)

    def _by_kernels(self, tables: StepTables, query: Tensor, scoring: Scoring, own: Partial) -> Tensor:
        widths = self.widths
        other = Partial(as_wide(own.out, widths.stored).contiguous(), own.lse)
        taken = widths.as_kernels_take(query)
        out, _ = tables.attend_nodes(self.index, taken, scoring.scale, soft_cap=scoring.softcap, other=other)
        return out[..., : widths.value]


class DecodeKV(SharedKV):
    """Decode-step handle: writes new tokens to each suffix, and attends over each row's path and suffix."""

    def __init__(self, layer: StoredLayer, parts: Segment, step: Pass):
        self.layer, self.parts, self.step = layer, parts, step
        self.stored_window, self.device = layer.store.window, parts.keys.device
        backend = layer.state.backend
        chooses = backend == "auto" and self.device.type in _CHOOSES_ON
        self._may_run_kernels = chooses or backend == "triton" or step.tables is not None
        if layer.store.kind is Kind.LATENT:
            self.reads_latents = True
            if step.expanded is not None:
                self.expanded = step.expanded.get(layer.index)
            elif (nodes := layer.expanded) is not None:
                self.expanded = ExpandedOfStep(layer.index, nodes.nodes.widths, eager=nodes)

    @cached_property
    def keys(self) -> Tensor:
        """The new keys, ``[rows, kv_heads, tokens, head_dim]``, as kernels read them."""
        return self.layer.storage.read_by_kernels(self.parts).keys

    @cached_property
    def values(self) -> Tensor:
        return self.layer.storage.read_by_kernels(self.parts).values

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        layer = self.layer
        if self.step.tables is None and (layer.ran_for is None or layer.window != scoring.window):
            layer.note(scoring)
        if self._may_run_kernels and (out := self._run_kernels(query, scoring)) is not None:
            return out.transpose(1, 2)
        return self._run_pytorch(query, scoring).out.to(query.dtype).transpose(1, 2)

    def attend_as_stored(self, query: Tensor, scoring: Scoring) -> Partial:
        self.layer.note(scoring)
        if self._may_run_kernels:
            into = unwritten_partial(query, self.keys.shape[-1])
            if self._run_kernels(query, scoring, into) is not None:
                return into
        out, lse = self._run_pytorch(query, scoring)
        return Partial(out.to(query.dtype), lse)

    def append(self) -> ForestKV:
        """Write the new tokens; returns all that is stored here for PyTorch's operators, reordered rows copied."""
        storage, step = self.layer.storage, self.step
        assert step.before is not None
        assert step.stored is not None
        storage.append(self.parts, step.before, step.division.suffix_shard)
        nodes, suffix = storage.for_steps(self.layer.state.suffixes.origins)
        return ForestKV(step.stored, nodes, suffix, step.lengths, step.seen)

    def _run_kernels(self, query: Tensor, scoring: Scoring, into: Partial | None = None) -> Tensor | None:
        """Append and attend by kernels; None where PyTorch's operators are to do it, in an eager step alone."""
        layer, step = self.layer, self.step
        if step.tables is not None:
            tables = step.tables.of(layer.index)
            return tables.attend(layer.index, query, self.keys, self.values, scoring, step.origins, into=into)
        step.division.check_window(scoring.window)
        while self._by_kernels(query, scoring):
            with suppress(Unsupported):  # a kernel failed
                tables, origins = self._tables(query, scoring), layer.state.suffixes.origins
                table = None if origins is None else origins.table(query.device)
                return tables.attend(layer.index, query, self.keys, self.values, scoring, table, into=into)
        return None

    def _tables(self, query: Tensor, scoring: Scoring) -> StepTables:
        """Tables that describe the step, for layers like this one on the query's device."""
        layer, state, forest, device = self.layer, self.layer.state, self.step.stored, query.device
        assert forest is not None
        shape, dominate = HeadShape.of(query[:, :, :1], self.keys, scoring), state.own_nodes_dominate

        def make() -> StepTables:
            own_nodes = choose_own_nodes(forest.rows, shape, device, dominate=dominate)
            return state.division.tables(forest.rows, [layer.index], forest, device, own_nodes)

        tables, suffixes = state.tables_for(device, shape, forest, make, dominate=dominate), state.suffixes
        tables.follow(forest, suffixes.lengths, {layer.index: layer}, in_order=suffixes.in_order)
        if self._is_new("triton"):
            did = f"{len(forest.nodes)} node(s) and {layer.forest.rows} suffixes by triton"
            layer.report("decode", did, self._why(query, scoring))
        return tables

    def _run_pytorch(self, query: Tensor, scoring: Scoring) -> Partial:
        layer, division, backend = self.layer, self.step.division, self.step.torch_backend
        if scoring.window is not None:
            division.check_window(scoring.window)
        kv = self.append()
        known = layer.ran_for
        if (known is None or known[0] is not self.step.forest or known[1] != "pytorch") and self._is_new("pytorch"):
            did = "products over each node and the suffixes"
            if scoring.distances is None:
                did = decode_ops.describe(query, kv, softcap=scoring.softcap, backend=backend)
            layer.report("decode", did, self._why(query, scoring))
        sinks = scoring.sinks
        if sinks is not None and not division.suffix_shard.counts_sinks:
            sinks = None
        options: dict[str, Any] = {"softcap": scoring.softcap, "window": scoring.window, "sinks": sinks}
        options |= {"distances": scoring.distances}
        return division.merge(decode_ops.forest_attention(query, kv, scoring.scale, **options, backend=backend))

    def _is_new(self, by: str) -> bool:
        """Whether the report on this layer is not yet about these operators over this forest."""
        known, forest = self.layer.ran_for, self.step.forest
        assert forest is not None
        self.layer.ran_for = forest, by
        return known is None or known[0] is not forest or known[1] != by

    def _by_kernels(self, query: Tensor, scoring: Scoring) -> bool:
        """Whether an eager step runs the kernels, where it may; raises `BackendError` if forced ones cannot run."""
        backend, reason = self.layer.state.backend, self._refusal(query, scoring)
        if backend == "triton" and reason is not None:
            raise cannot_run(backend, reason)
        return reason is None

    def _refusal(self, query: Tensor, scoring: Scoring) -> str | None:
        stored = [part for segment in (self.layer.suffix or (), *self.layer.segments.values()) for part in segment]
        return refusal(query, self.keys, self.values, stored, scoring.sinks)

    def _why(self, query: Tensor, scoring: Scoring) -> str:
        """Report text: why the kernels were ruled out, if they were."""
        if self.layer.state.backend != "auto" or query.device.type not in _CHOOSES_ON:
            return ""
        reason = self._refusal(query, scoring)
        return f"; {reason}" if reason else ""


class PrefillKV(SharedKV):
    """Prefill handle: runs of tokens, each causal over itself and its own context, that storage already holds.

    `parts` are tokens that this process computes, `whole` all tokens of the pass: the same unless processes divide it.
    """

    def __init__(self, layer: StoredLayer, parts: Segment, whole: Segment):
        own = layer.storage.keys_and_values(parts)
        self.layer, self.whole = layer, own if whole is parts else layer.storage.keys_and_values(whole)
        self.keys, self.values = own
        self.stored_window, self.device = layer.store.window, self.keys.device

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        self.layer.note(scoring)
        current = self.layer.state.current
        if current.padded is not None:
            return current.padded.attend(self.layer.index, Segment(self.keys, self.values), query, scoring)
        positions = current.positions
        count, width = query.shape[0], query.shape[2]
        if positions is not None:
            query = packed(query, positions)
        out = self._attend(query[0], scoring, current).transpose(0, 1)
        if positions is None:
            return out.unsqueeze(0)
        spread = out.new_zeros(count * width, *out.shape[1:])  # padding attends to nothing
        return spread.index_copy_(0, positions, out).unflatten(0, (count, width))

    def _attend(self, query: Tensor, scoring: Scoring, current: Pass) -> Tensor:
        """Attention of packed tokens ``[heads, tokens, head_dim]``, in the query's dtype."""
        state, runs, by = self.layer.state, current.runs, "triton"
        assert runs is not None  # inside `prefilling`
        state.division.check_window(scoring.window)
        contexts = state.division.reads(self._stored, self._gathered, self.whole, runs, current.contexts)
        out = None
        if scoring.distances is None and current.torch_backend == "auto" and contexts.in_any_order:
            out = kernel_attention(query, self.keys, self.values, scoring, runs, contexts.read)
        if out is None:
            by, own = "PyTorch", (query, self.keys, self.values, scoring.scale)
            if scoring.distances is not None:
                out = biased_causal_attention(*own, scoring.distances, runs=runs.runs)
            else:
                options: dict[str, Any] = {"softcap": scoring.softcap, "window": scoring.window}
                options |= {"sinks": scoring.sinks, "backend": current.torch_backend}
                out = causal_attention(*own, runs=runs, stored=contexts.read, **options)
        contexts.finish()
        whose = "each node once"
        if state.suffix_rows:
            nodes = self.layer.storage.segments
            whose = f"{whose}, then each row's own tokens" if nodes else "each row's own tokens"
        self.layer.report("prefill", f"{whose}, causal attention by {by}, merged with its context")
        return out

    def _stored(self, span: Span) -> Segment:
        """Keys and values of a context that this process stores."""
        storage, state = self.layer.storage, self.layer.state
        if (row := state.suffix_rows.get(span.segment)) is not None:
            first = self.layer.forest.context_lengths[row]
            return storage.suffix_as_node(row, span, first, self.keys.dtype)
        return storage.keys_and_values(storage.segments[span.segment].view(span))

    def _gathered(self, span: Span) -> Segment:
        """Keys and values of a context that is divided between processes."""
        storage, state = self.layer.storage, self.layer.state
        stored = storage.keys_and_values(storage.segments[span.segment])
        return state.division.whole(stored, span, state.segment_runs)


def packed(part: Tensor, positions: Tensor) -> Tensor:
    """The tokens of ``[rows, heads, width, d]`` at positions counted row by row: ``[1, heads, tokens, d]``."""
    return part.transpose(1, 2).flatten(0, 1).index_select(0, positions).transpose(0, 1).unsqueeze(0)
