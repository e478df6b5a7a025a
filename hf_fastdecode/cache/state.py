"""State shared by all layers of one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..attention.forest import Forest, Path, Span
from ..attention.launch import kernel_tables
from .origins import SuffixOrigins


@dataclass(frozen=True)
class PrefillItem:
    """A run of tokens to prefill in one forward pass.

    Attributes:
        span: Storage of the tokens.
        context: Path of the tokens before them.
    """

    span: Span
    context: Path = ()

    @property
    def position(self) -> int:
        """Position of the first token in its row."""
        return sum(span.length for span in self.context)


@dataclass
class SharedState:
    """State shared by all layers of one cache.

    Attributes:
        forest: Nodes over the rows; None while the number of rows is unknown.
        suffix_length: Tokens in each row's suffix, not counting those of a forward pass in progress.
        padding: Width of the caller's ``input_ids`` minus the longest row.
        origins: Index table of reordered suffixes; None while every row's tokens are in its own storage row.
        max_suffix: Upper bound on suffix tokens, if known; bounds allocation.
        backend: One of `backends.ALL_BACKENDS`.
        tables: Kernel inputs other than keys and values.
        packed: During prefill, the items packed into the forward pass.
        segment_lengths: Tokens of each storage segment.
    """

    forest: Forest | None = None
    suffix_length: int = 0
    padding: int = 0
    origins: SuffixOrigins | None = None
    max_suffix: int | None = None
    backend: str = "auto"
    tables: kernel_tables.ForestTables = field(default_factory=kernel_tables.ForestTables)
    packed: Sequence[PrefillItem] = ()
    segment_lengths: list[int] = field(default_factory=list)

    @property
    def torch_backend(self) -> str:
        """Backend for PyTorch's operators, which always compute prefill."""
        return "auto" if self.backend == "triton" else self.backend

    @property
    def padded_length(self) -> int:
        """Tokens in the longest row, including the padding of the caller's ``input_ids``."""
        context = 0 if self.forest is None else max(self.forest.context_lengths, default=0)
        return context + self.padding + self.suffix_length
