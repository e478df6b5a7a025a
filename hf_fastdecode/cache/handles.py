"""Handles that cache layers return from ``update`` in place of key and value tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.forest import Forest
from ..attention.interface import SharedKV
from ..attention.kv import ForestKV, Segment
from ..attention.launch import kernel_tables
from ..attention.launch.dispatch import KERNELS, Choice, Heads
from ..attention.launch.own_nodes import may_have_own_nodes, own_tokens, with_own_segments
from ..attention.scoring import Scoring
from ..attention.torch_operators import torch_ops
from ..attention.torch_operators.operators import cannot_run
from ..attention.torch_operators.prefill_ops import Run, causal_attention
from ..kernels.failures import KernelFailedError
from .state import SharedState
from .storage import TokenStorage


class StoredLayer:
    """One cache layer as seen by attention.

    Args:
        state: State shared by all layers of the cache.
        storage: The layer's token storage.

    Attributes:
        node_table: Addresses of the nodes for the kernels; None until they run. See `forget_addresses`.
        suffix_table: Addresses of the suffixes for the kernels; likewise.
        window: Window of the last pass, where it hid any token.
        report_suffix: Report suffix of the last pass, naming features beyond causal attention.
        ran: For reports: phase -> operators that computed it.
    """

    def __init__(self, state: SharedState, storage: TokenStorage):
        self.state, self.storage = state, storage
        self.node_table: kernel_tables.NodeTable | None = None
        self.suffix_table: kernel_tables.SuffixTable | None = None
        self.window: int | None = None
        self.report_suffix = ""
        self.ran: dict[str, str] = {}
        self._moves = storage.moves

    def forget_addresses(self) -> None:
        """Drop the address tables when storage has moved."""
        if self._moves != self.storage.moves:
            self.node_table = self.suffix_table = None
            self._moves = self.storage.moves

    def forest_kv(self, length: int) -> ForestKV:
        """Keys and values for PyTorch's operators; suffixes are copied if rows were reordered.

        Args:
            length: Tokens in each row's suffix.

        Raises:
            ValueError: The layer holds no suffix yet.
        """
        suffix = self.storage.keys_and_values(self.storage.ordered_suffix(self.state.origins))
        return ForestKV(self.forest, self.segments, suffix, length)

    @property
    def forest(self) -> Forest:
        """The forest of nodes.

        Raises:
            ValueError: The number of rows is not yet known.
        """
        if self.state.forest is None:
            raise ValueError("this cache layer holds no suffix yet; run a forward pass with the cache first")
        return self.state.forest

    @property
    def segments(self) -> dict[int, Segment]:
        """Keys and values of the nodes."""
        return {number: self.storage.keys_and_values(parts) for number, parts in self.storage.segments.items()}


class DecodeKV(SharedKV):
    """Decode-step handle: writes new tokens to each suffix, and attends over each row's path and suffix.

    Args:
        layer: The layer, with capacity for the new tokens.
        parts: The new tokens' storage parts.
    """

    def __init__(self, layer: StoredLayer, parts: Segment):
        self.layer, self.parts, self.before = layer, parts, layer.state.suffix_length
        self.keys, self.values = layer.storage.keys_and_values(parts)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        self.layer.window, self.layer.report_suffix = scoring.window, scoring.report_suffix
        while self._by_kernels(query, scoring):
            try:
                return self._run_kernels(query, scoring).transpose(1, 2)
            except KernelFailedError:  # the failed kernel is no longer a candidate
                continue
        return self._run_pytorch(query, scoring).transpose(1, 2)

    def append(self) -> ForestKV:
        """Write the new tokens and return all keys and values for PyTorch's operators."""
        self.layer.storage.append(self.parts, self.before)
        return self.layer.forest_kv(self.before + self.keys.shape[2])

    @property
    def _suffix(self) -> Segment:
        storage = self.layer.storage
        assert storage.suffix is not None  # allocated in update()
        return storage.keys_and_values(storage.suffix)

    def _run_kernels(self, query: Tensor, scoring: Scoring) -> Tensor:
        self.layer.forget_addresses()
        tables, own = self.layer.state.tables, self._own_tokens(query, scoring)
        forest, origins = tables.forest_with(self.layer.forest, own), self.layer.state.origins
        if self.layer.node_table is None or self.layer.node_table.forest is not forest:
            segments = with_own_segments(self.layer.segments, self._suffix) if own else self.layer.segments
            self.layer.node_table = kernel_tables.NodeTable(forest, segments, query.device)
            nodes, rows = len(self.layer.forest.nodes), self.layer.forest.rows
            did = f"{nodes} node(s) and {rows} suffixes by triton{scoring.report_suffix}"
            self.layer.ran["decode"] = did + self._why(query, scoring)
        if self.layer.suffix_table is None or self.layer.suffix_table.first != own:
            self.layer.suffix_table = kernel_tables.SuffixTable(self._suffix, own)
        return tables.attend(
            query,
            self.keys,
            self.values,
            self.layer.node_table,
            self.layer.suffix_table,
            self.before,
            scoring,
            None if origins is None else origins.table(query.device),
        )

    def _own_tokens(self, query: Tensor, scoring: Scoring) -> int:
        """Number of leading suffix tokens to attend to as a node per row."""
        if scoring.window is not None or self.layer.state.origins is not None:
            return 0
        kv_heads, group = self.keys.shape[1], query.shape[1] // self.keys.shape[1]
        few = may_have_own_nodes(self.layer.forest.rows, kv_heads, group, query.device)
        return own_tokens(self.before) if few else 0

    def _run_pytorch(self, query: Tensor, scoring: Scoring) -> Tensor:
        kv = self.append()
        backend = self.layer.state.torch_backend
        if "decode" not in self.layer.ran or self.layer.node_table is not None:
            self.layer.node_table = None  # the kernels ran before
            did = torch_ops.describe(query, kv, softcap=scoring.softcap, backend=backend)
            self.layer.ran["decode"] = did + scoring.report_suffix + self._why(query, scoring)
        out, _ = torch_ops.forest_attention(
            query,
            kv,
            scoring.scale,
            softcap=scoring.softcap,
            window=scoring.window,
            sinks=scoring.sinks,
            backend=backend,
        )
        return out.to(query.dtype)

    def _by_kernels(self, query: Tensor, scoring: Scoring) -> bool:
        backend = self.layer.state.backend
        if backend != "triton" and not self._chooses(query):
            return False
        reason = self._refusal(query, scoring)
        if backend == "triton" and reason is not None:
            raise cannot_run(backend, reason)
        if reason is not None or backend == "triton":
            return reason is None
        return self._choice(query, scoring.window).name == KERNELS

    def _refusal(self, query: Tensor, scoring: Scoring) -> str | None:
        stored = [part for segment in (self._suffix, *self.layer.segments.values()) for part in segment]
        return kernel_tables.refusal(query, self.keys, self.values, stored, scoring.sinks)

    def _chooses(self, query: Tensor) -> bool:
        return self.layer.state.backend == "auto" and query.device.type == "cuda"

    def _why(self, query: Tensor, scoring: Scoring) -> str:
        """Report text: why the kernels were ruled out, or else the cost model's prediction."""
        if not self._chooses(query):
            return ""
        return f"; {self._refusal(query, scoring) or self._choice(query, scoring.window)}"

    def _choice(self, query: Tensor, window: int | None) -> Choice:
        _, heads, queries, head_dim = query.shape
        layout = Heads(heads, self.keys.shape[1], head_dim, queries, query.element_size(), window)
        return self.layer.state.tables.choice(self.layer.forest, layout, query.device)


class PrefillKV(SharedKV):
    """Prefill handle: packed runs of tokens, each causal over itself and its own context.

    Args:
        layer: The layer, with the tokens already stored.
        parts: Their storage parts, each ``[heads, tokens, width]``.
    """

    def __init__(self, layer: StoredLayer, parts: Segment):
        self.layer = layer
        self.keys, self.values = layer.storage.keys_and_values(parts)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        self.layer.window, self.layer.report_suffix = scoring.window, scoring.report_suffix
        state, segments = self.layer.state, self.layer.segments

        def stored(span: Any) -> Segment:
            return segments[span.segment].view(span)

        out = causal_attention(
            query[0],
            self.keys,
            self.values,
            scoring.scale,
            runs=[Run(item.span.length, item.context) for item in state.packed],
            stored=stored,
            softcap=scoring.softcap,
            window=scoring.window,
            sinks=scoring.sinks,
            backend=state.torch_backend,
        )
        did = "each node once, causal attention by PyTorch, merged with its context"
        self.layer.ran["prefill"] = did + scoring.report_suffix
        return out.transpose(0, 1).unsqueeze(0)
