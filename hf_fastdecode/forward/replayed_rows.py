"""Passes without a cache in which routers choose what they chose in rollouts, see `replay_routing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from .rows import Batch, read_batch


@dataclass(frozen=True)
class Routing:
    """What the routers of one pass choose; without choices, what they would.

    Attributes:
        batch: The rows, whose keys are equal only where choices are, too.
        places: ``[rows, width]``: where the choices of each place of the batch are stored; -1 for padding, and for
            tokens without any.
    """

    choices: RouterChoices | None = None
    batch: Batch | None = None
    places: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    routers: Sequence[nn.Module] = ()

    @classmethod
    def of(cls, choices: RouterChoices, decoder: PreTrainedModel, given: Mapping[str, Any]) -> Routing:
        """The recorded rows that the rows of a pass are; raises ValueError for others."""
        try:
            if given.get("inputs_embeds") is not None:
                raise Unsupported("the pass has inputs_embeds", "pass input_ids")
            batch = read_batch(decoder, given, least=1)
        except Unsupported as error:
            raise ValueError(f"replay_routing finds rows by their ids and masks: {error}") from error
        places: Numbers = np.full((len(batch.rows), batch.width), -1, dtype=np.int64)
        keyed = []
        for number, row in enumerate(batch.rows):
            if (found := choices.find(row.keys, number)) is None:
                raise ValueError(
                    f"row {number} of the pass has {len(row.keys)} tokens, with which none of {len(choices)} recorded "
                    "rows begins; give an attention_mask that hides its padding, replay choices of the call that drew "
                    "it, or end replay_routing before other passes"
                )
            places[number, row.column : row.column + len(found)] = found
            keyed.append(row._replace(keys=(row.keys << 32) + found + 1))  # sorted as without choices
        return cls(choices, replace(batch, rows=keyed), places, routers_of(decoder))

    def kept(self, options: Options, last: object) -> tuple[Options, object]:
        """Options and rows of the last pass, as far as what is kept is of this routing; raises `Unsupported`."""
        if not options.share_forward:
            raise Unsupported("share_forward=False")
        if self.batch is None:
            return options, last
        return replace(options, reuse_prefix=False, log_probs="auto"), None

    def run(self, structure: Structure, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The decoder's own pass over the batch."""
        with self.running(structure):
            return run(*args, **kwargs)

    @contextmanager
    def running(self, structure: Structure, packed: Numbers | slice = slice(None)) -> Iterator[None]:
        """Context of the decoder's pass over these places of the batch, into which checkpointed layers return."""
        if self.choices is None:
            yield
            return
        tokens = torch.from_numpy(self.places.reshape(-1)[packed])
        replayed = Replayed(self.choices.stored, self.choices.experts, tokens)
        inside = partial(visiting, self.routers)
        with recomputed_inside(structure.walk.modules, visitor_of_thread.get, inside), inside(replayed):
            yield
        if (seen := len(replayed.seen)) < (count := len(self.routers)):
            raise ValueError(f"{seen} of {count} routers were told what to choose; do not compile layers of the model")
