"""States that captured steps update: buffers at fixed addresses, which hold the rows of one batch at a time.

A graph reads and writes states where they were at its capture. All captures of a model use the first rows of the same
buffers. A batch is loaded once, when its first step is replayed: its states are copied to the buffers, and its layers
keep views of these, so that steps of any kind and compaction find them there. What another batch still holds in the
buffers is copied out first.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..errors import Unsupported
from .layers.state import LayerOfOwnStates, StateLayer, States
from .shared import SharedContextCache


class CapturedStates:
    """The buffers of a model's layers with states, in order.

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
