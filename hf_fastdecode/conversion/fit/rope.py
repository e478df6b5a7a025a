"""RoPE and its inverse, for keys that are cached before or after it (Slim attention, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeLayout = Literal["half", "interleaved"]
"""Coordinates of rotated pair i of n: i and i + n (Llama, GPT-NeoX), or 2 i and 2 i + 1 (GPT-J, Cohere)."""


@dataclass(frozen=True)
class Rotation:
    """Rotation of coordinate pairs by an angle per token and pair.

    Only the first ``2 * pairs`` coordinates of a head are rotated (partial rotary embedding). Tables may contain an
    attention factor, as YaRN's do: then ``cos² + sin²`` is its square.

    Attributes:
        cos, sin: ``[..., tokens, pairs]``, broadcast over the leading dimensions of what is rotated.
        layout: Which coordinates form a pair.
    """

    cos: Tensor
    sin: Tensor
    layout: RopeLayout = "half"

    @classmethod
    def from_repeated(cls, cos: Tensor, sin: Tensor, layout: RopeLayout = "half") -> Rotation:
        """From tables ``[..., tokens, 2 * pairs]`` with an entry per coordinate, as transformers makes them."""
        one = slice(cos.shape[-1] // 2) if layout == "half" else slice(None, None, 2)
        return cls(cos[..., one], sin[..., one], layout)

    def tokens(self, part: slice) -> Rotation:
        """The rotation of some of the tokens."""
        return Rotation(self.cos[..., part, :], self.sin[..., part, :], self.layout)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate ``[..., tokens, head_dim]``; the result has the wider dtype of `x` and the tables.

        Raises ValueError where heads have fewer coordinates than the tables rotate.
        """
        return self._apply(x, self.cos, self.sin)

    def unrotate(self, y: Tensor) -> Tensor:
        """The exact inverse of `rotate`: the opposite rotation, divided by ``cos² + sin²``, the squared factor."""
        norm = self.cos.square() + self.sin.square()
        return self._apply(y, self.cos / norm, -self.sin / norm)

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = 2 * cos.shape[-1]
        if x.shape[-1] < width:
            raise ValueError(f"RoPE rotates {width} coordinates of a head, got heads of {x.shape[-1]}")
        rotated, passed = x[..., :width], x[..., width:]
        if self.layout == "half":
            first, second = rotated.chunk(2, -1)
        else:
            first, second = rotated[..., ::2], rotated[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        out = torch.cat(pair, -1) if self.layout == "half" else torch.stack(pair, -1).flatten(-2)
        return torch.cat([out, passed.to(out.dtype)], -1)
