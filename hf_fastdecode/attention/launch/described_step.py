"""What kernel tables say of one decode step: its batch, and where its new tokens are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..forest import Forest
from ..kv import SuffixLengths


class DescribedStep(NamedTuple):
    """Step that the tables describe.

    Attributes:
        forest: The batch's.
        own_tokens: Leading suffix tokens in own nodes.
        suffixes: Lengths of whole suffixes.
        stored: Lengths of what is stored here of them.
    """

    forest: Forest
    own_tokens: int
    suffixes: SuffixLengths
    stored: SuffixLengths


class NewTokens(NamedTuple):
    """Where a step of one token per row finds it, of suffixes that other code attends to: ``[rows]`` each.

    Attributes:
        positions: int64: tokens in each row's suffix before the step.
        slots: int64: where the token is written.
        lengths: int32: tokens stored with it.
    """

    positions: Tensor
    slots: Tensor
    lengths: Tensor
