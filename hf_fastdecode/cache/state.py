"""State shared by all layers of one cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..attention.forest import Forest, Path, Span
from ..attention.launch.dispatch import Choices
from ..attention.launch.own_nodes import own_nodes_dominate
from ..attention.launch.plan import HeadShape
from ..attention.launch.step_tables import StepTables
from .suffixes import Suffixes


@dataclass(frozen=True)
class PrefillItem:
    """A run of tokens to prefill in one forward pass: where they are stored, and the path of those before them."""

    span: Span
    context: Path = ()

    @property
    def position(self) -> int:
        """Position of the first token in its row."""
        return sum(span.length for span in self.context)


class MadeTables(NamedTuple):
    """Kernel tables, and whether they were made while own nodes held most keys."""

    tables: StepTables
    dominate: bool


@dataclass
class SharedState:
    """State shared by all layers of one cache.

    Attributes:
        forest: Nodes over the rows; None while the number of rows is unknown.
        padded_length: Tokens in the longest row, including the padding of the caller's ``input_ids``.
        max_suffix: Upper bound on suffix tokens, if known; bounds allocation.
        backend: One of `torch_operators.BACKENDS`.
        tables: Kernel inputs other than keys and values, by device and heads of a layer.
        packed: During prefill, the items packed into the forward pass.
        suffix_rows: While prompts are prefilled into suffixes, the row of each segment number that stands for one.
        segment_lengths: Tokens of each storage segment.
        places_of_pass: During prefill by rows, the places of the pass's tokens, counted row by row: ``[tokens]``
            int64; None when tokens are packed into one row.
        met: The model whose layers the cache has; not kept alive, and unknown to copies.
        position_planes: Planes of positions that the model takes, all equal; 0 for positions without planes.
    """

    forest: Forest | None = None
    suffixes: Suffixes = field(default_factory=Suffixes)
    padded_length: int = 0
    max_suffix: int | None = None
    backend: str = "auto"
    choices: Choices = field(default_factory=Choices)
    tables: dict[tuple[torch.device, HeadShape], MadeTables] = field(default_factory=dict)
    packed: Sequence[PrefillItem] = ()
    suffix_rows: Mapping[int, int] = field(default_factory=dict)
    segment_lengths: list[int] = field(default_factory=list)
    places_of_pass: Tensor | None = None
    met: ref[nn.Module] | None = None
    position_planes: int = 0

    def __getstate__(self) -> dict[str, Any]:
        # Addresses are invalid in a copy of the cache, whose tensors are new; weak references cannot be pickled.
        return self.__dict__ | {"tables": {}, "met": None}

    @property
    def torch_backend(self) -> str:
        """Backend for PyTorch's operators, which always compute prefill."""
        return "auto" if self.backend == "triton" else self.backend

    @property
    def own_nodes_dominate(self) -> bool:
        """Whether own nodes, where they are used, hold most keys."""
        if self.forest is None or not self.suffixes.in_order:
            return False
        return own_nodes_dominate(self.forest, self.suffixes.longest)

    @property
    def longest_row(self) -> int:
        """Tokens in the longest row, or an upper bound as for suffixes; waits for the device where suffixes differ."""
        if self.forest is None:
            return 0
        if self.suffixes.lengths.per_row is None:
            return max(self.forest.context_lengths, default=0) + self.suffixes.longest
        lengths = torch.tensor(self.forest.context_lengths, device="cpu") + self.suffixes.per_row(self.forest.rows)
        return max(lengths.tolist(), default=0)

    @property
    def longest_row_bound(self) -> int:
        """At least `longest_row`, without waiting for the device."""
        per_row = self.suffixes.lengths.per_row
        if per_row is None or not per_row.is_cuda:
            return self.longest_row
        return max(self.forest.context_lengths if self.forest is not None else (), default=0) + self.suffixes.longest
