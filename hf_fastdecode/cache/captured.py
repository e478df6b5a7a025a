"""View of a shared-context cache for captured passes, and the kernel tables that captured steps read.

A captured pass is a `Pass` that knows beforehand what layers read and where they append: tables, and no lengths that
change between replays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..attention.forest import Forest
from ..attention.kv import ExpandedKV, Partial, Scoring, Segment, SuffixLengths
from ..attention.launch.plan import NO_OWN_NODES, HeadShape, choose_own_nodes
from ..attention.launch.step_tables import Alike, NewTokens, RestTables, StepTables, StoredKV, TablesByShape
from ..errors import Unsupported
from .handles import ExpandedOfStep
from .layers.attention import CapturedLayer, require_dtype
from .shared import SharedContextCache
from .state import Pass, SharedState


class CapturedCache(Cache):
    """Replaces a `SharedContextCache` while a pass is captured.

    It holds no keys or values, but for suffixes that are captured in place.

    Args:
        cache: The cache, whose layers' storage decides what is kept of a token.
        current: The pass.
        buffers: Layers with what a captured step updates per row, in the order of the cache's layers that have it.

    Attributes:
        next_slot: For decoders that count positions by it, the tokens before the step: ``[1]`` int64, on the device.
        new: Where the step's tokens are, made by `begin` where suffixes are captured in place.
        has_nodes: Whether rows have nodes at the time of the capture.
        division: How processes divide nodes and suffixes.
        capacity: Tokens that each suffix captured in place has room for; 0 without any.
        constants: From `constant`, which a captured graph reads: kept as long as the graph.
    """

    new: NewTokens

    def __init__(self, cache: SharedContextCache, current: Pass, buffers: Iterable[Any] = ()):
        state, left = SharedState(current=current), iter(buffers)
        super().__init__(layers=[layer.captured(state, left) for layer in cache.layers])
        in_place = [layer for layer in self.layers if isinstance(layer, CapturedLayer) and layer.in_place is not None]
        self.position_planes, self.has_nodes = cache.position_planes, bool(cache.forest.nodes)
        self.capacity = max((layer.storage.capacity for layer in in_place), default=0)
        self.constants: dict[str, Any] = {}
        self.inputs: CapturedInputs | None = None
        self.next_slot: Tensor | None = None
        self._tables, self.division = current.tables, cache.state.division
        self._first_in_place = in_place[0].index if in_place else None  # lengths are the same for all of them

    def begin(self) -> None:
        """Begin a step: read the suffixes' lengths on the device, once for all layers."""
        if self._first_in_place is not None:
            self.new = self._tables_of(self._first_in_place).new_tokens()

    def constant(self, name: str, make: Callable[[], Any]) -> Any:
        """Tensors that do not change between steps, made in the first pass, which is not captured."""
        if name not in self.constants:
            self.constants[name] = make()
        return self.constants[name]

    def suffix(self, layer: int, dtype: torch.dtype) -> Segment:
        """Suffixes captured in place, ``[rows, 1, capacity, width]`` each; ValueError if of another dtype."""
        suffix: Segment = self.layers[layer].in_place
        require_dtype(dtype, suffix)
        return suffix

    def append_in_place(self, layer: int, new: Segment) -> Segment:
        """Write a token of each row, parts ``[rows, 1, 1, width]``, to suffixes that are captured in place.

        Returns the suffixes as `suffix`; row ``i`` holds ``new.lengths[i]`` tokens.
        """
        suffix = self.suffix(layer, new.keys.dtype)
        slots = self.new.slots
        rows = self.constant("rows", lambda: torch.arange(len(slots), device=slots.device))
        for stored, part in zip(suffix, new, strict=True):
            stored[:, 0].index_put_((rows, slots), part[:, 0, 0])
        return suffix

    def attend_nodes(self, layer: int, query: Tensor, scale: float) -> Partial:
        """Attend to the nodes of a layer whose suffixes are captured in place, see `StepTables.attend_nodes`."""
        require_dtype(query.dtype, self.layers[layer].storage.node_example)
        return self._tables_of(layer).attend_nodes(layer, query, scale)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return super().update(*args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """0, or `next_slot`, a tensor, which replays do not bake in; also where no layer keeps keys."""
        return 0 if self.next_slot is None else self.next_slot

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def _tables_of(self, layer: int) -> StepTables:
        assert self._tables is not None
        return self._tables.of(layer)


class CapturedInputs:
    """Replaces `EncodedInputs` while a pass is captured: cross-attention reads tables, or buffers.

    The encoder's output among `arguments` is a placeholder of one token, as no layer projects it again.
    """

    tokens = 1

    def __init__(self, view: CapturedCache, cache: SharedContextCache, tables: TablesByShape):
        inputs = cache.inputs
        assert inputs is not None
        kv_heads = {layer: inputs.example(layer).keys.shape[0] for layer in inputs.segments}

        def attend(layer: int, query: Tensor, scoring: Scoring) -> Tensor:
            options: dict[str, Any] = {"kv_heads": kv_heads[layer], "soft_cap": scoring.softcap}
            part = tables.of(layer).attend_nodes(layer, query, scoring.scale, **options)
            return part.out.to(query.dtype).transpose(1, 2)

        self.arguments, self.layers = inputs.placeholders, inputs.layers
        self.view = inputs.view_of(view, self, attend)

    def store(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Refuse: a captured step comes after the pass that stored what inputs have."""
        raise Unsupported(f"layer {layer} projects the encoder's output again")


def storages_in_place(cache: SharedContextCache) -> tuple[object, ...]:
    """Versions of the storages of layers whose suffixes are captured in place."""
    return tuple(layer.storage.version for layer in cache.attention_layers if layer.storage.captured_in_place)


class ReadTables(ABC):
    """Kernel tables of a captured step for one sort of keys, by layer; none for a batch without such keys."""

    def __init__(self, rows: int, cache: SharedContextCache, device: torch.device):
        self.rows = rows
        self.tables = TablesByShape(rows, self.alike(cache), self.forest(cache), device, self.make(cache))

    @abstractmethod
    def alike(self, cache: SharedContextCache) -> dict[int, Alike]:
        """By layer, the head shape and own nodes of tables that are made for this batch."""

    @abstractmethod
    def forest(self, cache: SharedContextCache) -> Forest:
        """The nodes that rows of the batch attend to."""

    @abstractmethod
    def stored(self, cache: SharedContextCache) -> Mapping[int, StoredKV]:
        """The batch's keys and values, by layer."""

    def suffixes(self, cache: SharedContextCache) -> SuffixLengths:
        """Tokens in each row's suffix."""
        return SuffixLengths()

    def make(self, cache: SharedContextCache) -> Callable[..., StepTables]:
        """Makes tables; arguments as for `StepTables`."""
        return StepTables

    def suits(self, cache: SharedContextCache) -> bool:
        """Whether a capture for this batch would read such tables."""
        return self.tables.layers == self.alike(cache)

    def fits(self, cache: SharedContextCache) -> bool:
        """Whether the batch's nodes fit the tables."""
        return not self.tables.layers or self.tables.fits(self.forest(cache))

    def follow(self, cache: SharedContextCache) -> None:
        """Describe a batch, for which `fits` holds, to tables of any layers."""
        self.tables.follow(self.forest(cache), self.suffixes(cache), self.stored(cache))


class TokenTables(ReadTables):
    """Tables of a step's nodes and suffixes, for `queries` tokens of each row; suffixes may be `reordered`."""

    def __init__(
        self, rows: int, cache: SharedContextCache, device: torch.device, queries: int = 1, *, reordered: bool = False
    ):
        self._queries, self._reordered, self._division = queries, reordered, cache.state.division
        super().__init__(rows, cache, device)

    def alike(self, cache: SharedContextCache) -> dict[int, Alike]:
        longest, dominate = cache.longest_row(self._queries), cache.state.own_nodes_dominate
        found = dict[int, Alike]()
        for layer in cache.attention_layers:
            shape = layer.store.head_shape(longest)
            chosen = choose_own_nodes(self.rows, shape, layer.device, dominate=dominate)
            # Layers that attend to suffixes by themselves would take own nodes for shared ones.
            without = layer.storage.captured_in_place or self._reordered
            found[layer.index] = Alike(shape, NO_OWN_NODES if without else chosen)
        return found

    def forest(self, cache: SharedContextCache) -> Forest:
        return cache.step_forest

    def suffixes(self, cache: SharedContextCache) -> SuffixLengths:
        return cache.state.suffixes.lengths

    def stored(self, cache: SharedContextCache) -> Mapping[int, StoredKV]:
        return {layer.index: layer for layer in cache.attention_layers}

    def suits(self, cache: SharedContextCache) -> bool:
        return cache.state.division.is_as(self._division) and super().suits(cache)

    def make(self, cache: SharedContextCache) -> Callable[..., StepTables]:
        return cache.state.division.tables


class InputTables(ReadTables):
    """Tables of the inputs that cross-attention reads."""

    def alike(self, cache: SharedContextCache) -> dict[int, Alike]:
        if (inputs := cache.inputs) is None:
            return {}
        found = dict[int, Alike]()
        heads = {layer.index: layer.store.query_heads for layer in cache.attention_layers}
        for layer in inputs.segments:
            kv_heads, _, head_dim = inputs.example(layer).keys.shape
            query_heads = inputs.query_heads or heads.get(layer, 0)
            group = max(1, query_heads // kv_heads)
            found[layer] = Alike(HeadShape(kv_heads, group, head_dim, False), NO_OWN_NODES)
        return found

    def forest(self, cache: SharedContextCache) -> Forest:
        return Forest(0) if cache.inputs is None else cache.inputs.forest_of(cache.forest)

    def stored(self, cache: SharedContextCache) -> Mapping[int, StoredKV]:
        return {} if cache.inputs is None else cache.inputs.stored()


class ExpandedTables(ReadTables):
    """Tables of the nodes with latents that a step reads as keys and values."""

    def __init__(self, rows: int, cache: SharedContextCache, device: torch.device):
        super().__init__(rows, cache, device)
        nodes = cache.state.expanded
        self.by_layer: dict[int, ExpandedKV] = {
            index: ExpandedOfStep(index, nodes.layers[index].widths, self.tables.of(index))
            for index in self.tables.layers
            if nodes is not None
        }

    def alike(self, cache: SharedContextCache) -> dict[int, Alike]:
        if (nodes := cache.state.expanded) is None or cache.state.expanded_forest is None:
            return {}
        return {index: Alike(layer.shape, NO_OWN_NODES) for index, layer in nodes.layers.items()}

    def forest(self, cache: SharedContextCache) -> Forest:
        return cache.state.expanded_forest or Forest(0)

    def stored(self, cache: SharedContextCache) -> Mapping[int, StoredKV]:
        return {} if cache.state.expanded is None else cache.state.expanded.layers

    def make(self, cache: SharedContextCache) -> Callable[..., StepTables]:
        if (nodes := cache.state.expanded) is None:
            return StepTables
        (rotated,) = {layer.widths.rotated for layer in nodes.layers.values()}
        return partial(RestTables, rotated)

    def fits(self, cache: SharedContextCache) -> bool:
        has_nodes = cache.state.expanded_forest is not None
        return has_nodes is bool(self.by_layer) and super().fits(cache)
