"""Token storage of a slim layer: nodes hold keys and values, suffixes keys and V-coordinates as the layer has them."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Protocol
from weakref import ref

import torch
from torch import Tensor

from ..attention.kv import Segment
from .storage import TokenStorage


class MakesNodes(Protocol):
    """A slim attention layer, which makes keys and values of the tokens that it has cached."""

    def as_nodes(self, keys: Tensor, coordinates: Tensor, positions: Tensor, dtype: torch.dtype | None) -> Segment:
        """Rotated keys and values, ``[rows, heads, tokens, head_dim]``.

        Args:
            keys: ``[rows, 1, tokens, heads * head_dim]`` as cached.
            coordinates: ``[rows, 1, tokens, r]`` as cached, with positions behind them if the layer caches some.
            positions: ``[rows, tokens]`` int64, for layers that cache none.
            dtype: Of the result; the model's when None.
        """
        ...


class SlimStorage(TokenStorage):
    """Tokens of a slim layer.

    A node is read by many rows, so that its values cost little memory for a row, and making them anew in every step
    would cost a product with the matrix from keys to values. What one row alone has is stored slim, in its suffix.

    Args:
        layer: The attention layer, not kept alive; needed only to turn suffixes into nodes.
        example: Parts of suffixes, each ``[1, 0, width]``.

    Attributes:
        layer: The layer of the latest pass.
    """

    captured_in_place: ClassVar[bool] = True

    def __init__(self, layer: ref[MakesNodes] | None, example: Segment):
        super().__init__()
        self.layer, self._example = layer, example

    @classmethod
    def of(cls, layer: MakesNodes, parts: Segment) -> SlimStorage:
        """For a layer whose suffixes have parts like these, ``[rows, 1, tokens, width]`` each."""
        return cls(ref(layer), Segment(*(part.new_empty(1, 0, part.shape[-1]) for part in parts)))

    def empty(self) -> TokenStorage:
        return SlimStorage(self.layer, self._example)

    def as_nodes(self, parts: Segment, starts: Tensor, dtype: torch.dtype | None = None) -> Segment:
        """Convert suffix tokens to keys and values, which nodes store.

        Raises:
            ValueError: The model no longer exists in this process.
        """
        layer = self.layer() if self.layer is not None else None
        if layer is None:
            raise ValueError(
                "the suffixes of this cache are stored without values, and the slim model that makes them is gone; "
                "keep the model, or prefill the whole text again"
            )
        keys, coordinates = parts
        positions = starts[:, None] + torch.arange(keys.shape[2], device=keys.device)
        if dtype is None and (held := self.node_example) is not None:
            dtype = held[0].dtype
        return layer.as_nodes(keys, coordinates, positions, dtype)

    @property
    def node_example(self) -> Segment | None:
        return next(iter(self.segments.values()), None)

    @property
    def suffix_example(self) -> Segment:
        return self.suffix or self._example

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"layer": None}  # weak references cannot be pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> SlimStorage:
        twin = memo[id(self)] = SlimStorage(self.layer, self._example)
        vars(twin).update(copy.deepcopy(self.__getstate__(), memo) | {"layer": self.layer})
        return twin
