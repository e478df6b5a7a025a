"""Sequence parallelism: the processes between which the context of each call is divided (Tree Attention).

Each process stores its part of every node, and all of every suffix. In a decode step it attends to what it stores of
the nodes, one collective a layer merges that of all processes, and each attends to the suffixes itself. Whatever else
the model computes, each process computes whole.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.forest import Forest, Path, Span, joined
from ..attention.kv import Segment
from ..attention.partial import Partial
from ..errors import Unsupported
from .collectives import gathered
from .merge import merge_over, partial_buffer
from .shards import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


GATHERED_TOKENS = 1 << 16
"""Tokens of stored context that a prefill pass gathers at once, at most."""


class OwnTokens(NamedTuple):
    """Which of the new tokens of a pass this process stores.

    Attributes:
        spans: Where it stores them.
        places: Their indices among the tokens of the pass: ``[tokens]`` int64, on the CPU.
    """

    spans: Path
    places: Tensor


class SequenceParallel:
    """The processes between which contexts are divided, and what this one stores of them.

    Args:
        group: The processes; all of them run the same calls.
    """

    def __init__(self, group: ProcessGroup):
        self.group, self.shard = group, Shard(group.rank(), group.size())
        self._forests: tuple[Forest, Forest, Forest] | None = None  # the latest, its part here, its rows without nodes

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.shard.rank

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.shard.ranks

    @cached_property
    def global_ranks(self) -> tuple[int, ...]:
        """Numbers of the processes in the default group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def stored(self, forest: Forest) -> Forest:
        """What this process stores of a forest; the same object for the same forest."""
        return self._divided(forest)[1]

    def without_nodes(self, forest: Forest) -> Forest:
        """The forest's rows without nodes, as suffixes are attended to; the same object for the same forest."""
        return self._divided(forest)[2]

    def _divided(self, forest: Forest) -> tuple[Forest, Forest, Forest]:
        known = self._forests  # which another thread may replace
        if known is None or known[0] is not forest:
            known = self._forests = forest, self.shard.forest(forest), Forest(forest.rows)
        return known

    def own_tokens(self, spans: Path) -> OwnTokens:
        """What this process stores of tokens that a pass computes for these spans, one after the other."""
        places, before = [torch.empty(0, dtype=torch.long, device="cpu")], 0
        for span in spans:
            places.append(self.shard.places(span.start, span.stop) - span.start + before)
            before += span.length
        return OwnTokens(joined(self.shard.span(span) for span in spans), torch.cat(places))

    def merge(self, own: Partial) -> Partial:
        """The partial over what all processes store, bitwise the same on all of them: one collective.

        Args:
            own: That over what this process stores; ``(0, -inf)`` where it stores nothing.
        """
        buffer = partial_buffer(own.out.shape, own.out.device, own.out.dtype)
        buffer.partial.out.copy_(own.out)
        buffer.partial.lse.copy_(own.lse)
        return merge_over(self.group, buffer)

    def whole(self, stored: Segment, span: Span) -> Segment:
        """Keys and values of a whole span: ``[kv_heads, length, head_dim]`` each; one collective.

        Args:
            stored: The segment that this process stores of the whole one, ``[kv_heads, tokens, head_dim]`` each.
        """
        longest = -(-span.length // self.ranks)
        own, padded = stored.view(self.shard.span(span)), []
        for part in own:
            room = part.new_zeros(part.shape[0], longest, part.shape[2])
            room[:, : part.shape[1]] = part
            padded.append(room.flatten())
        # The span's first token is on this rank, the next one on the next.
        order = [(span.start + rank) % self.ranks for rank in range(self.ranks)]
        by_rank = gathered(torch.cat(padded), self.group)[order]
        parts = by_rank.split([len(part) for part in padded], dim=1)
        return Segment._make(
            part.reshape(self.ranks, own.shape[0], longest, own.shape[2])
            .permute(1, 2, 0, 3)
            .flatten(1, 2)[:, : span.length]
            for part, own in zip(parts, stored, strict=True)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a cache that is divided between {self.ranks} processes cannot be saved: each has a part of it; keep the "
            "prompts, and prefill them again"
        )


def window_is_not_divided(window: int) -> Unsupported:
    """The error of rows that outgrow a window, where their context is divided between processes."""
    return Unsupported(
        f"a window of {window} tokens hides some of a row, whose context is divided between processes",
        "use sequence_parallel=False for such models and lengths",
    )
