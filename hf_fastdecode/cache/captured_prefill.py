"""Captured prefill passes: their buffers, attention and inputs, and which passes may be captured.

A pass covers a row of fixed length that ends in padding. Keys and values of all layers of one shape go to one buffer:
after a replay a single copy of its real tokens becomes the storage of a segment in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.forest import Forest, Node, Span, joined
from ..attention.kv import Partial, Scoring, Segment, SuffixLengths
from ..attention.launch.kernel_call import padded_intervals, padded_kernel_attention, takes_windows
from ..attention.launch.plan import NO_OWN_NODES
from ..attention.launch.step_tables import Alike, TablesByShape
from ..attention.torch_operators.decode_ops import attend_alike
from ..attention.torch_operators.prefill_ops import padded_causal_attention, separating_bias
from ..errors import Unsupported
from .captured import CapturedCache, CapturedInputs
from .layers.cross import ENCODER_OUTPUTS, CrossView, EncodedInputs, NodesAlone
from .layout import ModelLayout
from .shared import SharedContextCache
from .state import PrefillItem
from .storage import TokenStorage
from .stores import Store

_LEVELS = 8
"""Levels of nodes that the tables of every captured pass hold, as many as the prefix store keeps unmerged."""


class ContextTables:
    """Tables by which the tokens of a captured pass, with padding, attend to their stored contexts.

    A token is a row of a forest, that of the pass that is captured (`context_forest`).
    """

    def __init__(self, tokens: int, cache: SharedContextCache, forest: Forest, device: torch.device):
        alike = {layer.index: Alike(layer.store.head_shape(0), NO_OWN_NODES) for layer in cache.attention_layers}
        # Launch parameters are chosen for these contexts, and sizes for deeper ones.
        self.by_shape = TablesByShape(tokens, alike, _deepened(forest), device)
        self.follow(cache, forest)

    def follow(self, cache: SharedContextCache, forest: Forest) -> None:
        """Write the addresses and the schedule of a pass's contexts."""
        nodes = {layer.index: NodesAlone(layer.segments, layer.version) for layer in cache.attention_layers}
        self.by_shape.follow(forest, SuffixLengths(), nodes)


def _deepened(forest: Forest) -> Forest:
    """A forest with more levels, whose tables have room for the nodes that later calls append to kept prompts."""
    lowest = forest.levels[-1]
    more = range(len(forest.levels), _LEVELS)
    below = [Node(node.span[:1], node.row_start, node.row_count, depth) for depth in more for node in lowest]
    return Forest(forest.rows, [*forest.nodes, *below])


def context_forest(items: Sequence[PrefillItem], tokens: int) -> Forest:
    """The stored contexts of a pass, with a row per token; padding shares the last item's."""
    starts = [0]
    for item in items:
        starts.append(starts[-1] + item.span.length)
    starts[-1] = tokens
    by_item = Forest.from_paths([item.context for item in items])
    return Forest(
        tokens,
        [
            Node(node.span, starts[node.row_start], starts[node.row_stop] - starts[node.row_start], node.depth)
            for node in by_item.nodes
        ],
    )


def takes_captured_passes(
    cache: SharedContextCache, items: Sequence[PrefillItem], dtype: torch.dtype, device: torch.device, longest: int
) -> bool:
    """Whether all layers store keys and values, or latents, which a pass over these items in this dtype can add to.

    Stored contexts need keys and values of one head_dim, as the kernels that read them do, and windows that hide none
    of the `longest` row's tokens. Without contexts, the prefill kernel computes windows.
    """
    if cache.state.suffix_rows or cache.state.current.positions is not None:
        return False
    contexts = any(item.context for item in items)
    stores = {layer.store for layer in cache.attention_layers}
    outgrown = [store for store in stores if store.window is not None and longest > store.window]
    if not all(not contexts and takes_windows(store.head_dim, store.value_dim, dtype, device) for store in outgrown):
        return False
    for layer in cache.attention_layers:
        held = layer.storage.node_example
        if not layer.storage.takes_padded or (contexts and not layer.storage.kernels_read_contexts):
            return False
        if held is None:
            continue
        if (held.keys.dtype, held.keys.device) != (dtype, device):
            return False
        if contexts and held.keys.shape[-1] != held.values.shape[-1]:
            return False
    return True


class PaddedPass:
    """Buffers and attention of a captured prefill pass over a row of fixed length that ends in padding.

    `runs` is the number of each token's run, ``[tokens]`` int64 on the device, None if there is one run; `tables` are
    those of the tokens' contexts, if any has one.

    Attributes:
        likes: Parts of tokens by layer and number of the part, from the first pass: ``[heads, tokens, width]`` on
            the meta device.
        places: For each part, its buffer and its place there.
        scorings, by: By layer, the score options of the latest pass, and whose operators computed its attention.
    """

    operators: ClassVar[str] = "each node once, causal attention by {}, merged with its context, captured"

    def __init__(self, runs: Tensor | None = None, tables: ContextTables | None = None):
        self.runs, self.tables = runs, tables
        self.likes: dict[tuple[int, int], Tensor] = {}
        self.places: dict[tuple[int, int], tuple[int, int]] = {}
        self.scorings: dict[int, Scoring] = {}
        self.by: dict[int, str] = {}
        self._buffers: list[Tensor] = []
        self._bias: Tensor | None = None
        self._intervals: dict[int | None, Tensor] = {}

    def begin(self) -> None:
        """Begin a pass: allocate its buffers, once the shapes are known from a first pass."""
        self._bias, self._intervals = None, {}
        alike = dict[tuple[torch.Size, torch.dtype], list[tuple[int, int]]]()
        for part, like in self.likes.items():
            alike.setdefault((like.shape, like.dtype), []).append(part)
        self.places = {
            part: (number, place) for number, parts in enumerate(alike.values()) for place, part in enumerate(parts)
        }
        self._buffers = [
            torch.empty(len(parts), *shape, dtype=dtype, device=self.device) for (shape, dtype), parts in alike.items()
        ]

    def take(self) -> list[Tensor]:
        """The buffers of the pass, none of which is kept here."""
        buffers, self._buffers, self._bias, self._intervals = self._buffers, [], None, {}
        return buffers

    def write(self, layer: int, parts: Segment) -> Segment:
        """Write a layer's tokens ``[rows, heads, tokens, width]``, or first note their shapes; returns them."""
        for number, part in enumerate(parts):
            tokens = part.transpose(0, 1).flatten(1, 2)
            if (place := self.places.get((layer, number))) is not None:
                self._buffers[place[0]][place[1]].copy_(tokens)
            else:
                self.device = part.device
                self.likes[layer, number] = torch.empty_like(tokens, device="meta")
        return self._attended(parts)

    def _attended(self, parts: Segment) -> Segment:
        return Segment._make(part[0] for part in parts)

    def attend(self, layer: int, tokens: Segment, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention to the tokens' runs, and to their contexts; arguments as for `SharedKV.attend`."""
        self.scorings[layer], context = scoring, None
        outgrown = None if scoring.window is None else f"rows outgrow the layer's window of {scoring.window} tokens"
        if self.tables is not None:
            if outgrown:
                raise Unsupported(outgrown)
            rows = query.transpose(0, 2)  # [tokens, heads, 1, head_dim]
            options: dict[str, Any] = {"kv_heads": tokens.keys.shape[0], "soft_cap": scoring.softcap}
            part = self.tables.by_shape.of(layer).attend_nodes(layer, rows, scoring.scale, **options)
            context = Partial(part.out[:, :, 0].transpose(0, 1), part.lse[:, :, 0].transpose(0, 1))

        def intervals() -> Tensor:
            window = scoring.window
            if window not in self._intervals:  # made once for all layers of this window
                self._intervals[window] = padded_intervals(query.shape[2], self.runs, window, query.device)
            return self._intervals[window]

        self.by[layer] = "triton"
        out = padded_kernel_attention(query[0], *tokens, scoring, intervals, context)
        if out is None:
            if outgrown:
                raise Unsupported(outgrown)
            self.by[layer] = "PyTorch"
            if self.runs is not None and self._bias is None:  # made once for all layers
                self._bias = separating_bias(self.runs, query.dtype)
            out = padded_causal_attention(query[0], *tokens, scoring, bias=self._bias, context=context)
        return out.transpose(0, 1)[None]

    def store(self, cache: SharedContextCache, buffers: Sequence[Tensor]) -> None:
        """Copy the keys and values of a pass over the cache's current items from the buffers into their spans."""
        state = cache.state
        spans = list(joined(item.span for item in state.current.items))
        length, number = sum(span.length for span in spans), spans[0].segment
        layers = cache.attention_layers
        new = not any(number in layer.storage.segments for layer in layers)
        whole = new and spans == [Span(number, 0, state.segment_lengths[number])]
        with torch.inference_mode(False), torch.no_grad():  # as storage is allocated
            parts = [buffer[:, :, :length] for buffer in buffers]
            if whole:
                parts = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        by_place = [part.unbind() for part in parts]
        for layer in layers:
            places = (self.places[layer.index, part] for part in range(2))
            made = Segment._make(by_place[buffer][place] for buffer, place in places)
            if not layer.is_initialized:
                layer.lazy_initialization(*made)
            if whole:
                layer.storage.segments[number] = made
                continue
            for span in spans:
                layer.storage.segment(span.segment, state.segment_lengths[span.segment], made)
            layer.storage.write_nodes(spans, made)
        for layer in layers:
            layer.note(self.scorings[layer.index])
            layer.report("prefill", self.operators.format(self.by[layer.index]))


class Lease:
    """Held by inputs whose keys and values are in the buffers of a captured pass, and by their copies."""


def takes_captured_rows(cache: SharedContextCache, layout: ModelLayout) -> bool:
    """Whether the next pass stores keys and values alone, of inputs and prompts, and inputs hide no tokens."""
    inputs = cache.inputs
    if type(inputs) is not EncodedInputs or not inputs.stores_next or cache.state_layers or layout.own:
        return False
    arguments = inputs.arguments
    if any(value is not None for name, value in arguments.items() if name != ENCODER_OUTPUTS):
        return False
    plain = all(type(layer.storage) is TokenStorage for layer in cache.attention_layers)
    return plain and list(arguments[ENCODER_OUTPUTS]) == ["last_hidden_state"]


class PaddedRows(PaddedPass):
    """A captured first pass by rows of prompts without padding and contexts, one of each encoder input.

    The prompts' few tokens are copied after a replay. The inputs' keys and values are large: a cache reads them where
    they are, without a second copy, and the pass is not replayed until all caches that do are gone (`Lease`).
    """

    operators = "each input once, causal attention by {}, captured"

    def _attended(self, parts: Segment) -> Segment:
        return parts

    def attend(self, layer: int, tokens: Segment, query: Tensor, scoring: Scoring) -> Tensor:
        if (scoring.softcap, scoring.window, scoring.sinks, scoring.distances) != (None, None, None, None):
            raise Unsupported("attention of its prompts is more than causal")
        self.scorings[layer], self.by[layer] = scoring, "PyTorch"
        grouped = query.shape[1] != tokens.keys.shape[1]
        out = F.scaled_dot_product_attention(query, *tokens, is_causal=True, scale=scoring.scale, enable_gqa=grouped)
        return out.transpose(1, 2)


class InputsOfAPass(CapturedInputs):
    """Writes the keys and values of a captured pass's inputs to buffers.

    The graph reads the tensor `hidden`, the encoder's output, ``[rows, tokens, width]``.
    """

    layers = ()

    def __init__(self, view: CapturedCache, inputs: EncodedInputs, hidden: Tensor, layout: ModelLayout):
        outputs = inputs.arguments[ENCODER_OUTPUTS]
        self.arguments = inputs.arguments | {ENCODER_OUTPUTS: type(outputs)(last_hidden_state=hidden)}
        self.tokens = hidden.shape[1]

        def buffer(store: Store, width: int) -> Tensor:  # [kv_heads, rows * tokens, width]
            return hidden.new_empty(store.kv_heads, len(hidden) * self.tokens, width)

        self._segments = {
            layer: Segment(buffer(store, store.head_dim), buffer(store, store.value_dim))
            for layer, store in layout.cross.items()
        }
        self._cache = ref(view)  # which holds this object: a cycle would keep the buffers until it is collected
        self._lease: ref[Lease] | None = None  # to the object that the latest reader holds

    @property
    def are_free(self) -> bool:
        return self._lease is None or self._lease() is None

    def lend(self, cache: SharedContextCache) -> None:
        """Let the cache's inputs, which the pass has stored, read their keys and values here."""
        assert cache.inputs is not None
        lease = Lease()
        self._lease = ref(lease)
        cache.inputs.store_captured(self._segments, lease)

    @property
    def view(self) -> CrossView:
        cache = self._cache()
        assert cache is not None
        return CrossView(cache, self, self._attend)

    def store(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Write a layer's keys and values, ``[rows, kv_heads, tokens, head_dim]`` each."""
        if mask is not None:
            raise Unsupported("a mask over the encoder's output, which replays would bake in")
        for buffer, part in zip(self._segments[layer], (keys, values), strict=True):
            by_rows = buffer.unflatten(1, (len(part), -1)).transpose(0, 1)
            if by_rows.shape != part.shape:
                raise Unsupported(f"layer {layer} has keys of shape {list(part.shape)}, not {list(by_rows.shape)}")
            by_rows.copy_(part)

    def _attend(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        if scoring.softcap is not None:
            raise Unsupported("a soft cap in cross-attention")
        keys, values = (buffer.unflatten(1, (len(query), -1)).transpose(0, 1) for buffer in self._segments[layer])
        return attend_alike(query, keys, values, scoring.scale)
