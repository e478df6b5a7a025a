"""What layers and masks of a shared-context cache return instead of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..errors import Unsupported
from .kv import Scoring
from .partial import Partial


class ExpandedKV(Protocol):
    """Those of one layer, as a step attends to them."""

    def attend(self, query: Tensor, scoring: Scoring, own: Partial) -> Tensor:
        """Attend to the nodes of each row, without a causal rule, and merge with its other keys.

        Args:
            query: ``[rows, heads, queries, key_dim]``.
            own: The partial of the other keys, ``[rows, heads, queries, value_dim]``; ``out`` in the query's dtype.

        Returns:
            ``[rows, heads, queries, value_dim]`` in the query's dtype.
        """
        ...


class NotATensorError(Unsupported, AttributeError):
    """Code that expects tensors got the placeholder of a shared-context cache."""

    def __init__(self, what: str, whose: str):
        super().__init__(
            f"{what}: {whose} of a SharedContextCache are not tensors",
            "call the model itself (not a submodule) after hf_fastdecode.enable(model)",
        )


class _NotATensor:
    _what: ClassVar[str]  # the tensors that it replaces

    def __getattr__(self, name: str) -> Any:
        raise NotATensorError(repr(name), self._what)  # reached only for attributes that do not exist

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotATensorError(getattr(func, "__name__", repr(func)), cls._what)


class SharedKV(_NotATensor, ABC):
    """Returned by ``update`` of a shared-context cache layer instead of key and value tensors.

    Attributes:
        stored_window: Last tokens that transformers' cache keeps in this layer; None for all.
        device: Where keys and values are.
        reads_latents: Whether it attends to latents, by queries that `patches.architectures.latent_attention` makes.
        expanded: Nodes that it does not attend to, as keys and values; None if there are none.
    """

    _what = "keys and values"
    stored_window: int | None = None
    device: torch.device
    reads_latents: bool = False
    expanded: ExpandedKV | None = None

    def to(self, device: torch.device, **kwargs: Any) -> SharedKV:
        """Itself, for layers that read what others store, on the same device; raises `NotATensorError` for others."""
        if device != self.device:
            raise NotATensorError(f"to({device})", self._what)
        return self

    @abstractmethod
    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend ``query`` ``[batch, heads, queries, head_dim]``; returns ``[batch, queries, heads, head_dim]``."""

    def attend_as_stored(self, query: Tensor, scoring: Scoring) -> Partial:
        """`attend` with its log-sum-exp, in steps with `expanded` nodes: ``out`` in the query's dtype."""
        raise NotImplementedError


class CrossKV(SharedKV):
    """Keys and values of an encoder's output, returned by layers of a cache for cross-attention."""

    @abstractmethod
    def show(self, mask: Tensor | None) -> None:
        """Set the tokens of each input that queries see, ``[inputs, tokens]`` bool; all of them when None."""


@dataclass(frozen=True)
class SlidingWindow(_NotATensor):
    """Returned by `shared_context_mask` instead of a sliding-window mask tensor."""

    _what: ClassVar[str] = "masks"
    size: int


class CausalMask(_NotATensor):
    """Returned by `shared_context_mask` to code that computes with its mask even where nothing is hidden."""

    _what = "masks"
    ndim = 0

    def to(self, *args: Any, **kwargs: Any) -> CausalMask:
        """Itself."""
        return self


@dataclass(frozen=True)
class BidirectionalMask(_NotATensor):
    """Returned by `shared_context_mask` for attention without a causal rule, which cross-attention alone may compute.

    Decoders of the BART family make such a mask for an encoder also where they have none.

    Attributes:
        shown: ``[inputs, tokens]`` bool: the tokens that it shows; all of them when None.
    """

    _what: ClassVar[str] = "masks"
    shown: Tensor | None
