"""View of a shared-context cache for captured decode steps: tables, and no lengths that change between replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ..attention.kv import Scoring, Segment
from ..attention.launch.step_tables import NewTokens, StepTables, TablesByShape
from ..attention.partial import Partial, unwritten_partial
from ..attention.placeholders import SharedKV
from ..errors import Unsupported
from .layers.attention import SharedContextLayer, require_dtype
from .layers.cross import EncodedInputs
from .layers.expanded import CapturedExpandedKV, ExpandedTables
from .layers.of_model import CacheLayer
from .layers.state import LayerOfOwnStates, StateLayer, States
from .shared import SharedContextCache
from .storage import TokenStorage


class CapturedCache(Cache):
    """Replaces a `SharedContextCache` while a decode step is captured.

    It holds no keys or values, but for suffixes that are captured in place.

    Args:
        tables: Addresses and lengths of the batch's keys and values.
        cache: The cache, whose layers' storage decides what is kept of a token.
        origins: ``[rows, capacity]`` int32: when given, the storage row of each token of each suffix, see
            `SuffixOrigins`; of suffixes that are not captured in place.
        cross: The same of the inputs that cross-attention reads, if there are any.
        expanded: The same of nodes with latents that are read as keys and values, if there are any.
        states: Where layers with states have them, as many rows' as the step has.

    Attributes:
        new: Where the step's tokens are, made by `begin` where suffixes are captured in place.
        has_nodes: Whether rows have nodes at the time of the capture.
        is_divided: Whether processes divide nodes and suffixes.
        capacity: Tokens that each suffix captured in place has room for; 0 without any.
        constants: From `constant`, which a captured graph reads: kept as long as the graph.
    """

    new: NewTokens

    def __init__(
        self,
        tables: TablesByShape,
        cache: SharedContextCache,
        origins: Tensor | None = None,
        states: Sequence[StatesOfACapture] = (),
        cross: TablesByShape | None = None,
        expanded: ExpandedTables | None = None,
    ):
        of_states = iter(states)
        layers = [
            _captured_layer(
                tables,
                layer,
                origins,
                next(of_states) if isinstance(layer, StateLayer) else None,
                expanded,
            )
            for layer in cache.layers
        ]
        super().__init__(layers=layers)
        in_place = [one for one in layers if isinstance(one, InPlaceLayer)]
        self.has_nodes, self.position_planes = bool(cache.forest.nodes), cache.position_planes
        self.capacity = max((one.capacity for one in in_place), default=0)
        self.constants: dict[str, Any] = {}
        self.inputs = None if cross is None or cache.inputs is None else CapturedInputs(self, cache.inputs, cross)
        self.next_slot: Tensor | None = None  # of decoders that count positions by it: [1] int64, on the device
        self._tables = in_place[0].tables if in_place else None  # lengths are the same for all of them
        self._parallel, self._shard = cache.state.parallel, cache.state.suffix_shard
        self.is_divided = self._parallel is not None

    def begin(self) -> None:
        """Begin a pass: read the suffixes' lengths on the device, once for all layers."""
        if self._tables is not None:
            self.new = self._tables.new_tokens()

    def positions_of_slots(self) -> Tensor:
        """Positions in a suffix of the tokens that its slots here hold: ``[capacity]`` int64, on the CPU."""
        return self._shard.positions(self.capacity)

    def constant(self, name: str, make: Callable[[], Any]) -> Any:
        """Tensors that do not change between steps, made in the first pass, which is not captured."""
        if name not in self.constants:
            self.constants[name] = make()
        return self.constants[name]

    def suffix(self, layer: int, dtype: torch.dtype) -> Segment:
        """Suffixes that are captured in place, ``[rows, 1, capacity, width]`` each.

        Raises ValueError if the cache holds another dtype.
        """
        suffix = self._in_place(layer).suffix
        require_dtype(dtype, suffix)
        return suffix

    def append_in_place(self, layer: int, new: Segment) -> Segment:
        """Write a token of each row, parts ``[rows, 1, 1, width]``, to suffixes that are captured in place.

        Returns the suffixes, ``[rows, 1, capacity, width]`` each; row ``i`` holds ``new.lengths[i]`` tokens. Raises
        ValueError if the cache holds another dtype.
        """
        suffix = self.suffix(layer, new.keys.dtype)
        slots = self.new.slots
        rows = self.constant("rows", lambda: torch.arange(len(slots), device=slots.device))
        for stored, part in zip(suffix, new, strict=True):
            stored[:, 0].index_put_((rows, slots), part[:, 0, 0])
        return suffix

    def attend_nodes(self, layer: int, query: Tensor, scale: float) -> Partial:
        """Attend to the nodes of a layer whose suffixes are captured in place, see `StepTables.attend_nodes`."""
        found = self._in_place(layer)
        require_dtype(query.dtype, found.storage.node_example)
        return found.tables.attend_nodes(layer, query, scale)

    def of_all_processes(self, part: Partial) -> Partial:
        """Attention to all keys, of the partial over those stored here: one collective where they are divided."""
        return part if self._parallel is None else self._parallel.merge(part)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return super().update(*args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """0, as `LayerOfACapture`, also where the first layers, or all, keep no keys.

        For decoders that count positions by it, the tokens before the step: a tensor, which replays do not bake in.
        """
        return 0 if self.next_slot is None else self.next_slot

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def _in_place(self, layer: int) -> InPlaceLayer:
        found = self.layers[layer]
        assert isinstance(found, InPlaceLayer)
        return found


class CapturedInputs:
    """Replaces `EncodedInputs` while a decode step is captured: cross-attention reads tables.

    Attributes:
        arguments: Model arguments of the step; the encoder's output is a placeholder, as no layer projects it again.
        view: The cache as decoders take it.
        tokens: Tokens of an input, of which there is a placeholder.
        layers: The layers that hold keys and values of inputs.
    """

    tokens = 1

    def __init__(self, cache: CapturedCache, inputs: EncodedInputs, tables: TablesByShape):
        kv_heads = {layer: inputs.example(layer).keys.shape[0] for layer in inputs.segments}

        def attend(layer: int, query: Tensor, scoring: Scoring) -> Tensor:
            options: dict[str, Any] = {"kv_heads": kv_heads[layer], "soft_cap": scoring.softcap}
            part = tables.of(layer).attend_nodes(layer, query, scoring.scale, **options)
            return part.out.to(query.dtype).transpose(1, 2)

        self.arguments, self.layers = inputs.placeholders, inputs.layers
        self.view = inputs.view_of(cache, self, attend)

    def store(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Refuse: a captured step comes after the pass that stored what inputs have."""
        raise Unsupported(f"layer {layer} projects the encoder's output again")


class LayerOfACapture(CacheLayerMixin):
    """A layer whose storage and lengths are known to the capture alone.

    Positions are passed as tensors: lengths read here would be constants in the graph.
    """

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: who captures allocates the storage."""

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class _CapturedLayer(LayerOfACapture):
    def __init__(
        self,
        tables: StepTables,
        index: int,
        storage: TokenStorage,
        window: int | None,
        origins: Tensor | None = None,
    ):
        super().__init__()
        self.tables, self.index, self.storage, self.is_initialized = tables, index, storage, True
        self.expanded: CapturedExpandedKV | None = None
        self.stored_window, self.origins = window, origins

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[SharedKV, SharedKV]:
        parts = self.storage.parts_of(key_states, value_states, *args, **kwargs)
        handle = _CapturedKV(self, self.storage.read_by_kernels(parts))
        return handle, handle


class InPlaceLayer(_CapturedLayer):
    """A layer whose suffixes are captured in place, in the batch's own storage, by `CapturedCache.append_in_place`."""

    def __init__(self, tables: StepTables, index: int, storage: TokenStorage, window: int | None):
        super().__init__(tables, index, storage, window)
        assert storage.suffix is not None
        self.suffix, self.capacity = storage.suffix, storage.capacity


def storages_in_place(cache: SharedContextCache) -> tuple[object, ...]:
    """Versions of the storages of layers whose suffixes are captured in place."""
    return tuple(layer.storage.version for layer in cache.attention_layers if layer.storage.captured_in_place)


class StatesOfACapture(LayerOfOwnStates):
    """A layer whose states are always there, for any prompt, and are updated in place."""

    is_compileable = False

    def __init__(self, states: States):
        numbers = 1 + max((*states.conv, *states.recurrent))
        LinearAttentionLayer.__init__(self, number_of_states=numbers)
        self.conv_states.update(states.conv)
        self.recurrent_states.update(states.recurrent)
        for number, one in states.conv.items():
            self.is_conv_states_initialized[number] = True
            self.conv_kernel_size[number] = one.shape[-1]
            self.dtype, self.device = one.dtype, one.device
        for number in states.recurrent:
            self.is_recurrent_states_initialized[number] = True
        self.has_previous_state = dict.fromkeys(range(numbers), True)


class _CapturedLayerWithStates(_CapturedLayer, StatesOfACapture):
    """A layer that stores states beside keys and values."""

    def __init__(self, layer: _CapturedLayer, states: StatesOfACapture):
        self.__dict__.update({**vars(states), **vars(layer)})


def _captured_layer(
    tables: TablesByShape,
    layer: CacheLayer,
    origins: Tensor | None,
    states: StatesOfACapture | None,
    expanded: ExpandedTables | None,
) -> _CapturedLayer | StatesOfACapture | CacheLayer:
    if not isinstance(layer, SharedContextLayer):
        return layer if states is None else states
    index, storage, window = layer.index, layer.storage, layer.store.window
    if storage.captured_in_place:
        return InPlaceLayer(tables.of(index), index, storage, window)
    captured = _CapturedLayer(tables.of(index), index, storage.empty(), window, origins)
    captured.expanded = None if expanded is None else expanded.layer(index)
    return captured if states is None else _CapturedLayerWithStates(captured, states)


class _CapturedKV(SharedKV):
    def __init__(self, layer: _CapturedLayer, new: Segment):
        self.layer, self.new, self.stored_window = layer, new, layer.stored_window
        self.device, self.reads_latents = new.keys.device, layer.storage.holds_latents
        self.expanded = layer.expanded

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        layer = self.layer
        return layer.tables.attend(layer.index, query, *self.new, scoring, layer.origins).transpose(1, 2)

    def attend_as_stored(self, query: Tensor, scoring: Scoring) -> Partial:
        layer, into = self.layer, unwritten_partial(query, self.new.keys.shape[-1])
        layer.tables.attend(layer.index, query, *self.new, scoring, layer.origins, into=into)
        return into


class CapturedStates:
    """States that captured steps update: buffers at fixed addresses, which hold the rows of one batch at a time.

    A graph reads and writes states where they were at its capture. All captures of a model use the first rows of the
    same buffers. A batch is loaded once, when its first step is replayed: its states are copied to the buffers, and
    its layers keep views of these, so that steps of any kind and compaction find them there. What another batch still
    holds in the buffers is copied out first.

    Args:
        rows: Most rows of a batch.
        cache: A batch whose layers' states, or those at the ends of its prompts, tell shapes and dtypes.

    Raises:
        Unsupported: A layer of the cache has no state yet.
    """

    def __init__(self, rows: int, cache: SharedContextCache):
        self.rows = rows
        self._shapes = _shapes(cache)
        with torch.inference_mode(False):
            self._buffers = [
                example.each(lambda one: one.new_zeros(rows, *one.shape[1:])) for example in _examples(cache)
            ]
        self._held: list[tuple[ref[StateLayer], States]] = []

    def serve(self, rows: int, cache: SharedContextCache) -> bool:
        """Whether they have room for so many rows with states such as this cache's."""
        return rows <= self.rows and _shapes(cache) == self._shapes

    def layer(self, number: int, rows: int) -> StatesOfACapture:
        """What a captured pass over `rows` rows has in the place of the layer with states of this number."""
        return StatesOfACapture(self._buffers[number].each(lambda one: one[:rows]))

    def load(self, cache: SharedContextCache, step_rows: int) -> None:
        """Let the buffers hold the states of this batch, which may be forked only now, for a step of so many rows."""
        layers = cache.state_layers
        if self._hold(layers):
            return
        self.release()
        for layer, buffers in zip(layers, self._buffers, strict=True):
            cache.fork_states([layer])
            states = layer.states
            if states is None:
                raise Unsupported("rows have no states yet, which a captured step could continue")
            rows = states.rows
            views = buffers.each(lambda one, rows=rows: one[:rows])  # type: ignore[misc]
            for buffer, one in zip(buffers.tensors, states.tensors, strict=True):
                buffer[:rows].copy_(one)
                buffer[rows:step_rows].zero_()  # of no row: finite numbers
            layer.place(views)
            self._held.append((ref(layer), views))

    def release(self) -> None:
        """Copy states that a batch still holds here to memory of its own, before a capture or another batch."""
        for known, views in self._held:
            if (layer := known()) is not None and _are(layer, views):
                with torch.inference_mode(False):
                    layer.place(views.each(Tensor.clone))
        self._held = []

    def _hold(self, layers: Sequence[StateLayer]) -> bool:
        held = self._held
        return len(held) == len(layers) and all(
            known() is layer and _are(layer, views) for layer, (known, views) in zip(layers, held, strict=True)
        )


def _examples(cache: SharedContextCache) -> list[States]:
    """A row's states of each layer, of any row."""
    found = [layer.states or next(iter(layer.ends.values()), None) for layer in cache.state_layers]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        raise Unsupported("rows have no states yet, which a captured step could continue")
    return known


def _shapes(cache: SharedContextCache) -> list[list[tuple[torch.Size, torch.dtype, torch.device]]]:
    return [[(one.shape[1:], one.dtype, one.device) for one in states.tensors] for states in _examples(cache)]


def _are(layer: StateLayer, views: States) -> bool:
    """Whether a layer's states are these very tensors."""
    states = layer.states
    if states is None:
        return False
    return all(one is other for one, other in zip(states.tensors, views.tensors, strict=True))
