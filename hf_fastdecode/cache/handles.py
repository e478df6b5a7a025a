"""Handles that cache layers return from ``update`` in place of key and value tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor

from ..attention.forest import Forest, Span
from ..attention.kv import ForestKV, Scoring, Segment
from ..attention.launch.dispatch import KERNELS, Choice, Heads
from ..attention.launch.kernel_call import kernel_attention
from ..attention.launch.plan import HeadShape, choose_own_nodes
from ..attention.launch.step_tables import StepTables
from ..attention.partial import Partial, unwritten_partial
from ..attention.placeholders import SharedKV
from ..attention.torch_operators import decode_ops
from ..attention.torch_operators.decode_ops import biased_causal_attention, biased_forest_attention, nodes_attention
from ..attention.torch_operators.operators import cannot_run
from ..attention.torch_operators.prefill_ops import causal_attention
from ..errors import Unsupported
from ..kernels.forest_decode.limits import refusal
from ..parallel.sequence import window_is_not_divided
from ..parallel.shards import WHOLE, GatheredContexts, InPass
from .layers.expanded import EagerExpandedKV
from .state import MadeTables, Pass, SharedState
from .storage import TokenStorage
from .stores import Store


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
    def step_forest(self) -> Forest:
        """The part of the forest that steps read as this process stores it, see `SharedState.step_forest`."""
        stored = self.state.step_forest
        return self.forest if stored is None else stored

    @property
    def segments(self) -> dict[int, Segment]:
        """What is stored of the nodes, as the kernels read it."""
        return {number: self.storage.read_by_kernels(parts) for number, parts in self.storage.segments.items()}

    @property
    def suffix(self) -> Segment | None:
        """What is stored of the suffixes, by storage row; None where they are stored in a layout of their own."""
        if self.storage.captured_in_place:
            return None
        assert self.storage.suffix is not None  # allocated in update() or reserve()
        return self.storage.read_by_kernels(self.storage.suffix)

    @property
    def version(self) -> object:
        """Another object whenever storage has moved."""
        return self.storage.version

    @property
    def expanded(self) -> EagerExpandedKV | None:
        """Nodes with latents that steps read as keys and values; None if there are none."""
        expanded, forest = self.state.expanded, self.state.expanded_forest
        if expanded is None or forest is None:
            return None
        return EagerExpandedKV(self.state, self.index, forest, expanded.layers[self.index])

    def attend_nodes(self, query: Tensor, scale: float) -> Partial:
        """Attention ``[rows, heads, queries, head_dim]`` to the nodes stored here, of which there must be any.

        By PyTorch's operators, in fp32.
        """
        nodes = self.storage.nodes_for_steps()
        return nodes_attention(query, self.step_forest, nodes, scale, backend=self.state.torch_backend)

    def of_all_processes(self, part: Partial) -> Partial:
        """Attention to all keys, of the partial over those stored here: one collective where they are divided."""
        parallel = self.state.parallel
        return part if parallel is None else parallel.merge(part)

    def note(self, scoring: Scoring) -> None:
        """Remember the score options of the current pass."""
        self.window, self.report_note = scoring.window, scoring.report_note

    def report(self, phase: str, did: str, why: str = "") -> None:
        """Record the operators that computed a phase, and why they were chosen."""
        read = ""
        if phase == "decode" and self.storage.holds_latents:
            read = ", as latents"
            if (expanded := self.expanded) is not None:
                size = f"{expanded.nodes.nbytes / 1e6:.3g} MB"
                read += f"; {len(expanded.forest.nodes)} node(s) as keys and values made once ({size})"
        self.ran[phase] = did + read + self.report_note + why


class DecodeKV(SharedKV):
    """Decode-step handle: writes new tokens to each suffix, and attends over each row's path and suffix."""

    def __init__(self, layer: StoredLayer, parts: Segment, step: Pass):
        self.layer, self.parts, self.step = layer, parts, step
        self.stored_window, self.device = layer.store.window, parts.keys.device
        if layer.storage.holds_latents:
            self.reads_latents, self.expanded = True, layer.expanded

    @cached_property
    def keys(self) -> Tensor:
        """The new keys, ``[rows, kv_heads, tokens, head_dim]``, as kernels read them."""
        return self.layer.storage.read_by_kernels(self.parts).keys

    @cached_property
    def values(self) -> Tensor:
        """The new values, as `keys`."""
        return self.layer.storage.read_by_kernels(self.parts).values

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        layer = self.layer
        if layer.ran_for is None or layer.window != scoring.window:
            layer.note(scoring)
        if layer.state.parallel is not None and scoring.window is not None:
            raise window_is_not_divided(scoring.window)
        while self._by_kernels(query, scoring):
            try:
                return self._run_kernels(query, scoring).transpose(1, 2)
            except Unsupported:  # a kernel failed, and is no longer a candidate
                continue
        return self._run_pytorch(query, scoring).out.to(query.dtype).transpose(1, 2)

    def attend_as_stored(self, query: Tensor, scoring: Scoring) -> Partial:
        self.layer.note(scoring)
        while self._by_kernels(query, scoring):
            into = unwritten_partial(query, self.keys.shape[-1])
            try:
                self._run_kernels(query, scoring, into)
            except Unsupported:
                continue
            return into
        out, lse = self._run_pytorch(query, scoring)
        return Partial(out.to(query.dtype), lse)

    def append(self) -> ForestKV:
        """Write the new tokens and return all keys and values for PyTorch's operators; reordered rows are copied.

        Where processes divide them, those that this one stores.
        """
        layer, step = self.layer, self.step
        state, storage = layer.state, layer.storage
        assert step.before is not None
        assert step.stored is not None
        storage.append(self.parts, step.before, WHOLE if state.parallel is None else state.suffix_shard)
        suffix = storage.suffix_for_steps(state.suffixes.origins)
        return ForestKV(step.stored, storage.nodes_for_steps(), suffix, step.lengths, step.seen)

    def _run_kernels(self, query: Tensor, scoring: Scoring, into: Partial | None = None) -> Tensor:
        layer, suffixes = self.layer, self.layer.state.suffixes
        tables, origins = self._tables(query, scoring), suffixes.origins
        tables.follow(layer.step_forest, suffixes.lengths, {layer.index: layer}, in_order=suffixes.in_order)
        if self._is_new("triton"):
            nodes, rows = len(layer.step_forest.nodes), layer.forest.rows
            layer.report("decode", f"{nodes} node(s) and {rows} suffixes by triton", self._why(query, scoring))
        table = None if origins is None else origins.table(query.device)
        return tables.attend(layer.index, query, self.keys, self.values, scoring, table, into=into)

    def _tables(self, query: Tensor, scoring: Scoring) -> StepTables:
        """The tables of layers like this one on the query's device, made anew when they no longer suit the batch."""
        state, forest, device = self.layer.state, self.layer.step_forest, query.device
        shape, dominate = HeadShape.of(query[:, :, :1], self.keys, scoring), state.own_nodes_dominate
        known = state.tables.get((device, shape))
        same = known is not None and (known.tables.rows, known.dominate) == (forest.rows, dominate)
        if known is not None and same and known.tables.fits(forest):
            return known.tables
        own_nodes = choose_own_nodes(forest.rows, shape, device, dominate=dominate)
        tables = state.make_tables(forest.rows, [self.layer.index], forest, device, own_nodes)
        state.tables[device, shape] = MadeTables(tables, dominate)
        return tables

    def _run_pytorch(self, query: Tensor, scoring: Scoring) -> Partial:
        kv, state = self.append(), self.layer.state
        backend = state.torch_backend
        if self._is_new("pytorch"):
            did = "products over each node and the suffixes"
            if scoring.distances is None:
                did = decode_ops.describe(query, kv, softcap=scoring.softcap, backend=backend)
            self.layer.report("decode", did, self._why(query, scoring))
        sinks = scoring.sinks if state.parallel is None or state.suffix_shard.counts_sinks else None
        scores: dict[str, Any] = {"softcap": scoring.softcap, "window": scoring.window, "sinks": sinks}
        if scoring.distances is not None:
            part = biased_forest_attention(query, kv, scoring.scale, scoring.distances)
        else:
            part = decode_ops.forest_attention(query, kv, scoring.scale, **scores, backend=backend)
        return part if state.parallel is None else self.layer.of_all_processes(part)

    def _is_new(self, by: str) -> bool:
        """Whether the report on this layer is not yet about these operators over this forest."""
        known, forest = self.layer.ran_for, self.step.forest
        assert forest is not None
        self.layer.ran_for = forest, by
        return known is None or known[0] is not forest or known[1] != by

    def _by_kernels(self, query: Tensor, scoring: Scoring) -> bool:
        backend = self.layer.state.backend
        if backend != "triton" and not self._chooses(query):
            return False
        reason = self._refusal(query, scoring)
        if backend == "triton" and reason is not None:
            raise cannot_run(backend, reason)
        if reason is not None or backend == "triton" or self.reads_latents:  # PyTorch has no fused operator for them
            return reason is None
        return self._choice(query, scoring.window).name == KERNELS

    def _refusal(self, query: Tensor, scoring: Scoring) -> str | None:
        stored = [part for segment in (self.layer.suffix or (), *self.layer.segments.values()) for part in segment]
        return refusal(query, self.keys, self.values, stored, scoring.sinks)

    def _chooses(self, query: Tensor) -> bool:
        return self.layer.state.backend == "auto" and query.device.type == "cuda"

    def _why(self, query: Tensor, scoring: Scoring) -> str:
        """Report text: why the kernels were ruled out, or else the cost model's prediction."""
        if not self._chooses(query):
            return ""
        if (reason := self._refusal(query, scoring)) is not None or self.reads_latents:
            return f"; {reason}" if reason else ""
        return f"; {self._choice(query, scoring.window)}"

    def _choice(self, query: Tensor, window: int | None) -> Choice:
        _, heads, queries, head_dim = query.shape
        layout = Heads(heads, self.keys.shape[1], head_dim, queries, query.element_size(), window)
        return self.layer.state.choices.of(self.layer.forest, layout, query.device)


class PrefillKV(SharedKV):
    """Prefill handle: runs of tokens, each causal over itself and its own context, that storage already holds.

    Args:
        parts: Tokens that this process computes.
        whole: All tokens of the pass; the same unless processes divide it.
    """

    def __init__(self, layer: StoredLayer, parts: Segment, whole: Segment):
        own = layer.storage.keys_and_values(parts)
        self.layer, self.whole = layer, own if whole is parts else layer.storage.keys_and_values(whole)
        self.keys, self.values = own
        self.stored_window, self.device = layer.store.window, self.keys.device

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        self.layer.note(scoring)
        state, current = self.layer.state, self.layer.state.current
        positions = current.positions
        count, width = query.shape[0], query.shape[2]
        if positions is not None:
            query = packed(query, positions)

        stored: Callable[[Any], Segment] = self._stored
        if (parallel := state.parallel) is not None:
            if scoring.window is not None:
                raise window_is_not_divided(scoring.window)
            gathered = self._gathered()

            def stored(name: Any) -> Segment:
                return self._in_pass(name) if isinstance(name, InPass) else gathered(name)

        assert current.runs is not None  # inside `prefilling`
        out, by = None, "triton"
        # The kernel looks at all contexts first; those that are divided between processes are gathered once each.
        if scoring.distances is not None:
            runs = current.runs.runs
            out = biased_causal_attention(
                query[0], self.keys, self.values, scoring.scale, scoring.distances, runs=runs
            )
            by = "PyTorch"
        elif state.torch_backend == "auto" and (parallel is None or len(current.contexts) <= 1):
            out = kernel_attention(query[0], self.keys, self.values, scoring, current.runs, stored)
        if out is None:
            by = "PyTorch"
            out = causal_attention(
                query[0],
                self.keys,
                self.values,
                scoring.scale,
                runs=current.runs,
                stored=stored,
                softcap=scoring.softcap,
                window=scoring.window,
                sinks=scoring.sinks,
                backend=state.torch_backend,
            )
        if parallel is not None:
            gathered.finish()
        whose = "each node once"
        if state.suffix_rows:
            nodes = self.layer.storage.segments
            whose = f"{whose}, then each row's own tokens" if nodes else "each row's own tokens"
        self.layer.report("prefill", f"{whose}, causal attention by {by}, merged with its context")
        tokens = out.transpose(0, 1)
        if positions is None:
            return tokens.unsqueeze(0)
        spread = tokens.new_zeros(count * width, *tokens.shape[1:])  # padding attends to nothing
        return spread.index_copy_(0, positions, tokens).unflatten(0, (count, width))

    def _stored(self, span: Span) -> Segment:
        """Keys and values of a context that this process stores."""
        storage, state = self.layer.storage, self.layer.state
        if (row := state.suffix_rows.get(span.segment)) is not None:
            first = self.layer.forest.context_lengths[row]
            return storage.suffix_as_node(row, span, first, self.keys.dtype)
        return storage.keys_and_values(storage.segments[span.segment].view(span))

    def _in_pass(self, name: InPass) -> Segment:
        """Keys and values of tokens of the pass that other processes compute."""
        return self.whole.view(Span(0, name.start, name.length))

    def _gathered(self) -> GatheredContexts:
        """Gathers contexts that are divided between processes."""
        storage, state = self.layer.storage, self.layer.state
        current = state.current
        assert current.runs is not None
        read_here = {name for run in current.runs.runs for name in run.context if isinstance(name, Span)}

        def gather(span: Span) -> Segment:
            return state.whole(storage.keys_and_values(storage.segments[span.segment]), span)

        return GatheredContexts(current.contexts, read_here, gather)


def packed(part: Tensor, positions: Tensor) -> Tensor:
    """The tokens of ``[rows, heads, width, d]`` at positions counted row by row: ``[1, heads, tokens, d]``."""
    return part.transpose(1, 2).flatten(0, 1).index_select(0, positions).transpose(0, 1).unsqueeze(0)
