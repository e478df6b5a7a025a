"""Layers that attend by themselves: nodes hold keys and values, suffixes what the layer's own code caches."""

from __future__ import annotations

from typing import ClassVar, Protocol
from weakref import ref

import torch
from torch import Tensor

from ...attention.kv import Segment
from ..storage import StorageOfLayer, TokenStorage


class AttendsByItself(Protocol):
    """An attention layer with attention code of its own, which caches suffixes in a layout of its own.

    It finds nodes and suffixes through the cache that its `forward` is given: a `SharedContextCache`, or in captured
    steps a `CapturedCache`. `ModelLayout.of` finds such layers by `attends_by_itself` and `layer_idx`.

    Where processes divide a cache, nodes and suffixes are what this one stores of them. The layer then attends to
    these, each query to as many tokens of its suffix as `ForestKV.seen_by` says, and hands its partial to
    `Undivided.merge`.

    Attributes:
        attends_by_itself: True.
        suffixes_read: What reads suffixes in captured steps, for reports.
    """

    attends_by_itself: ClassVar[bool]
    suffixes_read: ClassVar[str]
    layer_idx: int

    @property
    def no_captured_steps(self) -> str | None:
        """Why steps of a model with this layer cannot be captured; None if no reason is known."""
        ...

    def suffixes_take_prompts(self, rows: int, room: int, tokens: int, backend: str) -> bool:
        """Whether suffixes store unshared prompts in fewer bytes than nodes do, and a kernel reads them.

        Suffixes would have room for `room` tokens; the prompts have `tokens`.
        """
        ...

    def as_nodes(self, keys: Tensor, coordinates: Tensor, positions: Tensor, dtype: torch.dtype | None) -> Segment:
        """Rotated keys and values, ``[rows, heads, tokens, head_dim]``, in the dtype; the model's when None.

        Of suffix tokens as cached, ``[rows, 1, tokens, width]`` each, at positions ``[rows, tokens]`` int64, for
        layers that cache none.
        """
        ...


class OwnStorage(StorageOfLayer):
    """Tokens of a layer that attends by itself (`AttendsByItself`), which it is asked for to turn suffixes into nodes.

    A node is read by many rows, so that its values cost little memory for a row, and making them anew in every step
    would cost a product. What one row alone has is stored as the layer has it, in its suffix: `example` are such
    parts, ``[1, 0, width]`` each, or None before the first pass.
    """

    captured_in_place: ClassVar[bool] = True
    takes_padded: ClassVar[bool] = False

    def __init__(self, layer: ref[AttendsByItself] | None, example: Segment | None = None):
        super().__init__(layer)
        self.example = example

    def empty(self) -> TokenStorage:
        return OwnStorage(self.layer, self.example)

    def describe(self, parts: Segment) -> None:
        if self.example is None:
            self.example = Segment(*(part.new_empty(1, 0, part.shape[-1]) for part in parts))

    def as_nodes(self, parts: Segment, positions: Tensor, dtype: torch.dtype | None = None) -> Segment:
        if dtype is None and (held := self.node_example) is not None:
            dtype = held[0].dtype
        nodes: Segment = self.known_layer("suffixes without values").as_nodes(*parts, positions, dtype)
        return nodes

    @property
    def node_example(self) -> Segment | None:
        return next(iter(self.segments.values()), None)

    @property
    def suffix_example(self) -> Segment | None:
        return self.suffix or self.example
