"""`torch.autocast` around a model's passes: the dtype that they compute in, and casts of weights in captured ones.

Autocast keeps its casts of weights until the outermost autocast ends, for all threads. What a capture finds among them
is freed before later replays read it; what a capture adds is memory that nothing has written before the first replay.
So captured passes leave these casts alone: weights of autocast's dtype are read where they are, and each replay casts
others as they are then, so that optimizers may update them in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import chain

import torch
from transformers import PreTrainedModel

from .._compat import CACHES_CASTS
from ..attention.overrides import autocast_dtype
from .foreign_code import own_code
from .fused.trial import contents


def _autocasts_of(model: PreTrainedModel) -> list[torch.autocast]:
    """What code around the model's `forward` enters, as accelerate's does, outermost first."""
    cells = chain.from_iterable(getattr(piece, "__closure__", None) or () for piece in own_code(model))
    return [held for cell in cells if isinstance(held := contents(cell), torch.autocast)]


def computes_in(model: PreTrainedModel) -> torch.dtype:
    """The dtype of a pass's matrix products, and of the keys and values that it stores; the model's without autocast.

    That of an autocast around the call counts, or of one that code around the model's `forward` enters.
    """
    with ExitStack() as stack:
        for one in _autocasts_of(model):
            stack.enter_context(copy(one))  # one that is entered keeps what it restores
        dtype = autocast_dtype(model.device)
    return model.dtype if dtype is None or model.dtype == torch.float64 else dtype


@contextmanager
def casting_anew(model: PreTrainedModel) -> Iterator[None]:
    """Context of a captured pass, in which autocast neither finds nor keeps casts of weights."""
    enabled = torch.is_autocast_cache_enabled()
    with entered_again(model):
        for one in _autocasts_of(model):
            setattr(one, CACHES_CASTS, False)
        try:
            torch.set_autocast_cache_enabled(False)
            yield
        finally:
            torch.set_autocast_cache_enabled(enabled)


@contextmanager
def entered_again(model: PreTrainedModel) -> Iterator[None]:
    """Context within a model's `forward` in which further passes enter what code around it has entered.

    An autocast keeps on itself what its end restores: entered twice, it would stay on.
    """
    before = [(one, vars(one).copy()) for one in _autocasts_of(model)]
    try:
        yield
    finally:
        for one, state in before:
            vars(one).update(state)
