"""Prefill passes, captured in CUDA graphs and kept between calls.

Up to some hundred tokens, launching a pass's kernels takes longer than running them: a replay takes about as long as
reading the weights once. Of longer prompts a replay can begin before the call is prepared (`PrefillAhead`).
A captured pass has a fixed number of tokens; a batch's new tokens are padded to it at their end. It computes keys and
values into buffers of its own, from which they are copied to the cache after each replay.

Weights are read at their addresses at capture. Another capture is needed for another number of tokens or of wanted
logits, for the first pass over several runs of tokens or over stored contexts, for more nodes or levels than the
tables hold, rows that outgrow a sliding window, or changes of the model's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import keeps_logits
from ...attention.forest import Forest
from ...attention.overrides import RowLengths
from ...cache.captured import CapturedCache
from ...cache.captured_prefill import ContextTables, InputsOfAPass, PaddedPass, PaddedRows
from ...cache.shared import SharedContextCache
from ...cache.state import Pass, PrefillItem
from ..forward_pass import Beside, forward_pass
from ..structure import Structure
from .graph_capture import captured_graph

_SIZES = (64, 128, 192, 256, 384, 512, *range(576, 2049, 64))
"""Numbers of tokens of captured passes. Of long ones, padding takes as long as tokens; short ones in between would
save little."""

_MOST_WITH_OTHERS = 512
"""Maximum tokens of passes over several runs, which attend with a bias, or with contexts, a row for each token."""

_MOST_PASSES = 32
"""Maximum captured passes kept per model."""

_PASSES_THAT_PAY_A_CAPTURE = {True: 2, False: 4}
"""Passes of a shape, up to and including the current one, from which it is captured, by whether captures are forced.

A capture takes as long as two eager passes and some milliseconds, and saves most of each later one.
"""


class PrefillShape(NamedTuple):
    """The kind of passes that a captured one serves."""

    tokens: int  # number of tokens, with padding
    wanted: int  # number of tokens to return logits for
    several: bool  # whether it takes several runs of tokens
    contexts: bool  # whether runs have stored contexts
    planes: int  # planes of positions
    fused_rows: int  # maximum tokens for which projections of the same input run concurrently
    autocast: torch.dtype | None = None  # of the autocast around the call, if any

    @classmethod
    def of(
        cls,
        items: Sequence[PrefillItem],
        tokens: int,
        wanted: int,
        planes: int,
        fused_rows: int,
        autocast: torch.dtype | None = None,
    ) -> PrefillShape | None:
        """The smallest shape for a pass over `tokens` tokens; None if it is longer than captured ones."""
        several, contexts = len(items) > 1, any(item.context for item in items)
        size = size_for(tokens)
        if size is None or (size > _MOST_WITH_OTHERS and (several or contexts)):
            return None
        most = min(size, 1 << max(0, wanted - 1).bit_length())
        return cls(size, most, several, contexts, planes, fused_rows, autocast)


def size_for(tokens: int) -> int | None:
    """Tokens of the smallest captured pass that takes `tokens`; None if there is none."""
    return next((size for size in _SIZES if size >= tokens), None)


class CapturedPrefill:
    """A prefill pass of a model over a row of new tokens.

    Args:
        cache: The cache of the pass to capture with, whose items are being prefilled.
        forest: The items' contexts by token, see `context_forest`; None if they have none.
        longest: Tokens of the longest row by the end of the call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: PrefillShape,
        cache: SharedContextCache,
        forest: Forest | None,
        longest: int,
        structure: Structure,
        pool: Any,
    ):
        device, tokens = model.device, shape.tokens
        self.shape, self.lengths = shape, RowLengths(longest)
        self._inputs = torch.zeros(3 * tokens + shape.wanted, dtype=torch.long, device=device)
        ids, positions, runs = self._inputs[: 3 * tokens].view(3, 1, tokens)
        wanted = self._inputs[3 * tokens :]
        self._tables = None if forest is None else ContextTables(tokens, cache, forest, device)
        self._padded = padded = PaddedPass(runs[0] if shape.several else None, self._tables)
        view = CapturedCache(cache, Pass(padded=padded))
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True, "return_dict": True}
        keeps = keeps_logits(model)
        if keeps:
            arguments["logits_to_keep"] = wanted

        def run() -> tuple[Tensor, ...]:  # no reference to self, as `CapturedGraph` demands
            padded.begin()
            logits = forward_pass(model, view, positions, **arguments).logits[0]
            return ((logits if keeps else logits[wanted]).contiguous(), *padded.take())

        sizes = {"rows": tokens, "fused_rows": shape.fused_rows}
        self._graph = captured_graph(run, model, structure, self.lengths, pool, **sizes, runs_first=True)

    def fits(self, forest: Forest | None, longest: int) -> bool:
        """Whether it computes a pass of its shape as the model would: its windows, and the tables of contexts."""
        fits = self._tables is None or forest is None or self._tables.by_shape.fits(forest)
        return fits and self.lengths.serve(longest)

    def __call__(
        self, cache: SharedContextCache, forest: Forest | None, tokens: Tensor, wanted: Sequence[int]
    ) -> Tensor:
        """Prefill the cache's current items, for which `fits` holds.

        `tokens` are ids of the items in their order, ``[length]`` int64 on the CPU. Returns the logits of the `wanted`
        ones, ``[len(wanted), vocabulary]`` in the model's dtype.
        """
        inputs = self._arranged([(item.position, item.span.length) for item in cache.state.current.items], wanted)
        inputs[: len(tokens)] = tokens
        self._inputs.copy_(inputs)
        if self._tables is not None and forest is not None:
            self._tables.follow(cache, forest)
        return self.end(cache, self._graph.replay(), len(wanted))

    def begin(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Run the pass over one prompt ``[length]`` on the device, of which the last token's logits are wanted."""
        with torch.no_grad():
            self._inputs.copy_(self._arranged([(0, len(ids))], [len(ids) - 1]))
            self._inputs[: len(ids)].copy_(ids)
            return self._graph.replay()

    def end(self, cache: SharedContextCache, outputs: tuple[Tensor, ...], wanted: int) -> Tensor:
        """Store what a pass over the cache's current items returned; the `wanted` logits, as of a call."""
        logits, *buffers = outputs
        self._padded.store(cache, buffers)
        return logits[:wanted].clone()

    def _arranged(self, runs: Sequence[tuple[int, int]], wanted: Sequence[int]) -> Tensor:
        """The pass's inputs without ids, on the CPU, for runs of tokens by first position and length."""
        inputs, count, start = np.zeros(len(self._inputs), dtype=np.int64), self.shape.tokens, 0
        _, positions, numbers = inputs[: 3 * count].reshape(3, count)
        numbers[:] = -1
        for number, (first, length) in enumerate(runs):
            positions[start : start + length] = np.arange(first, first + length)
            numbers[start : start + length] = number
            start += length
        inputs[3 * count : 3 * count + len(wanted)] = wanted
        return torch.from_numpy(inputs)


class _Captured(Protocol):
    @property
    def shape(self) -> Hashable: ...
    def fits(self, forest: Forest | None, longest: int) -> bool: ...


Captured = TypeVar("Captured", bound=_Captured)


class CapturedPrefills(Generic[Captured]):
    """The captured prefill passes of one kind and model, part of its `Captures`.

    At `most` so many are kept, `_MOST_PASSES` by default; if `one_of_a_shape`, no second one where the first does not
    fit.

    Attributes:
        count: Number of captures made.
        asked: What tells the current call from calls of other arguments.
        again: Shape of the last pass, if it prefilled a call's one prompt whole, and what that call asked; see
            `PrefillAhead`.
    """

    def __init__(self, most: int | None = None, *, one_of_a_shape: bool = False) -> None:
        self._most, self._one_of_a_shape, self.count = most, one_of_a_shape, 0
        self.asked: Hashable = None
        self.again: tuple[PrefillShape, Hashable] | None = None
        self._passes: list[Captured] = []  # least recently used first
        self._eager = Counter[Hashable]()

    def find(self, shape: Hashable, forest: Forest | None, longest: int) -> Captured | None:
        """The captured pass of this shape that fits the new tokens, if there is one."""
        for index, one in enumerate(self._passes):
            if one.shape == shape and one.fits(forest, longest):
                self._passes.append(self._passes.pop(index))
                return one
        return None

    def pays(self, shape: Hashable, *, forced: bool) -> bool:
        """Whether to capture the current pass, to which no captured one fits.

        Captures of a shape that are made in vain, for others that do not fit them, become rarer.
        """
        if self._one_of_a_shape and any(one.shape == shape for one in self._passes):
            return False
        self._eager[shape] += 1
        times, rest = divmod(self._eager[shape], _PASSES_THAT_PAY_A_CAPTURE[forced])
        return not rest and times.bit_count() == 1

    def keep(self, made: Captured) -> None:
        """Keep a new capture."""
        self._passes.append(made)
        del self._passes[: -(self._most or _MOST_PASSES)]
        self.count += 1

    def clear(self) -> None:
        """Drop all captures."""
        self._passes, self.again = [], None


class Scope(Protocol):
    """A call of `generate`, see `CallScope`."""

    def callback(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function at the call's end."""
        ...


class PrefillAhead:
    """A captured pass over one prompt that is begun before transformers prepares the call, which takes milliseconds.

    The guess is that this call, like the last one, prefills its one prompt whole by a captured pass. It runs on a
    stream of its own while the call is prepared. When the call comes to its prefill, tokens are compared: if they are
    those of the pass, its results are used, otherwise dropped. A wrong guess costs the device the time of the pass, so
    only calls with the arguments of the last one are guessed, and after a wrong guess none until one would have been
    right.

    Attributes:
        ids: ``[1, length]`` int64: the prompt that was guessed, in a copy, as the caller may write to its own.
        was_right: Whether its outputs were used.
    """

    def __init__(self, captured: CapturedPrefill, ids: Tensor):
        self.captured, self.ids, self.was_right = captured, ids.clone(), False
        self._beside = Beside(ids.device, "prefill")
        with self._beside.here():
            self._outputs = captured.begin(self.ids[0])

    def is_of(self, captured: CapturedPrefill, tokens: Tensor) -> bool:
        """Whether it is a pass of this capture over these tokens, ``[length]`` int64 on the CPU."""
        return captured is self.captured and torch.equal(self.ids[0].cpu(), tokens)

    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of the pass, for work that is queued from now on."""
        self.was_right = True
        self.join()
        return self._outputs

    def join(self) -> None:
        """Let work that is queued from now on wait for the pass, whose memory it may use."""
        self._beside.join()


class RowShape(NamedTuple):
    """The kind of passes that a captured one serves: as many rows as inputs, of equal widths and lengths.

    Under an autocast around the call, `autocast` is its dtype.
    """

    rows: int
    width: int
    tokens: int
    autocast: torch.dtype | None = None


class CapturedRows:
    """A first pass by rows of a decoder with an encoder: a prompt of each of some inputs.

    Such a pass takes the host longer, to launch the kernels of all layers, than the device to run them. Inputs have
    one length, as recordings do, and prompts too, without padding; others run eagerly. Keys and values of both are
    stored, see `cache.captured_prefill.PaddedRows`. Arguments are as for `CapturedPrefill`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: RowShape,
        cache: SharedContextCache,
        longest: int,
        structure: Structure,
        pool: Any,
    ):
        assert cache.inputs is not None
        self.shape, self.lengths, device = shape, RowLengths(longest), model.device
        self._ids, self._places = torch.zeros(2, shape.rows, shape.width, dtype=torch.long, device=device)
        self._hidden = torch.zeros_like(cache.inputs.hidden)
        self._padded = padded = PaddedRows()
        view = CapturedCache(cache, Pass(padded=padded))
        view.inputs = self._inputs = InputsOfAPass(view, cache.inputs, self._hidden, structure.layout)
        self._kinds = kinds = list[Any]()  # of the model's output
        arguments = {"input_ids": self._ids, "use_cache": True, "return_dict": True}

        def run(places: Tensor = self._places) -> tuple[Tensor, ...]:  # no reference to self, see `CapturedGraph`
            padded.begin()
            output = forward_pass(model, view, places, **arguments)
            kinds[:] = [type(output)]
            logits = output.logits.contiguous()  # of all tokens: what is wanted differs from loop to loop
            return logits, *padded.take()

        sizes = {"rows": shape.rows * shape.width, "fused_rows": 0}
        self._graph = captured_graph(run, model, structure, self.lengths, pool, **sizes, runs_first=True)

    def fits(self, forest: Forest | None, longest: int) -> bool:
        """Whether it computes a pass of its shape as the model would, and its memory is not read by another cache."""
        return self.lengths.serve(longest) and self._inputs.are_free

    def __call__(self, cache: SharedContextCache, ids: Tensor, places: Tensor, wanted: int) -> Any:
        """Prefill the cache's current items, for which `fits` holds.

        Takes ids ``[rows, width]`` and their positions ``[rows or 1, width]``, int64. Returns the model's output, with
        logits ``[rows, wanted, vocabulary]`` of the last `wanted` positions alone.
        """
        assert cache.inputs is not None
        self._ids.copy_(ids)
        self._places.copy_(places)
        self._hidden.copy_(cache.inputs.hidden)
        logits, *buffers = self._graph.replay()
        self._padded.store(cache, buffers)
        self._inputs.lend(cache)
        return self._kinds[0](logits=logits[:, -wanted:].clone())
