"""Decode steps captured in CUDA graphs, kept between calls.

A captured step reads all per-step and per-call state from device tables (`StepTables`), so one capture serves other
prompts, lengths and sample counts in its bucket of rows. Another capture is needed only for more rows, more nodes or
levels than the tables hold, a widest node that needs other launch parameters, completions that have outgrown what rows
share, rows that outgrow a sliding window, or changes of the model's state.

Suffixes of layers that attend by themselves are captured in place: such a capture serves one call, until their storage
moves. States are in buffers that all captures share (`StepBuffers`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.utils import ModelOutput

from ..._compat import CACHE
from ...attention.overrides import RowLengths
from ...cache.captured import (
    CapturedCache,
    CapturedInputs,
    ExpandedTables,
    InputTables,
    TokenTables,
    storages_in_place,
)
from ...cache.layers.state import StepBuffers
from ...cache.shared import SharedContextCache
from ...cache.state import Pass
from ...errors import Unsupported
from ..forward_pass import forward_pass, takes_positions
from ..routing.routers import Collected, routers_of, visiting
from ..snapshot import SET_BY_CALLS
from ..structure import Structure
from .graph_capture import CapturedGraph, captured_graph


class CaptureOptions(NamedTuple):
    """Options of a capture, other than the number of rows."""

    fused_rows: int  # maximum rows for which projections of the same input run concurrently
    arguments: tuple[tuple[str, Any], ...]
    queries: int = 1  # tokens of each row
    # Number of planes of positions that are given; () for positions without planes, or with equal ones.
    planes: tuple[int, ...] = ()
    reordered: bool = False  # whether suffixes may be reordered, see `SuffixOrigins`
    records: bool = False  # whether a step also returns what routers choose
    autocast: torch.dtype | None = None  # of the autocast around the call, if any


def bucket(rows: int) -> int:
    """Round up to a captured number of rows: powers of two, with sizes in between above 128."""
    power = 1 << max(0, rows - 1).bit_length()
    if power <= 128:
        return power
    spacing = max(64, power // 8)  # a matrix product of up to 63 fewer rows takes as long
    return -(-rows // spacing) * spacing


class CapturedStep:
    """One decode step of a model for up to `rows` rows, once `capture` has run.

    Its memory is allocated here, which processes of one model can agree on before they run passes.

    Args:
        cache: The batch to capture with; other batches can be loaded later.
        pool: Memory pool shared by all captures, including outputs; they never run concurrently.
        buffers: What the step updates of rows.

    Attributes:
        in_place: Versions of the storages whose suffixes are captured in place; () if there are none.
        chosen: What routers chose in the last step, ``[rows, layers, experts_per_token]``, where it records that.
    """

    chosen: Tensor | None = None
    _gives_planes = False  # whether positions are given with their planes
    _origins: Tensor | None = None  # of suffixes that may be reordered, see `SuffixOrigins`

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        cache: SharedContextCache,
        structure: Structure,
        options: CaptureOptions,
        pool: Any,
        buffers: StepBuffers,
    ):
        device, queries = model.device, options.queries
        self.rows, self.options, self.buffers = rows, options, buffers
        self.in_place = storages_in_place(cache)
        tokens = TokenTables(rows, cache, device, queries, reordered=options.reordered)
        inputs, expanded = InputTables(rows, cache, device), ExpandedTables(rows, cache, device)
        self._reads, self.tables = (tokens, inputs, expanded), tokens.tables
        self._read = [one for one in self._reads if one.tables.layers]
        self.ids = torch.zeros(rows, queries, dtype=torch.long, device=device)
        self.positions = torch.zeros(*options.planes, rows, queries, dtype=torch.long, device=device)
        tensors_of = self._prepare(model, cache)
        current = Pass(tables=self.tables, origins=self._origins, expanded=expanded.by_layer)
        view = CapturedCache(cache, current, buffers.layers_of(cache.state_layers, rows))
        if self._gives_planes:
            view.position_planes = 0
        if cache.inputs is not None:
            view.inputs = CapturedInputs(view, cache, inputs.tables)
        mask: dict[str, Any] = {}
        self.next_slot: Tensor | None = None
        if cache.inputs is not None and not takes_positions(model):
            self.next_slot = view.next_slot = torch.zeros(1, dtype=torch.long, device=device)
            # Without one, decoders make a mask of as many tokens, which only the device knows.
            mask = {"attention_mask": torch.ones(rows, queries, dtype=torch.bool, device=device)}
        self._follow(cache)
        self.lengths = lengths = RowLengths(cache.longest_row(queries))
        self._constants = view.constants

        ids, positions = self.ids, self.positions
        routers = routers_of(model) if options.records else []

        # The passes of a capture write keys and values that the first real one overwrites.
        def run() -> tuple[Tensor, ...]:  # no reference to self, so that memory is freed without a cycle
            view.begin()
            given = dict(options.arguments) | mask
            collected = Collected(routers)
            with visiting(routers, collected):
                output = forward_pass(model, view, positions, input_ids=ids, return_dict=True, **given)
            chosen = (collected.of_layers(),) if routers else ()
            return (*tensors_of(output), *chosen)

        sizes: dict[str, Any] = {"rows": rows * queries, "fused_rows": options.fused_rows}
        self._make_graph: Callable[[], CapturedGraph] | None = partial(
            captured_graph, run, model, structure, lengths, pool, **sizes
        )

    def capture(self) -> None:
        """Run the step's passes and capture one."""
        assert self._make_graph is not None
        make, self._make_graph = self._make_graph, None
        self.buffers.release()  # which the first passes change
        self._graph = make()

    def _prepare(self, model: PreTrainedModel, cache: SharedContextCache) -> Callable[[Any], tuple[Tensor, ...]]:
        """Prepare the capture for a batch; returns what it keeps of the model's output, contiguous."""
        return lambda output: (output.logits[:, -1].contiguous(),)

    def fits(self, cache: SharedContextCache) -> bool:
        """Whether this batch can use the step: its windows, table sizes, buffers, and suffixes captured in place."""
        if not self.reads(cache) or not self.buffers.serve(self.rows, cache.state_layers):
            return False
        most, longest = self.longest_row, cache.longest_row(self.options.queries)
        return (most is None or longest <= most) and self.holds(cache)

    def holds(self, cache: SharedContextCache) -> bool:
        """Whether the batch's nodes fit the tables."""
        return all(tables.fits(cache) for tables in self._reads)

    @property
    def longest_row(self) -> int | None:
        """Most tokens of a row, which has a window that hides none of them; None for any number."""
        return self.lengths.same_up_to

    def reads(self, cache: SharedContextCache) -> bool:
        """Whether the suffixes that were captured in place are those of this batch, and have not moved."""
        return self.in_place == storages_in_place(cache)

    def suits(self, cache: SharedContextCache) -> bool:
        """Whether a capture for this batch would read such tables: of the same processes and launch parameters."""
        return all(tables.suits(cache) for tables in self._reads)

    def __call__(self, cache: SharedContextCache, ids: Tensor, positions: Tensor) -> Tensor:
        """Run one step over a batch for which `fits` holds, with capacity for it in its suffixes.

        Takes ids and positions ``[batch]`` int64, batch up to `rows`. Returns ``[batch, vocabulary]``, overwritten by
        the next step.
        """
        count = len(ids)
        self.buffers.load(cache.state_layers, cache.fork_states, self.rows)
        self.ids[:count, 0].copy_(ids)
        self.positions[:count, 0].copy_(positions)
        self._follow(cache)
        logits, *chosen = self._graph.replay()
        self.chosen = chosen[0][:count] if chosen else None
        return logits[:count]

    def _follow(self, cache: SharedContextCache) -> None:
        if not (cache.state.suffixes.in_order or self.options.reordered):
            raise ValueError("captured steps read each suffix from its own row; select rows by copying them first")
        for tables in self._read:
            tables.follow(cache)
        if self.next_slot is not None:
            self.next_slot.fill_(cache.get_seq_length())
            self.positions.copy_(self.next_slot + torch.arange(self.options.queries, device=self.next_slot.device))


_FEWEST_ORIGINS = 256


class OutputFields:
    """The tensors ``[rows, tokens, ...]``, of such a `shape`, of a pass's output, and how it is made of them."""

    def __init__(self, shape: tuple[int, int]):
        self._shape = shape
        self._kind: type[ModelOutput] = ModelOutput
        self._places: dict[str, int | tuple[int, ...] | nn.Module | None] = {}

    def take(self, model: nn.Module, output: ModelOutput) -> list[Tensor]:
        """The output's tensors, contiguous; raises `Unsupported` for a field of another kind or shape."""
        tensors: list[Tensor] = []
        self._kind, self._places = type(output), {}

        def place(name: str, value: Any) -> int:
            if not isinstance(value, Tensor) or value.shape[:2] != self._shape:
                what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise Unsupported(f"the model's output has {name!r} ({what}), which is not of each row's tokens")
            tensors.append(value.contiguous())
            return len(tensors) - 1

        for name, value in output.items():
            if name.startswith("encoder_"):  # which a step has as a placeholder
                continue
            if isinstance(value, Cache) or name == CACHE:  # which may be a view of it
                self._places[name] = None
            elif name in SET_BY_CALLS and (owner := _owner(model, name, value)) is not None:
                self._places[name] = owner
            elif isinstance(value, tuple | list):
                self._places[name] = tuple(place(name, one) for one in value)
            else:
                self._places[name] = place(name, value)
        if "logits" not in self._places:
            raise Unsupported("the model's output has no logits")
        return tensors

    def output(self, tensors: list[Tensor], cache: SharedContextCache, kept: int) -> ModelOutput:
        """An output of these tensors ``[rows, tokens, ...]``, with the logits of the last `kept` tokens."""
        fields: dict[str, Any] = {}
        for name, place in self._places.items():
            if place is None:
                fields[name] = cache
            elif isinstance(place, nn.Module):
                fields[name] = getattr(place, name)
            elif isinstance(place, tuple):
                fields[name] = tuple(tensors[one] for one in place)
            else:
                fields[name] = tensors[place]
        if kept < fields["logits"].shape[1]:
            fields["logits"] = fields["logits"][:, -kept:].contiguous()
        return self._kind(**fields)


def _owner(model: nn.Module, name: str, value: Any) -> nn.Module | None:
    """The module whose attribute of this name is the value, which the pass has not computed."""
    return next((module for module in model.modules() if getattr(module, name, None) is value), None)


class CapturedPass(CapturedStep):
    """A captured pass of another decoding loop; arguments as for `CapturedStep`.

    It differs from a captured decode step in three ways:

    - Rows may have several tokens, such as drafts, up to the number that was captured. Earlier tokens do not see later
      ones, and the next pass overwrites what the surplus ones wrote to the suffixes.
    - Suffixes may have been reordered: the kernels read a copy of the index table (`SuffixOrigins`).
    - Loops may keep the output, which the next replay overwrites: they get a copy.
    """

    _gives_planes = True
    _in_order = False

    def _prepare(self, model: PreTrainedModel, cache: SharedContextCache) -> Callable[[Any], tuple[Tensor, ...]]:
        self.fields = fields = OutputFields((self.rows, self.options.queries))
        if self.options.reordered:
            tokens = max(_FEWEST_ORIGINS, cache.suffix_length, cache.state.max_suffix or 0)
            capacity = 1 << (tokens - 1).bit_length()
            self._origins = torch.zeros(self.rows, capacity, dtype=torch.int32, device=self.ids.device)
        return lambda output: tuple(fields.take(model, output))

    @property
    def longest_suffix(self) -> int | None:
        """Most tokens of a suffix before the pass; None for any number."""
        return None if self._origins is None else self._origins.shape[1]

    def fits(self, cache: SharedContextCache) -> bool:
        longest = self.longest_suffix
        return (longest is None or cache.suffix_length <= longest) and super().fits(cache)

    def run(self, cache: SharedContextCache, ids: Tensor, positions: Tensor) -> list[Tensor]:
        """Run one pass over a batch for which `fits` holds, with capacity for as many tokens as captured.

        Takes ids ``[batch, tokens]`` and positions ``[..., batch or 1, tokens]``, int64, up to as many as captured.
        Returns copies of the output's tensors, ``[batch, tokens, ...]``.
        """
        rows, tokens = ids.shape
        self.buffers.load(cache.state_layers, cache.fork_states, self.rows)
        self.ids[:rows, :tokens].copy_(ids)
        self.positions[..., :rows, :tokens].copy_(positions)
        self._follow(cache)
        return [one[:rows, :tokens].clone() for one in self._graph.replay()]

    def _follow(self, cache: SharedContextCache) -> None:
        super()._follow(cache)
        if self._origins is None:
            return
        if (origins := cache.state.suffixes.origins) is not None:
            origins.copy_to(self._origins)
        elif not self._in_order:
            self._origins.copy_(torch.arange(self.rows, dtype=torch.int32, device=self._origins.device)[:, None])
        self._in_order = origins is None
