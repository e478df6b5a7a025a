"""Multi-head latent attention: DeepSeek-V2 and V3, and those that follow them.

Their attention makes keys and values of all latents that ``update`` returns, by ``expand_kv``, and hands them to the
interface. `LatentStorage` has made them when it stored the tokens, so that nothing is left to do.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...attention.interface import SharedKV
from ...attention.kv import Scoring
from ...attention.own_code import OwnCode


class _KeysAndValues(SharedKV):
    """Keys and values of latents, which are stored as wide as the wider of both."""

    def __init__(self, kv: SharedKV, value_dim: int):
        self._kv, self._value_dim = kv, value_dim
        self.stored_window, self.device = kv.stored_window, kv.device

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        query = F.pad(query, (0, max(0, self._value_dim - query.shape[-1])))
        return self._kv.attend(query, scoring)[..., : self._value_dim]


def expand(module: Any, latents: Any, rotated: Any) -> tuple[Any, Any]:
    """Stands in for ``expand_kv``."""
    if not isinstance(latents, SharedKV):  # a pass without a cache
        return type(module).expand_kv(module, latents, rotated)
    kv = _KeysAndValues(latents, module.v_head_dim)
    return kv, kv


def latent_attention(attention: str) -> OwnCode:
    """The entry of an architecture with this attention class."""
    return OwnCode({attention: {"expand_kv": expand}})
