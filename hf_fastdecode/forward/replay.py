"""Passes without a cache in which routers choose what they chose in rollouts (`replay_routing`).

The rows of a pass are found among the recorded ones by their ids, so that trainers may shuffle, cut and pad rows. In a
packed pass tokens are the same only if their choices are, too: these are part of the keys by which the trie is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import Unsupported
from ..generation.foreign_code import held_model
from ..generation.model_state import generates, owned_by, state_of
from ..generation.routing.choices import Numbers, RouterChoices
from ..generation.routing.routers import Replayed, routers_of, visiting, visitor_of_thread
from .packed import recomputed_inside
from .rows import Batch, read_rows


class replay_routing:  # noqa: N801 - used like `torch.set_grad_enabled`
    """Let routers choose the given experts in forward passes without a cache, as in scoring and training.

    Their weights, such as a softmax over the scores of the chosen ones, are computed from the logits of now, and have
    gradients (rollout routing replay, R3, arXiv 2510.11370). It lasts until the end of a ``with`` block, in which
    backward passes need not be, or, called alone, until the next call; ``replay_routing(model, None)`` ends it.

    A row of a pass gets the choices of the recorded row with its tokens, or that begins with them: rows may be
    shuffled, cut and padded. Of several such rows that at its own place counts, or else the shortest. A recorded row's
    last token, which `generate` gave to no layer, and padding are routed as ever, and so are passes with a cache.
    Router logits that a pass returns are those of now.

    Args:
        model: An enabled model with experts, or what wraps one, see `enable`.
        choices: ``router_choices`` of an output of `generate`, or some rows of it, ``choices[rows]``; None for none.

    Raises:
        ValueError: The model is not enabled, has no text decoder or other layers of experts. Later, passes raise it
            whose rows are not among the recorded ones, or whose routers choose by code that cannot be told what to.
        TypeError: `model` neither is nor wraps a transformers model.
    """

    def __init__(self, model: nn.Module, choices: RouterChoices | None):
        inner = held_model(model)
        name, state = type(inner).__name__, state_of(inner)
        if state is None:
            raise ValueError(f"replay_routing needs an enabled {name}; call hf_fastdecode.enable(model) first")
        self._states = [state, *(of_part for _, of_part in owned_by(state, inner))]
        if choices is not None:
            if generates(inner) and len(self._states) == 1:
                raise ValueError(f"{name} has no decoder of text whose passes could replay choices; use another model")
            layers, given = len(routers_of(inner.modules(), name)), choices.stored.shape[1]
            if layers != given:
                raise ValueError(f"{name} has {layers} layers of experts, and the choices are of {given}; use its own")
        self._before = [one.replayed for one in self._states]
        for one in self._states:
            one.replayed = choices

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for one, before in zip(self._states, self._before, strict=True):
            one.replayed = before


@dataclass(frozen=True)
class RowsReplay:
    """The choices of the rows of one pass.

    Attributes:
        choices: Those that were given.
        tokens: ``[rows, width]``: where the choices of each place of the batch are stored; -1 for padding, and for
            tokens without any.
        routers: The decoder's.
    """

    choices: RouterChoices
    tokens: Numbers
    routers: Sequence[nn.Module]

    @classmethod
    def of(cls, choices: RouterChoices, decoder: PreTrainedModel, given: Mapping[str, Any]) -> RowsReplay:
        """The recorded rows that the rows of a pass are; raises ValueError for others."""
        try:
            batch = read_rows(decoder, given, least=1)
        except Unsupported as error:
            raise ValueError(f"replay_routing finds rows by their ids and masks: {error}") from error
        if not batch.are_ids:
            raise ValueError("replay_routing finds rows by their ids, and the pass has inputs_embeds; use input_ids")
        tokens: Numbers = np.full((len(batch.rows), batch.width), -1, dtype=np.int64)
        for number, (row, places) in enumerate(zip(batch.rows, tokens, strict=True)):
            if (found := choices.find(row.keys, number)) is None:
                lengths = [len(one.ids) for one in choices.rows] or [0]
                raise ValueError(
                    f"row {number} of the pass has {len(row.keys)} tokens, with which none of the {len(choices)} "
                    f"recorded rows begins, of {min(lengths)} to {max(lengths)} tokens; replay choices of the call "
                    "that drew this row, or end replay_routing before passes over others"
                )
            places[row.column : row.column + len(found)] = found
        return cls(choices, tokens, routers_of(decoder.modules(), type(decoder).__name__))

    def keyed(self, batch: Batch) -> Batch:
        """The batch with rows in which tokens are alike only if their choices are, and are sorted as without these."""
        rows = [
            row._replace(keys=(row.keys << 32) + tokens[row.column : row.column + len(row.keys)] + 1)
            for row, tokens in zip(batch.rows, self.tokens, strict=True)
        ]
        return replace(batch, rows=rows)

    @contextmanager
    def running(self, modules: Sequence[nn.Module], places: Numbers | None = None) -> Iterator[None]:
        """Context of the pass, into which checkpointed layers among these modules return.

        Args:
            places: ``[tokens]``: the places of the batch that the pass computes, in its order; None for all of them.
        """
        tokens = self.tokens.reshape(-1)
        chosen = torch.from_numpy(tokens if places is None else tokens[places])
        replayed = Replayed(self.choices.stored, self.choices.experts, chosen)
        inside = partial(visiting, self.routers)
        with recomputed_inside(modules, visitor_of_thread.get, inside), inside(replayed):
            yield
        if (seen := len(replayed.seen)) < (count := len(self.routers)):
            raise ValueError(
                f"{seen} of {count} routers ran where they can be told what to choose; do not compile the model's "
                "layers for passes in which replay_routing is active"
            )

    def around(self, modules: Sequence[nn.Module], run: Callable[..., Any]) -> Callable[..., Any]:
        """The decoder's own pass over all places of the batch."""

        def replayed(*args: Any, **kwargs: Any) -> Any:
            with self.running(modules):
                return run(*args, **kwargs)

        return replayed

    @property
    def count(self) -> int:
        """Real tokens whose routing is replayed."""
        return int((self.tokens >= 0).sum())
