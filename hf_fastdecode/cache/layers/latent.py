"""Layers with latents (multi-head latent attention): a token's latent and rotated key, of which all heads' keys and
values are made.

Such a layer hands a token's latent and rotated key to ``update`` (DeepSeek-V2, section 2.1), and both are stored.
Passes of prefill attend to keys and values made of them: each token's once in its pass, and those of a stored context
anew in each pass that continues it, as transformers does in every step. Steps attend to the latents themselves. For
queries that have taken in the product from latents to keys, latents with rotated keys are the keys of a single KV
head, and latents alone its values. Kernels read them as those of several KV heads, of `GROUP` query heads at most
each, that lie in the same memory.

A row's step over a node of latents takes ``heads * (2 * latent + rotated)`` multiplications a token, and over its keys
and values ``heads * (key + rotated + value)``; for DeepSeek's sizes 3.4 times fewer. The latents' few bytes are read
once for all heads, the others' once for each. So nodes are *expanded*, attended to as keys and values (TyphoonMLA),
from some rows on, which are about as many for any number of heads. Making them takes ``latent * heads * (key +
value)`` multiplications a token, which as many rows and steps must save again. All other nodes and each row's own
tokens are read as latents, and the two partials are merged. Rotated keys, which all heads have in common, stay where
they are stored.

Nodes keep their latents, of which alone kept caches consist. Their keys and values belong to one call and are never
copied: neither other weights nor adapters can find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, Final, NamedTuple, Protocol
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.forest import Forest, Node, Path, Span, joined
from ...attention.kv import Segment
from ...attention.launch.plan import HeadShape
from ..storage import StorageOfLayer, SuffixOrigins, TokenStorage


def as_wide(part: Tensor, width: int) -> Tensor:
    """A part ``[..., elements]`` with zeros after its elements, up to `width`."""
    return part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1]))


def multiplying(projection: nn.Module, latents: Tensor) -> AbstractContextManager[Any]:
    """Context in which a projection takes latents of this dtype: autocast's, if it cached them in half precision."""
    wide = next(projection.parameters()).dtype == torch.float32
    if wide and latents.dtype in (torch.float16, torch.bfloat16):
        return torch.autocast(latents.device.type, latents.dtype)
    return nullcontext()


class ExpandsLatents(Protocol):
    """An attention layer of transformers that caches latents; `ModelLayout.of` finds those with an override of it."""

    layer_idx: int
    kv_b_proj: nn.Module
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[rows, heads, tokens, key_dim]`` and values ``[rows, heads, tokens, value_dim]``.

        Of latents ``[rows, 1, tokens, latent]`` and `rotated`, ``[rows, 1, tokens, rest]``: the part of the keys that
        depends on positions, of all heads.
        """
        ...


def _of_one_head(parts: Segment) -> Segment:
    """Keys of one head, latents with rotated keys, and its values, latents alone."""
    return Segment(torch.cat(parts, -1), parts[0])


class LatentStorage(StorageOfLayer):
    """Latents and rotated keys: the parts of a token are ``[1, tokens, latent]`` and ``[1, tokens, rest]``.

    The layer (`ExpandsLatents`) is needed for prefill; `kv_heads` are those of `kv_heads_of_kernels`.
    """

    kernels_read_contexts: ClassVar[bool] = False

    def __init__(self, layer: ref[ExpandsLatents] | None, kv_heads: int):
        super().__init__(layer)
        self.kv_heads = kv_heads

    def empty(self) -> TokenStorage:
        return LatentStorage(self.layer, self.kv_heads)

    def keys_and_values(self, parts: Segment) -> Segment:
        """Keys and values, both as wide as the wider, as fused operators take them."""
        expanded = self.made_of(parts)
        width = max(part.shape[-1] for part in expanded)
        return Segment._make(as_wide(part, width) for part in expanded)

    def made_of(self, parts: Segment) -> Segment:
        """Keys and values by the layer's own code, ``[heads, tokens, width]``, of a width each."""
        layer = self.known_layer("latents without keys and values")
        with multiplying(layer.kv_b_proj, parts.keys):
            expanded = type(layer).expand_kv(layer, *(part[None] for part in parts))  # the instance's is an override
        return Segment._make(part[0] for part in expanded)

    def read_by_kernels(self, parts: Segment) -> Segment:
        return Segment._make(part.expand(*part.shape[:-3], self.kv_heads, -1, -1) for part in parts)

    def nodes_for_steps(self) -> Mapping[int, Segment]:
        return {number: _of_one_head(parts) for number, parts in self.segments.items()}

    def for_steps(self, origins: SuffixOrigins | None) -> tuple[Mapping[int, Segment], Segment]:
        return self.nodes_for_steps(), _of_one_head(self.ordered_suffix(origins))


class Widths(NamedTuple):
    """Widths of a head's key without its last part, of that part, which is the same in all heads, and of its value."""

    key: int
    rotated: int
    value: int

    @classmethod
    def of(cls, layer: ExpandsLatents) -> Widths:
        return cls(layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim)

    @property
    def stored(self) -> int:
        """Numbers of keys without the rotated ones, and of values, as stored: of both alike, as kernels take them."""
        return max(self.key, self.value)

    def as_kernels_take(self, query: Tensor) -> Tensor:
        """Queries ``[rows, heads, queries, key + rotated]`` with zeros after `key`, up to `stored`."""
        if self.stored == self.key:
            return query
        plain, rest = query.split([self.key, self.rotated], -1)
        return torch.cat([as_wide(plain, self.stored), rest], -1)


class ExpandedLayer:
    """What one layer has of these nodes; as `RestTables` reads it, without suffixes.

    `segments` are keys without their rotated part, and values, ``[heads, tokens, stored]`` each, by run; `rests` the
    rotated part, ``[1, tokens, rotated]``, as latents have it.
    """

    suffix: None = None

    def __init__(self, segments: dict[int, Segment], rests: dict[int, Tensor], widths: Widths):
        self.segments, self.rests, self.widths, self.version = segments, rests, widths, object()

    @classmethod
    def of(cls, storage: LatentStorage, runs: Sequence[Span]) -> ExpandedLayer:
        segments, rests, widths = dict[int, Segment](), dict[int, Tensor](), Widths(0, 0, 0)
        for number, run in enumerate(runs):
            latents = storage.segments[run.segment].view(run)
            keys, values = storage.made_of(latents)  # [heads, tokens, key + rotated], [heads, tokens, value]
            rotated = latents.values.shape[-1]
            widths = Widths(keys.shape[-1] - rotated, rotated, values.shape[-1])
            parts = keys[..., : widths.key], values
            segments[number] = Segment._make(as_wide(part, widths.stored).contiguous() for part in parts)
            rests[number] = latents.values
        return cls(segments, rests, widths)

    @property
    def shape(self) -> HeadShape:
        """The shape of the heads, as many of queries as of keys, for a query of each row."""
        return HeadShape(self.segments[0].keys.shape[0], 1, self.widths.stored, False, rest=self.widths.rotated)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for segment in self.segments.values() for part in segment)

    @property
    def whole(self) -> dict[int, Segment]:
        """Whole keys and values, for PyTorch's operators: ``[heads, tokens, width]``, of a width each."""
        key, _, value = self.widths
        return {
            number: Segment(
                torch.cat([keys[..., :key], self.rests[number].expand(len(keys), -1, -1)], -1), values[..., :value]
            )
            for number, (keys, values) in self.segments.items()
        }


class SplitForest(NamedTuple):
    """The nodes of a forest that steps read as they are stored, and the others, with spans of the numbered runs."""

    as_stored: Forest
    expanded: Forest


class ExpandedNodes:
    """The expanded nodes of a cache: runs of stored tokens, and what each layer has of them, by index.

    `fewest_rows` are the rows of a node from which reading it as keys and values is faster.
    """

    def __init__(self, runs: Sequence[Span], layers: Mapping[int, ExpandedLayer], fewest_rows: int):
        self.runs, self.layers, self.fewest_rows = runs, layers, fewest_rows
        self._split: tuple[Forest, SplitForest] | None = None

    def split(self, forest: Forest) -> SplitForest:
        """Split the nodes of a forest; the same object for the same forest."""
        if self._split is None or self._split[0] is not forest:
            spans = {node.span for node in forest.nodes if node.row_count >= self.fewest_rows}
            places = {span: place for span in spans if (place := self._place(span)) is not None}
            as_stored = [tuple(span for span in path if span not in places) for path in forest.paths]
            expanded = [tuple(places[span] for span in path if span in places) for path in forest.paths]
            self._split = forest, SplitForest(Forest.from_paths(as_stored), Forest.from_paths(expanded))
        return self._split[1]

    def _place(self, span: Span) -> Span | None:
        """A stored span among the numbered runs; None if it is not all in one."""
        for number, run in enumerate(self.runs):
            if run.segment == span.segment and run.start <= span.start and span.stop <= run.stop:
                return Span(number, span.start - run.start, span.length)
        return None


FEWEST_ROWS: Final = 32
"""Rows of a node from which its keys and values are made.

Measured on an H200, a node of 8,192 tokens as latents (512 + 64 elements) and as keys (128 + 64) and values (128):
with 16 heads 28 and 21 us for 16 rows, 42 and 28 for 32, 71 and 23 for 64, 128 and 26 for 128; with 128 heads 129
and 127, 246 and 159, 484 and 131, 950 and 171. The merge with a partial of its own takes some microseconds more.
"""

FEWEST_ROWS_LATER: Final = 16
"""Rows of a node from which those that were made are read: finished rows leave it."""

FEWEST_TOKENS: Final = 256
"""Tokens of a node from which a partial of its own, and a merge, cost less than they save."""

FEWEST_ROW_STEPS: Final = 1024
"""Rows of a node, times the steps to come, from which its keys and values are made.

For DeepSeek's sizes 171 save as many multiplications as making them takes.
"""

MOST_STEPS_EXPECTED: Final = 1024
"""Steps that rows are expected to take where more are allowed."""

SHARE_OF_FREE_MEMORY: Final = 0.25
"""Share of the memory that is free before the first step, but for rows' tokens, for keys and values of nodes."""


def expanded_where_it_pays(
    latents: Mapping[int, LatentStorage], forest: Forest, steps: int, free: Callable[[], float]
) -> ExpandedNodes | None:
    """The keys and values of nodes for which that pays in so many steps, the most read ones first.

    `latents` are the layers' storages by index; `free` says how many bytes are free beside rows' tokens, and is not
    asked where none pay.
    """
    wanted = paying_nodes(forest, steps)
    if not wanted:
        return None
    with torch.inference_mode(False), torch.no_grad(), suppress(torch.OutOfMemoryError):  # latents go without
        if runs := _that_fit(wanted, list(latents.values()), _most_bytes(free())):
            layers = {index: ExpandedLayer.of(storage, runs) for index, storage in latents.items()}
            return ExpandedNodes(runs, layers, min(FEWEST_ROWS_LATER, FEWEST_ROWS))
    return None


def _most_bytes(free: float) -> float:
    return SHARE_OF_FREE_MEMORY * max(0, free)


def paying_nodes(forest: Forest, steps: int) -> list[Node]:
    """The nodes whose keys and values save more time in so many steps than they take to make."""
    return [
        node
        for node in forest.nodes
        if node.row_count >= FEWEST_ROWS
        and node.row_count * min(steps, MOST_STEPS_EXPECTED) >= FEWEST_ROW_STEPS
        and node.span.length >= FEWEST_TOKENS
    ]


def runs_of(spans: Iterable[Span]) -> Path:
    """The tokens of these spans, as few runs."""
    return joined(sorted(set(spans), key=lambda span: (span.segment, span.start)))


def _that_fit(wanted: list[Node], latents: list[LatentStorage], room: float) -> Path:
    """The tokens of these nodes whose keys and values fit in memory, as runs."""
    per_token = len(latents) * ExpandedLayer.of(latents[0], [wanted[0].span[:1]]).nbytes  # layers are alike
    fitting = set[Span]()
    for node in sorted(wanted, key=lambda node: -node.row_count * node.span.length):
        needed = 0 if node.span in fitting else per_token * node.span.length
        if needed <= room:
            room -= needed
            fitting.add(node.span)
    return runs_of(fitting)
