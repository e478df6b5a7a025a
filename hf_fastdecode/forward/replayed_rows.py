"""Passes without a cache in which routers choose what they chose in rollouts, see `replay_routing`.

In a packed pass tokens are the same only if their choices are, too: these are part of the keys that make the trie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import Unsupported
from ..generation.options import Options
from ..generation.routing.choices import Numbers, RouterChoices
from ..generation.routing.routers import Replayed, routers_of, visiting, visitor_of_thread
from ..generation.structure import Structure
from .packed import recomputed_inside
from .rows import Batch, read_rows


class AsEver:
    """The routing of a pass that replays nothing; `count` are the real tokens whose routing is replayed."""

    count = 0

    def kept(self, options: Options, last: object) -> tuple[Options, object]:
        """Options and rows of the last pass, as far as what is kept is of this routing."""
        return options, last

    def keyed(self, batch: Batch) -> Batch:
        """The batch with rows in which tokens are alike only if their choices are, and are sorted as without these."""
        return batch

    def running(self, structure: Structure, places: Numbers | None = None) -> AbstractContextManager[None]:
        """Context of the decoder's pass over these places ``[tokens]`` of the batch, or all if None, in its order.

        Checkpointed layers return into it.
        """
        return nullcontext()

    def run(self, structure: Structure, run: Callable[..., Any], **arguments: Any) -> Any:
        """The decoder's own pass over all places of the batch."""
        with self.running(structure):
            return run(**arguments)


@dataclass(frozen=True)
class ReplayedRows(AsEver):
    """The choices of the rows of one pass.

    Attributes:
        tokens: ``[rows, width]``: where the choices of each place of the batch are stored; -1 for padding, and for
            tokens without any.
        routers: The decoder's.
    """

    choices: RouterChoices
    tokens: Numbers
    routers: Sequence[nn.Module]

    @classmethod
    def of(cls, choices: RouterChoices, decoder: PreTrainedModel, given: Mapping[str, Any]) -> ReplayedRows:
        """The recorded rows that the rows of a pass are; raises ValueError for others."""
        try:
            if given.get("inputs_embeds") is not None:
                raise Unsupported("the pass has inputs_embeds", "pass input_ids")
            batch = read_rows(decoder, given, least=1)
        except Unsupported as error:
            raise ValueError(f"replay_routing finds rows by their ids and masks: {error}") from error
        tokens: Numbers = np.full((len(batch.rows), batch.width), -1, dtype=np.int64)
        for number, row in enumerate(batch.rows):
            if (found := choices.find(row.keys, number)) is None:
                longest = max((len(one.ids) for one in choices.rows), default=0)
                raise ValueError(
                    f"row {number} of the pass has {len(row.keys)} tokens, with which none of {len(choices)} recorded "
                    f"rows of up to {longest} tokens begins; replay choices of the call that drew this row, or end "
                    "replay_routing before passes over other rows"
                )
            tokens[number, row.column : row.column + len(found)] = found
        return cls(choices, tokens, routers_of(decoder))

    @property
    def count(self) -> int:  # type: ignore[override]
        return int((self.tokens >= 0).sum())

    def kept(self, options: Options, last: object) -> tuple[Options, object]:
        if not options.share_forward:
            raise Unsupported("share_forward=False")
        return replace(options, reuse_prefix=False, log_probs="auto"), None

    def keyed(self, batch: Batch) -> Batch:
        rows = [
            row._replace(keys=(row.keys << 32) + tokens[row.column : row.column + len(row.keys)] + 1)
            for row, tokens in zip(batch.rows, self.tokens, strict=True)
        ]
        return replace(batch, rows=rows)

    @contextmanager
    def running(self, structure: Structure, places: Numbers | None = None) -> Iterator[None]:
        tokens = self.tokens.reshape(-1) if places is None else self.tokens.reshape(-1)[places]
        replayed = Replayed(self.choices.stored, self.choices.experts, torch.from_numpy(tokens))
        inside = partial(visiting, self.routers)
        with recomputed_inside(structure.walk.modules, visitor_of_thread.get, inside), inside(replayed):
            yield
        if (seen := len(replayed.seen)) < (count := len(self.routers)):
            raise ValueError(
                f"{seen} of {count} routers ran where they can be told what to choose; do not compile layers of a "
                "model whose routing is replayed"
            )
