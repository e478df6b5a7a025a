"""Layers with a state of fixed size per row that every token overwrites: gated delta nets, Mamba, short convolutions.

States are stored as in transformers' own `LinearAttentionLayer`, because models read and update them there. This file
adds where they come from: a state is computed once per distinct prompt and kept, unchanged, for the end of that
prompt's path. Rows begin with copies of it (a fork). Decode steps overwrite the copies in place, so their addresses
change only with the number of rows. Tokens cannot be removed from a state.

A pass of prefill may have several prompts end to end in one row. Each of these segments begins with the state at the
end of the path that it continues, and leaves one for the end of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import LinearAttentionLayer

from ...attention.forest import End, end_of
from ...errors import Unsupported
from ..state import SharedState
from ..storage import TokenStorage
from ..stores import Store
from .attention import CapturedLayer, SharedContextLayer, require_dtype


@contextmanager
def _writable() -> Iterator[None]:
    """Context for copies that later passes write in place, also outside of the inference mode that is active now."""
    wanted = torch.is_grad_enabled()  # leaving inference mode would enable gradients
    with torch.inference_mode(False), torch.set_grad_enabled(wanted):
        yield


@dataclass(frozen=True)
class States:
    """States of some rows, ``[rows, ...]`` each, by their numbers within the layer.

    `conv` are the latest inputs of convolutions, `recurrent` states of recurrences; short convolutions have none.
    """

    conv: Mapping[int, Tensor]
    recurrent: Mapping[int, Tensor]

    def each(self, change: Callable[[Tensor], Tensor]) -> States:
        """The states that `change` makes of these."""
        return States(*({number: change(one) for number, one in part.items()} for part in (self.conv, self.recurrent)))

    def row(self, row: int) -> States:
        return self.each(lambda one: one[row : row + 1])

    @classmethod
    def joined(cls, parts: Sequence[States]) -> States:
        first = parts[0]
        return cls(
            {number: torch.cat([part.conv[number] for part in parts]) for number in first.conv},
            {number: torch.cat([part.recurrent[number] for part in parts]) for number in first.recurrent},
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.conv.values(), *self.recurrent.values()

    @property
    def rows(self) -> int:
        return len(self.tensors[0])

    @property
    def row_bytes(self) -> int:
        return sum(one[:1].numel() * one.element_size() for one in self.tensors)


@dataclass
class Segments:
    """The segments of a packed row, for code that runs all of them at once.

    Functions in the forward of a layer of transformers find it among their further arguments, as `segments`, and take
    them or raise ValueError.

    Attributes:
        starts: ``[segments + 1]`` int32: where they begin, and the number of tokens.
        conv: ``[segments, channels, length]``: the inputs of convolutions before them; None for zeros.
        length: Latest inputs that states keep; 0 until the layer's code has said it.
        conv_after: As `conv`, at their ends; None until a function has convolved them.
        scanned: Whether a function has scanned them.
    """

    starts: Tensor
    conv: Tensor | None = None
    length: int = 0
    conv_after: Tensor | None = None
    scanned: bool = False

    def to_scan(self) -> Tensor:
        """The starts, for a function that scans the segments from their states, and returns those at their ends."""
        self.scanned = True
        return self.starts


class LayerOfOwnStates(LinearAttentionLayer):
    """Stores the states of code that keeps them elsewhere (`OwnStates`), as states of recurrences."""

    @property
    def kept_states(self) -> tuple[Tensor, ...] | None:
        """The rows' states that `keep_states` was given, in its order; None where rows have none yet."""
        if not all(self.is_recurrent_states_initialized.values()):
            return None
        return tuple(self.recurrent_states[number] for number in range(self.number_of_states))

    def keep_states(self, states: Sequence[Tensor]) -> None:
        """Store the rows' states after a pass, ``[rows, ...]`` each; copied, in place of those that rows have."""
        for number, one in enumerate(states):
            if self.recurrent_states[number] is not one:
                self.update_recurrent_state(one, number)
        self.dtype, self.device = states[0].dtype, states[0].device

    def place(self, states: States) -> None:
        """Have the rows' states in these tensors, which hold the same numbers."""
        self.conv_states.update(states.conv)
        self.recurrent_states.update(states.recurrent)

    def hold(self, states: States) -> None:
        """Have these as the rows' states, of whichever number of rows."""
        self.place(states)
        for number, one in states.conv.items():
            self.is_conv_states_initialized[number] = self.has_previous_state[number] = True
            self.conv_kernel_size[number] = one.shape[-1]
            self.dtype, self.device = one.dtype, one.device
        for number in states.recurrent:
            self.is_recurrent_states_initialized[number] = True

    def by_segments(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Result of `run` for the rows of a pass, none of which is packed; see `StateLayer.by_segments`."""
        return run(*args, **kwargs)


class StateLayer(LayerOfOwnStates):
    """A layer that stores a state per row, and nothing per token.

    Attributes:
        ends: States at the ends of paths, ``[1, ...]`` each, never modified; caches over the same nodes share them.
    """

    is_compileable: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = False
    is_sliding: ClassVar[bool] = False
    appended = 0
    _segments: Segments | None = None  # of a packed row, while functions in the layer's code take all at once

    def __init__(self, state: SharedState, store: Store):
        LinearAttentionLayer.__init__(self, number_of_states=store.states)
        self.state, self.state_store = state, store
        self.ends: dict[End, States] = {}
        self.ran: dict[str, str] = {}

    @property
    def states(self) -> States | None:
        """The rows' states; None where rows have none."""
        if not any((*self.is_conv_states_initialized.values(), *self.is_recurrent_states_initialized.values())):
            return None
        parts = (self.conv_states, self.recurrent_states)
        return States(*({number: one for number, one in part.items() if one is not None} for part in parts))

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As `LinearAttentionLayer.update_conv_state`; raises ValueError for inputs in another dtype than before."""
        if self._segments is not None:
            self._segments.length = kwargs.get("conv_kernel_size") or 0
            return conv_states
        if (states := self.states) is not None and states.conv:
            require_dtype(conv_states.dtype, list(states.conv.values()), "states")
        updated: Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return updated

    def begin_rows(self, ends: Sequence[End | None]) -> None:
        """Give rows copies of the states at the ends of their paths, unless all are empty; ValueError without one."""
        self.drop_rows()
        if all(end is None for end in ends):
            return
        self.hold(self._copies(ends))

    def by_segments(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Result of `run`, a module's `forward`, for a row; of a packed one, for each segment by itself, joined.

        Meanwhile the layer has the states of that segment, as of one row. Tensors among the arguments that are of the
        row's tokens, ``[1, tokens, ...]``, are cut, and those returned are concatenated.
        """
        if not (segments := self.state.current.segments):
            return run(*args, **kwargs)
        tokens = sum(item.span.length for item in segments)
        outputs, after, stop = list[Any](), list[States](), 0
        for item in segments:
            start, stop = stop, stop + item.span.length

            def cut(one: Any, start: int = start, stop: int = stop) -> Any:
                return one[:, start:stop] if isinstance(one, Tensor) and one.shape[:2] == (1, tokens) else one

            self.begin_rows([end_of(item.context)])
            outputs.append(run(*tree_map(cut, args), **tree_map(cut, kwargs)))
            if (states := self.states) is not None:
                after.append(states)
        self.hold(States.joined(after))
        return tree_map(lambda *parts: torch.cat(parts, 1) if isinstance(parts[0], Tensor) else parts[0], *outputs)

    def at_once(self, run: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> Any:
        """Result of `run`, a `forward` with other functions, for a packed row, which these take whole; else None."""
        self.begin_segments()
        conv = self.conv_states[0] if self.is_conv_states_initialized[0] else None
        self._segments = segments = Segments(self.state.current.starts(device), conv)
        try:
            output = run(*args, **kwargs, segments=segments)
        finally:
            self._segments = None
        scanned = segments.scanned or not any(self.is_recurrent_states_initialized.values())
        if segments.conv_after is None or not scanned:
            return None
        self.update_conv_state(segments.conv_after)
        return output

    def begin_segments(self) -> None:
        """Give each segment of a packed row the state that it continues, as `begin_rows` gives rows.

        It is for kernels that take all segments at once, from zeros where a path is empty; no-op in other passes.
        """
        ends = [end_of(item.context) for item in self.state.current.segments]
        if ends:
            self.drop_rows()
        if first := next(filter(None, ends), None):
            self.hold(self._copies(ends, self._copies([first]).each(torch.zeros_like)))

    def _copies(self, ends: Sequence[End | None], empty: States | None = None) -> States:
        """The states at these ends, copied; `empty` at those of empty paths."""
        known = [empty if end is None else self.ends.get(end) for end in ends]
        if None in known:
            raise ValueError(
                "the state at the end of a row is not known: a cache of this model can be continued where prompts or "
                "completions end, but not between"
            )
        with _writable():
            return States.joined([one for one in known if one is not None])

    def restart_rows(self, rows: Tensor, ends: Sequence[End | None]) -> None:
        """Overwrite states of rows, int64 on the CPU, with those at ends of new paths; ValueError without one."""
        states = self.states
        if states is None:  # rows have none of their own yet
            return
        copies = self._copies(ends)
        with _writable():
            for one, new in zip(states.tensors, copies.tensors, strict=True):
                one.index_copy_(0, rows.to(one.device), new)

    def keep(self, ends: Sequence[End]) -> None:
        """Keep the rows' states as those at these ends, and leave the rows without."""
        states = self.states
        if states is None or states.rows != len(ends):
            if self.state.current.segments:
                raise Unsupported("code of its own in the place of a layer's ran over the states of packed prompts")
            rows = 0 if states is None else states.rows
            raise ValueError(f"a pass left the states of {rows} rows, where prompts have {len(ends)}")
        for row, end in enumerate(ends):
            self.ends[end] = states.row(row)
        self.ran["states"] = "computed once per prompt, forked to its rows"
        self.drop_rows()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's states; 0 before the first pass."""
        known = self.states or next(iter(self.ends.values()), None)
        return 0 if known is None else known.row_bytes

    def copy_rows_to(self, other: StateLayer, ends: Sequence[End]) -> None:
        """Keep copies of the rows' states in another cache's layer, as those at these ends."""
        states = self.states
        if states is None or states.rows != len(ends):
            raise ValueError("a pass that failed has left rows of this cache without their states; make it again")
        with _writable():
            copied = states.each(Tensor.clone)
        for row, end in enumerate(ends):
            other.ends[end] = copied.row(row)

    def select_rows(self, rows: Tensor) -> None:
        """Replace row ``i`` by row ``rows[i]``, int64 on the CPU: in place, unless the number of rows changes."""
        states = self.states
        if states is None:
            return
        with _writable():
            chosen = states.each(lambda one: one.index_select(0, rows.to(one.device)))
        if chosen.rows == states.rows:
            for one, new in zip(states.tensors, chosen.tensors, strict=True):
                one.copy_(new)
            return
        self.place(chosen)

    def move_ends(self, ends: Mapping[End | None, End | None]) -> None:
        """Keep, at each of the new ends, what was at the old one, and nothing else."""
        moved = ((new, old) for new, old in ends.items() if new is not None and old is not None)
        self.ends = {new: self.ends[old] for new, old in moved if old in self.ends}

    def drop_rows(self) -> None:
        for number in range(self.number_of_states):
            self.conv_states[number] = self.recurrent_states[number] = None
            self.is_conv_states_initialized[number] = self.is_recurrent_states_initialized[number] = False
            self.has_previous_state[number] = False

    def for_nodes_of(self, state: SharedState) -> StateLayer:
        twin = StateLayer(state, self.state_store)
        twin.ends = dict(self.ends)
        twin.dtype, twin.device = self.dtype, self.device
        return twin

    def captured(self, state: SharedState, buffers: Iterator[CapturedStateLayer]) -> Any:
        """The layer in the view of a captured pass: the next one of a step's buffers, or itself in other passes."""
        return next(buffers, self)

    def activate_past_recording(self) -> None:
        """No-op: states are overwritten in place."""

    def reset(self) -> None:
        self.drop_rows()
        self.ends.clear()


class StateAndAttentionLayer(StateLayer, SharedContextLayer):
    appended: int

    def __init__(
        self, state: SharedState, index: int, store: Store, state_store: Store, storage: TokenStorage | None = None
    ):
        SharedContextLayer.__init__(self, state, index, store, storage)
        ran = self.ran
        StateLayer.__init__(self, state, state_store)
        self.ran = ran

    def lazy_initialization(self, *args: Tensor, **kwargs: Any) -> None:
        """For keys and values, which come by place, or for a state, which comes by name."""
        if args:
            SharedContextLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def for_nodes_of(self, state: SharedState) -> StateAndAttentionLayer:
        twin = StateAndAttentionLayer(state, self.index, self.store, self.state_store, self.storage.empty())
        twin.take_nodes_of(self)
        twin.ends = dict(self.ends)
        return twin

    def captured(self, state: SharedState, buffers: Iterator[CapturedStateLayer]) -> Any:
        states, layer = next(buffers, None), CapturedLayer(self, state)
        return layer if states is None else CapturedStateAndAttentionLayer(layer, states)

    def reset(self) -> None:
        StateLayer.reset(self)
        SharedContextLayer.reset(self)


class CapturedStateLayer(LayerOfOwnStates):
    """A layer whose states are always there, for any prompt, and are updated in place."""

    is_compileable = False

    def __init__(self, states: States):
        numbers = 1 + max((*states.conv, *states.recurrent))
        LinearAttentionLayer.__init__(self, number_of_states=numbers)
        self.hold(states)
        self.has_previous_state = dict.fromkeys(range(numbers), True)


class CapturedStateAndAttentionLayer(CapturedLayer, CapturedStateLayer):
    def __init__(self, layer: CapturedLayer, states: CapturedStateLayer):
        self.__dict__.update({**vars(states), **vars(layer)})


class StepBuffers:
    """Buffers that captured steps update in place: the states of one batch's rows at a time; none for other layers.

    A graph reads and writes states where they were at its capture. All captures of a model use the first rows of the
    same buffers. A batch is loaded once, when its first step is replayed: its states are copied to the buffers, and
    its layers keep views of these, so that steps of any kind and compaction find them there. What another batch still
    holds in the buffers is copied out first.

    The states of `layers`, or those at the ends of prompts, tell shapes and dtypes: raises `Unsupported` if a layer
    has none yet.
    """

    def __init__(self, rows: int, layers: Sequence[StateLayer]):
        self.rows = rows
        self._shapes = _shapes(layers)
        with torch.inference_mode(False):
            self._buffers = [
                example.each(lambda one: one.new_zeros(rows, *one.shape[1:])) for example in _examples(layers)
            ]
        self._held: list[tuple[ref[StateLayer], States]] = []

    def serve(self, rows: int, layers: Sequence[StateLayer]) -> bool:
        """Whether they have room for so many rows with states such as these layers'."""
        return not layers or (rows <= self.rows and _shapes(layers) == self._shapes)

    def layers_of(self, layers: Sequence[StateLayer], rows: int) -> list[CapturedStateLayer]:
        """The layers in a captured pass over `rows` rows."""
        buffers = zip(layers, self._buffers, strict=True)
        return [CapturedStateLayer(states.each(lambda one: one[:rows])) for _, states in buffers]

    def load(self, layers: Sequence[StateLayer], fork: Callable[[Sequence[StateLayer]], None], step_rows: int) -> None:
        """Let the buffers hold the states of this batch, for a step of so many rows; `fork` makes those of a layer."""
        if self._hold(layers):
            return
        self.release()
        for layer, buffers in zip(layers, self._buffers, strict=True):
            fork([layer])
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


def _examples(layers: Sequence[StateLayer]) -> list[States]:
    """A row's states of each layer, of any row."""
    found = [layer.states or next(iter(layer.ends.values()), None) for layer in layers]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        raise Unsupported("rows have no states yet, which a captured step could continue")
    return known


def _shapes(layers: Sequence[StateLayer]) -> list[list[tuple[torch.Size, torch.dtype, torch.device]]]:
    return [[(one.shape[1:], one.dtype, one.device) for one in states.tensors] for states in _examples(layers)]


def _are(layer: StateLayer, views: States) -> bool:
    states = layer.states
    if states is None:
        return False
    return all(one is other for one, other in zip(states.tensors, views.tensors, strict=True))
