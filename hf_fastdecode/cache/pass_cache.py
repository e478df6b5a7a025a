"""Forward passes over a shared-context cache: its layers, room for their tokens, and what they append."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..attention.active_passes import require_active
from ..attention.forest import Forest
from ..errors import Unsupported
from ..instance_methods import STATE_ATTRIBUTE
from .layers.attention import REMEDY, SharedContextLayer
from .layers.of_model import layers_of
from .layers.state import StateLayer, end_of
from .layout.model import ModelLayout
from .layout.stores import Store
from .rows import RowCache


class PassCache(RowCache):
    """Base of `SharedContextCache` with what forward passes, eager or captured, call before, within and after them.

    Attributes:
        stores: What each layer of the model stores that was met; None before.
    """

    stores: tuple[tuple[Store, ...], ...] | None

    def longest_row(self, queries: int) -> int:
        """Length of the longest row by the end of the call: after `queries` more tokens, or at the known bound.

        Padding of a decoder's prompts counts behind an encoder, where positions count it.
        """
        room = max(0, (self.state.max_suffix or 0) - self.suffix_length)
        if self.state.packed:
            return max(item.position + item.span.length for item in self.state.packed) + room
        longest = self.state.longest_row_bound
        if self.inputs is not None:
            longest = max(longest, self.get_seq_length())
        return max(longest + max(queries, room), self.state.longest_to_come)

    def meet(self, layout: ModelLayout) -> None:
        """Make the layers of a model, or raise ValueError if the cache's are of a model with other layers."""
        if self.stores is not layout.layers:  # as it is in all but the first pass of a call
            held = self.layers if self.rows or self.segment_tokens else ()
            self.layers, self.stores = layers_of(layout, self.state, held), layout.layers

    def has_room(self, tokens: int) -> bool:
        """Whether suffixes have room for `tokens` tokens per row; the same on all processes that divide them."""
        room = self.state.suffix_room(tokens)
        return all(layer.storage.capacity >= room for layer in self.attention_layers)

    def reserve(self, tokens: int) -> bool:
        """Allocate `tokens` suffix tokens per row before a captured step; returns whether storage moved."""
        moved = [layer.reserve(tokens) for layer in self.attention_layers]
        return any(moved)

    def record_captured_step(self, input_ids: Tensor) -> None:
        """Record that a captured step appended tokens ``[rows, queries]`` to the suffixes of every layer."""
        self.record_tokens(input_ids)
        self.state.suffixes.lengths = self.state.suffixes.lengths.plus(input_ids.shape[1])
        self.state.padded_length += input_ids.shape[1]

    def record_tokens(self, input_ids: Tensor) -> None:
        """Record the ids ``[rows, queries]`` of appended tokens, for prefix matching in later calls."""
        suffixes = self.state.suffixes
        suffixes.ids = suffixes.ids.plus(input_ids, suffixes.lengths)

    @contextmanager
    def all_or_nothing(self, rows: int = 0, queries: int = 0) -> Iterator[None]:
        """Context of a forward pass: tokens are appended to every layer, or on failure to none.

        Args:
            rows: Rows of the pass, and `queries` its tokens per row; of a cache without keys and values nothing else
                tells.

        Raises:
            ValueError: The pass appended to some layers only, or rows have lost their states to a pass that failed.
        """
        state, suffixes = self.state, self.state.suffixes
        forest, layers, before, ids = state.forest, (list(self.layers), self.stores), suffixes.lengths, suffixes.ids
        if not state.packed:
            self._check_states(rows, queries)
        try:
            if not state.packed:
                self.fork_states(self.state_layers)
            yield
            appended = {layer.appended for layer in self.attention_layers}
            if not appended and not state.packed:
                appended = {queries}
                state.forest = state.forest or Forest(rows)
            if len(appended) > 1:
                shortest, longest = before.longest + min(appended), before.longest + max(appended)
                raise ValueError(
                    f"after this pass the suffixes of the cache's layers differ in length, {shortest} to {longest} "
                    f"tokens: the pass left out some of the layers that filled the cache; {REMEDY}"
                )
            if suffixes.ids is ids and any(appended):  # a pass without ids, behind which no others are known
                suffixes.ids = ids.first(before.shortest)
            suffixes.lengths = before.plus(max(appended, default=0))
            state.padded_length += max(appended, default=0)
        except BaseException:
            state.forest, (self.layers, self.stores) = forest, layers
            state.met = None  # whose layers may be gone
            suffixes.restore(before, ids)
            for states in self.state_layers:  # of which some are those after the pass
                states.drop_rows()
            if forest is None:  # the next pass may have other rows, dtype or device
                for layer in self.attention_layers:
                    layer.storage.drop_suffixes()
                    layer.is_initialized = False
            raise
        finally:
            for layer in self.attention_layers:
                layer.appended = 0

    def _check_states(self, rows: int, queries: int) -> None:
        """Raise ValueError for a pass of `rows` rows, of `queries` tokens each, that cannot continue their states."""
        if not (layers := self.state_layers) or self.state.forest is None:
            return
        if rows != self.rows:
            raise ValueError(f"the cache holds {self.rows} rows, got tokens for {rows}")
        if queries > 1 and not self.is_empty and not all(layer.state_store.continues for layer in layers):
            raise ValueError(
                f"a pass of {queries} tokens per row would not continue the states of this model's layers, whose "
                "scans begin anew; pass one token at a time, or the whole text to generate"
            )
        if self.suffix_length and any(layer.states is None for layer in layers):
            raise ValueError("a pass that failed has left rows of this cache without their states; make it again")

    def fork_states(self, layers: Sequence[StateLayer]) -> None:
        """Copy the states at the ends of paths to rows that have none of their own yet, in these layers."""
        if self.state.forest is not None and not self.suffix_length:
            ends = [end_of(path) for path in self.forest.paths]
            for layer in layers:
                if layer.states is None:
                    layer.begin_rows(ends)

    @property
    def computed_in(self) -> torch.dtype | None:
        """The widest dtype of any layer's keys and values, or convolutions' states; None before the first pass."""
        dtypes = [layer.dtype for layer in self.attention_layers if layer.is_initialized]
        dtypes += [layer.dtype for layer in self.state_layers if layer.dtype is not None]
        return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """As `Cache.update`, but only within a forward pass of an enabled model.

        Raises:
            NotATensorError: The model is not enabled, or a submodule was called directly.
            Unsupported: By the model's layout the layer stores nothing.
        """
        self._require_active()  # fail before appending tokens that attention could not read
        if layer_idx not in range(len(self.layers)) or not isinstance(self.layers[layer_idx], SharedContextLayer):
            raise Unsupported(f"layer {layer_idx} stores keys and values, and its config says that it stores none")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """As `Cache.get_conv_state`, which layers with states call first, but only within a pass as `update` is.

        Another pass would begin with no prompt's states, and leave its own behind for later ones.
        """
        self._require_active("get_conv_state", "states")
        state: Tensor | None = super().get_conv_state(*args, **kwargs)
        return state

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """The same of what layers call first in earlier transformers, which has no `get_conv_state`."""
        if layer_idx is not None:
            self._require_active("has_previous_state", "states")
        return bool(super().has_previous_state(layer_idx, *args, **kwargs))

    @property
    def is_compileable(self) -> bool:
        """False; transformers' `generate` asks it first, also of a model that is not enabled."""
        self._require_enabled()
        return bool(super().is_compileable)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As `ForestCache.get_mask_sizes`, which passes ask before they compute anything."""
        self._require_enabled()
        return super().get_mask_sizes(query_length, layer_idx)

    def _require_enabled(self) -> None:
        """Raise ValueError if the model that the last pass was of is known not to be enabled any longer."""
        met = self.state.met and self.state.met()
        if met is not None and STATE_ATTRIBUTE not in vars(met):
            raise ValueError(
                f"this SharedContextCache is for passes of an enabled model, and the {type(met).__name__} that filled "
                "it is no longer enabled; call hf_fastdecode.enable(model)"
            )

    def _require_active(self, *names: str) -> None:
        """Fail outside of passes that can read the cache; passes by transformers' own attention always can."""
        if self.state.tensors_of_pass is None:
            require_active(*names)
