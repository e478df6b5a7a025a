"""What a layer of the cache hands to attention in the place of a pass's keys and values."""

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
    """One layer of a cache, as attention uses it.

    Args:
        state: What all layers of the cache share.
        storage: What is stored of a token, and where.

    Attributes:
        nodes: Addresses of the nodes, once the kernels have run; `forget_addresses` when these lie elsewhere.
        own: Addresses of the suffixes, likewise.
        window: Of the last pass, where it hid anything.
        said: For reports: what of the last pass was not plain causal attention.
        ran: For reports: phase -> what computed it.
    """

    def __init__(self, state: SharedState, storage: TokenStorage):
        self.state, self.storage = state, storage
        self.nodes: kernel_tables.NodeTable | None = None
        self.own: kernel_tables.SuffixTable | None = None
        self.window: int | None = None
        self.said = ""
        self.ran: dict[str, str] = {}
        self._moves = storage.moves

    def forget_addresses(self) -> None:
        """Drop addresses that mean nothing any more, since what they pointed at has moved."""
        if self._moves != self.storage.moves:
            self.nodes = self.own = None
            self._moves = self.storage.moves

    def forest_kv(self, length: int) -> ForestKV:
        """Keys and values as PyTorch's operators take them; suffixes are copied where rows were reordered.

        Args:
            length: Tokens of every row's suffix.

        Raises:
            ValueError: Nothing was stored in this layer yet.
        """
        suffix = self.storage.keys_and_values(self.storage.ordered_suffix(self.state.origins))
        return ForestKV(self.forest, self.segments, suffix, length)

    @property
    def forest(self) -> Forest:
        """The nodes.

        Raises:
            ValueError: The number of rows is not known yet.
        """
        if self.state.forest is None:
            raise ValueError("this cache layer holds no suffix yet; run a forward pass with the cache first")
        return self.state.forest

    @property
    def segments(self) -> dict[int, Segment]:
        """Keys and values of the nodes."""
        return {number: self.storage.keys_and_values(parts) for number, parts in self.storage.segments.items()}


class DecodeKV(SharedKV):
    """A decode step: every row's queries over its path and its suffix, to which their tokens are written.

    Args:
        layer: The layer, with room for the tokens.
        parts: What to store of them.
    """

    def __init__(self, layer: StoredLayer, parts: Segment):
        self.layer, self.parts, self.before = layer, parts, layer.state.suffix_length
        self.keys, self.values = layer.storage.keys_and_values(parts)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        self.layer.window, self.layer.said = scoring.window, scoring.said
        while self._by_kernels(query, scoring):
            try:
                return self._run_kernels(query, scoring).transpose(1, 2)
            except KernelFailedError:  # which leaves one kernel less to choose from
                continue
        return self._run_pytorch(query, scoring).transpose(1, 2)

    def append(self) -> ForestKV:
        """Write the new tokens; keys and values with them, as PyTorch's operators take them."""
        self.layer.storage.append(self.parts, self.before)
        return self.layer.forest_kv(self.before + self.keys.shape[2])

    @property
    def _suffix(self) -> Segment:
        storage = self.layer.storage
        assert storage.suffix is not None  # which got its room before
        return storage.keys_and_values(storage.suffix)

    def _run_kernels(self, query: Tensor, scoring: Scoring) -> Tensor:
        self.layer.forget_addresses()
        tables, own = self.layer.state.tables, self._own_tokens(query, scoring)
        forest, origins = tables.forest_with(self.layer.forest, own), self.layer.state.origins
        if self.layer.nodes is None or self.layer.nodes.forest is not forest:
            segments = with_own_segments(self.layer.segments, self._suffix) if own else self.layer.segments
            self.layer.nodes = kernel_tables.NodeTable(forest, segments, query.device)
            nodes, rows = len(self.layer.forest.nodes), self.layer.forest.rows
            did = f"{nodes} node(s) and {rows} suffixes by triton{scoring.said}"
            self.layer.ran["decode"] = did + self._why(query, scoring)
        if self.layer.own is None or self.layer.own.first != own:
            self.layer.own = kernel_tables.SuffixTable(self._suffix, own)
        return tables.attend(
            query,
            self.keys,
            self.values,
            self.layer.nodes,
            self.layer.own,
            self.before,
            scoring,
            None if origins is None else origins.table(query.device),
        )

    def _own_tokens(self, query: Tensor, scoring: Scoring) -> int:
        """How many leading tokens of every suffix are attended to as a node."""
        if scoring.window is not None or self.layer.state.origins is not None:
            return 0
        kv_heads, group = self.keys.shape[1], query.shape[1] // self.keys.shape[1]
        few = may_have_own_nodes(self.layer.forest.rows, kv_heads, group, query.device)
        return own_tokens(self.before) if few else 0

    def _run_pytorch(self, query: Tensor, scoring: Scoring) -> Tensor:
        kv = self.append()
        backend = self.layer.state.torch_backend
        if "decode" not in self.layer.ran or self.layer.nodes is not None:
            self.layer.nodes = None  # the kernels ran before
            did = torch_ops.describe(query, kv, softcap=scoring.softcap, backend=backend)
            self.layer.ran["decode"] = did + scoring.said + self._why(query, scoring)
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
        """Why the kernels were not free to be chosen, or what the cost model predicted where they were."""
        if not self._chooses(query):
            return ""
        return f"; {self._refusal(query, scoring) or self._choice(query, scoring.window)}"

    def _choice(self, query: Tensor, window: int | None) -> Choice:
        _, heads, queries, head_dim = query.shape
        layout = Heads(heads, self.keys.shape[1], head_dim, queries, query.element_size(), window)
        return self.layer.state.tables.choice(self.layer.forest, layout, query.device)


class PrefillKV(SharedKV):
    """A prefill pass: runs of tokens end to end, each causal over itself and after its own context.

    Args:
        layer: The layer, in which the tokens are stored.
        parts: What was stored of them, each part ``[heads, tokens, width]``.
    """

    def __init__(self, layer: StoredLayer, parts: Segment):
        self.layer = layer
        self.keys, self.values = layer.storage.keys_and_values(parts)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        self.layer.window, self.layer.said = scoring.window, scoring.said
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
        self.layer.ran["prefill"] = did + scoring.said
        return out.transpose(0, 1).unsqueeze(0)
