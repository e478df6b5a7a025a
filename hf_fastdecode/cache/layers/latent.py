"""Layers with latents (multi-head latent attention): keys and values are made of them once, when they are stored.

Such layers hand a token's latent and rotated key to ``update``, and make keys and values of all that it returns
(DeepSeek-V2, section 2.1). Of a node, which many rows read, that would be a product for each row and step. Here new
tokens become keys and values at once; attention then is as of any other layer.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol
from weakref import ref

import torch.nn.functional as F
from torch import Tensor

from ...attention.kv import Segment
from ..storage import TokenStorage


class ExpandsLatents(Protocol):
    """An attention layer of transformers that caches latents; `ModelLayout.of` finds those with a stand-in for it.

    Attributes:
        v_head_dim: Numbers of a head's value.
        qk_head_dim: Numbers of a head's key.
    """

    layer_idx: int
    num_heads: int
    v_head_dim: int
    qk_head_dim: int

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[rows, heads, tokens, qk_head_dim]`` and values ``[rows, heads, tokens, v_head_dim]``.

        Args:
            latents: ``[rows, 1, tokens, kv_lora_rank]``.
            rotated: ``[rows, 1, tokens, qk_rope_head_dim]``: the part of the keys with positions, of all heads.
        """
        ...


class LatentStorage(TokenStorage):
    """Keys and values of a layer's latents, both as wide as the wider, as kernels take them.

    Args:
        layer: The attention layer, not kept alive; needed to store tokens.

    Attributes:
        layer: The layer of the latest pass.
        latent_bytes: Bytes of a token's latent and rotated key; 0 before the first pass.
    """

    def __init__(self, layer: ref[ExpandsLatents] | None, latent_bytes: int = 0):
        super().__init__()
        self.layer, self.latent_bytes = layer, latent_bytes

    def parts_of(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Segment:
        """Keys and values, of latents and rotated keys."""
        layer = self.layer() if self.layer is not None else None
        if layer is None:
            raise ValueError("the model whose layers make keys of latents is gone; prefill the whole text again")
        self.latent_bytes = keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()
        expanded = type(layer).expand_kv(layer, keys, values)  # the instance's own is a stand-in
        width = max(part.shape[-1] for part in expanded)
        return super().parts_of(*(F.pad(part, (0, width - part.shape[-1])) for part in expanded))

    def empty(self) -> TokenStorage:
        return LatentStorage(self.layer, self.latent_bytes)

    @property
    def stock_bytes_per_token(self) -> int:
        return self.latent_bytes

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"layer": None}  # weak references cannot be pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentStorage:
        twin = memo[id(self)] = LatentStorage(self.layer)
        vars(twin).update(copy.deepcopy(self.__getstate__(), memo) | {"layer": self.layer})
        return twin
