"""Layers with latents (multi-head latent attention): what a token's keys and values are made of, for all heads.

Such a layer hands a token's latent and rotated key to ``update`` (DeepSeek-V2, section 2.1), and both are stored.
Passes of prefill attend to keys and values made of them: each token's once in its pass, and those of a stored context
anew in each pass that continues it, as transformers does in every step. Steps attend to the latents themselves. For
queries that have taken in the product from latents to keys, latents with rotated keys are the keys of a single KV
head, and latents alone its values. Kernels read them as those of several KV heads, of `GROUP` query heads at most
each, that lie in the same memory.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, Protocol
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.kv import Segment
from ..storage import TokenStorage

GROUP: Final = 16
"""Query heads that a program of the suffix kernel attends for: more would not fit in its registers."""


def kv_heads_of_kernels(heads: int) -> int:
    """The fewest groups of at most `GROUP` that `heads` query heads are divided into equally."""
    return next(count for count in range(1, heads + 1) if not heads % count and heads // count <= GROUP)


def as_wide(part: Tensor, width: int) -> Tensor:
    """A part ``[..., numbers]`` with zeros behind its numbers, up to `width`."""
    return part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1]))


def multiplying(projection: nn.Module, latents: Tensor) -> AbstractContextManager[Any]:
    """Context in which a projection takes latents of this dtype: autocast's, if it cached them in half precision."""
    wide = next(projection.parameters()).dtype == torch.float32
    if wide and latents.dtype in (torch.float16, torch.bfloat16):
        return torch.autocast(latents.device.type, latents.dtype)
    return nullcontext()


class ExpandsLatents(Protocol):
    """An attention layer of transformers that caches latents; `ModelLayout.of` finds those with a stand-in for it."""

    layer_idx: int
    kv_b_proj: nn.Module
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[rows, heads, tokens, key_dim]`` and values ``[rows, heads, tokens, value_dim]``.

        Args:
            latents: ``[rows, 1, tokens, latent]``.
            rotated: ``[rows, 1, tokens, rest]``: the part of the keys that depends on positions, of all heads.
        """
        ...


class LatentStorage(TokenStorage):
    """Latents and rotated keys: the parts of a token are ``[1, tokens, latent]`` and ``[1, tokens, rest]``.

    Args:
        layer: The attention layer, not kept alive; needed for prefill.
        kv_heads: As of `kv_heads_of_kernels`.

    Attributes:
        layer: The layer of the latest pass.
    """

    holds_latents: ClassVar[bool] = True

    def __init__(self, layer: ref[ExpandsLatents] | None, kv_heads: int):
        super().__init__()
        self.layer, self.kv_heads = layer, kv_heads

    def empty(self) -> TokenStorage:
        return LatentStorage(self.layer, self.kv_heads)

    def keys_and_values(self, parts: Segment) -> Segment:
        """Keys and values, both as wide as the wider, as fused operators take them."""
        expanded = self.made_of(parts)
        width = max(part.shape[-1] for part in expanded)
        return Segment._make(as_wide(part, width) for part in expanded)

    def made_of(self, parts: Segment) -> Segment:
        """Keys and values by the layer's own code, ``[heads, tokens, width]``, of a width each."""
        layer = self.layer() if self.layer is not None else None
        if layer is None:
            raise ValueError("the model whose layers make keys of these latents is gone; prefill the whole text again")
        with multiplying(layer.kv_b_proj, parts.keys):
            expanded = type(layer).expand_kv(layer, *(part[None] for part in parts))  # the instance's is a stand-in
        return Segment._make(part[0] for part in expanded)

    def read_by_kernels(self, parts: Segment) -> Segment:
        return Segment._make(part.expand(*part.shape[:-3], self.kv_heads, -1, -1) for part in parts)

    @staticmethod
    def read_by_steps(parts: Segment) -> Segment:
        """Keys of one head, and its values."""
        latents, rotated = parts
        return Segment(torch.cat([latents, rotated], -1), latents)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"layer": None}  # weak references cannot be pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentStorage:
        twin = memo[id(self)] = LatentStorage(self.layer, self.kv_heads)
        vars(twin).update(copy.deepcopy(self.__getstate__(), memo) | {"layer": self.layer})
        return twin
