"""What all layers of one cache share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..attention.forest import Forest, Path, Span
from ..attention.launch import kernel_tables
from .origins import SuffixOrigins


@dataclass(frozen=True)
class PrefillItem:
    """A run of tokens whose keys and values one forward pass computes.

    Attributes:
        span: Where they are stored.
        context: What lies before them on their path.
    """

    span: Span
    context: Path = ()

    @property
    def position(self) -> int:
        """Position of the first token in its row."""
        return sum(span.length for span in self.context)


@dataclass
class SharedState:
    """What all layers of one cache share.

    Attributes:
        forest: Which rows attend to which spans; None while the number of rows is unknown.
        suffix_length: Tokens that each row holds behind its path of nodes; in a forward pass, those before it.
        padding: By how much the rows' ``input_ids`` are wider than the longest row.
        origins: Where the tokens of suffixes lie once rows were reordered; None while each row holds its own.
        max_suffix: Most tokens a suffix will hold, if known: the bound of its allocation.
        backend: One of `backends.ALL_BACKENDS`.
        tables: What the kernels read beside keys and values.
        packed: While prefilling, the items whose tokens lie end to end in the forward pass.
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
        """The backend for what PyTorch's operators compute, prefill always among it."""
        return "auto" if self.backend == "triton" else self.backend

    @property
    def padded_length(self) -> int:
        """Tokens in the longest row, with the padding that its caller's ``input_ids`` has."""
        context = 0 if self.forest is None else max(self.forest.context_lengths, default=0)
        return context + self.padding + self.suffix_length
