"""View of a shared-context cache for a captured first pass of a decoder with an encoder: a prompt of each input.

As in `captured_prefill`, the pass computes into buffers. Those of the prompts' few tokens are copied after a replay.
Those of the inputs' keys and values are large: a cache reads them where they are, so that there is no second copy, and
the pass is not replayed until all caches that do are gone (`Lease`).
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import functional as F

from ..attention.kv import Scoring, Segment
from ..attention.placeholders import SharedKV
from ..attention.torch_operators.decode_ops import attend_alike
from ..errors import Unsupported
from .captured import CapturedInputs
from .captured_prefill import CapturedPrefillCache, PrefillLayer
from .layers.attention import SharedContextLayer
from .layers.cross import ENCODER_OUTPUTS, EncodedInputs
from .layers.cross_view import CrossView
from .layout.model import ModelLayout
from .shared import SharedContextCache
from .storage import TokenStorage


class Lease:
    """Held by inputs whose keys and values are in the buffers of a captured pass, and by their copies."""


def takes_captured_rows(cache: SharedContextCache, layout: ModelLayout) -> bool:
    """Whether the next pass stores keys and values alone, of inputs and prompts, and inputs hide no tokens."""
    inputs = cache.inputs
    if type(inputs) is not EncodedInputs or not inputs.stores_next or layout.states or layout.own:
        return False
    arguments = inputs.arguments
    if any(value is not None for name, value in arguments.items() if name != ENCODER_OUTPUTS):
        return False
    plain = all(type(layer.storage) is TokenStorage for layer in cache.attention_layers)
    return plain and list(arguments[ENCODER_OUTPUTS]) == ["last_hidden_state"]


class CapturedRowsCache(CapturedPrefillCache):
    """Replaces a `SharedContextCache` while a first pass by rows is captured.

    Args:
        rows: Prompts of the pass, each of an input of its own.
        hidden: The encoder's output, ``[rows, tokens, numbers]``, of which the graph reads this tensor.
        layout: The model's, which says how large the inputs' keys and values are.
    """

    _operators = "each input once, causal attention by {}, captured"

    def __init__(self, cache: SharedContextCache, rows: int, hidden: Tensor, layout: ModelLayout):
        super().__init__(cache, None, None)
        assert cache.inputs is not None
        self.inputs = self._inputs = _InputsOfAPass(self, cache.inputs, hidden, _buffers(layout, rows, hidden))

    def _captured_layer(self, layer: SharedContextLayer) -> PrefillLayer:
        return _RowsLayer(layer, self._pass)

    @property
    def is_free(self) -> bool:
        """Whether nobody reads the inputs' keys and values any more."""
        return self._inputs.lease is None or self._inputs.lease() is None

    def lend(self, cache: SharedContextCache) -> None:
        """Let the cache's inputs, which the pass has stored, read their keys and values here."""
        assert cache.inputs is not None
        lease = Lease()
        self._inputs.lease = ref(lease)
        cache.inputs.store_captured(self._inputs.segments, lease)


def _buffers(layout: ModelLayout, rows: int, hidden: Tensor) -> dict[int, Segment]:
    """Room for the inputs' keys and values by layer, ``[kv_heads, rows * tokens, head_dim]`` each."""
    count = rows * hidden.shape[1]
    return {
        layer: Segment(
            *(hidden.new_empty(store.kv_heads, count, width) for width in (store.head_dim, store.value_dim))
        )
        for layer, store in layout.cross.items()
    }


class _InputsOfAPass(CapturedInputs):
    """Writes the keys and values of a pass's inputs to buffers.

    Attributes:
        segments: The buffers, by layer.
        lease: To the object that the latest reader's inputs hold; None before the first.
        layers: Layers that need not project the encoder's output: none in this pass.
    """

    layers = ()
    lease: ref[Lease] | None = None

    def __init__(self, view: CapturedRowsCache, inputs: EncodedInputs, hidden: Tensor, segments: dict[int, Segment]):
        outputs = inputs.arguments[ENCODER_OUTPUTS]
        self.arguments = inputs.arguments | {ENCODER_OUTPUTS: type(outputs)(last_hidden_state=hidden)}
        self.tokens, self.segments = hidden.shape[1], segments
        self._cache = ref(view)  # which holds this object: a cycle would keep the buffers until it is collected

    @property
    def view(self) -> CrossView:
        """The cache as decoders take it."""
        cache = self._cache()
        assert cache is not None
        return CrossView(cache, self, self._attend)

    def store(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Write a layer's keys and values, ``[rows, kv_heads, tokens, head_dim]`` each."""
        if mask is not None:
            raise Unsupported("a mask over the encoder's output, which replays would bake in")
        for buffer, part in zip(self.segments[layer], (keys, values), strict=True):
            by_rows = buffer.unflatten(1, (len(part), -1)).transpose(0, 1)
            if by_rows.shape != part.shape:
                raise Unsupported(f"layer {layer} has keys of shape {list(part.shape)}, not {list(by_rows.shape)}")
            by_rows.copy_(part)

    def _attend(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        if scoring.softcap is not None:
            raise Unsupported("a soft cap in cross-attention")
        keys, values = (buffer.unflatten(1, (len(query), -1)).transpose(0, 1) for buffer in self.segments[layer])
        return attend_alike(query, keys, values, scoring.scale)


class _RowsLayer(PrefillLayer):
    """Takes ``[rows, kv_heads, width, head_dim]``, and writes the rows end to end."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[SharedKV, SharedKV]:
        parts = self.storage.parts_of(key_states, value_states, *args, **kwargs)
        self.in_pass.write(self.index, Segment._make(part.transpose(0, 1).flatten(1, 2) for part in parts))
        handle = _RowsKV(self, parts)
        return handle, handle


class _RowsKV(SharedKV):
    def __init__(self, layer: _RowsLayer, parts: Segment):
        self.layer, self.parts, self.stored_window = layer, parts, layer.stored_window
        self.device = parts.keys.device

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        if (scoring.softcap, scoring.window, scoring.sinks, scoring.distances) != (None, None, None, None):
            raise Unsupported("attention of its prompts is more than causal")
        in_pass, index = self.layer.in_pass, self.layer.index
        in_pass.scorings[index], in_pass.by[index] = scoring, "PyTorch"
        grouped = query.shape[1] != self.parts.keys.shape[1]
        out = F.scaled_dot_product_attention(
            query, *self.parts, is_causal=True, scale=scoring.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
