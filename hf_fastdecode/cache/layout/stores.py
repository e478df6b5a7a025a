"""What a layer stores in one place: its kind, and its sizes on this device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..layers.latent import kv_heads_of_kernels


class Kind(StrEnum):
    """What a store holds.

    Attributes:
        FULL: Keys and values of every token.
        SLIDING: The same, of which a query reads the last `Store.window` tokens.
        CHUNKED: The same, of which a query reads its own chunk of `Store.window` tokens.
        STATE: A state of fixed size, which every token overwrites (Mamba, gated delta nets, short convolutions).
        LATENT: Latents of which keys and values are made (multi-head latent attention).
        CROSS: Keys and values of another sequence, which do not grow.
        OWN: What the layer's own code says, see `AttendsByItself`.
        OTHER: What one architecture alone stores, such as keys of an indexer.
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"
    LATENT = "latent"
    CROSS = "cross"
    OWN = "own"
    OTHER = "other"


PER_TOKEN: Final = frozenset({Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.LATENT, Kind.OWN})
"""Kinds that store keys and values of every token, or of which nodes do."""


@dataclass(frozen=True)
class Store:
    """What a layer stores in one place. Sizes are 0 where the config does not say them.

    Attributes:
        kind: What it holds.
        query_heads: Heads of the queries that read it, on this device.
        kv_heads: Heads of keys and values, on this device.
        head_dim: Numbers of a head's key; of latents, those of a token, which are all heads' key.
        value_dim: Numbers of a head's value; of latents, the first of those of the key.
        window: Tokens that a query reads at most; None for all.
        biased: Whether scores are biased by distance.
        states: Of a layer with states, how many it has of each sort.
        continues: Of a layer with states, whether passes of several tokens are known to continue from one.
        stock_numbers: Numbers of a token in transformers' cache, where these are other than `numbers`.
    """

    kind: Kind
    query_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    states: int = 0
    continues: bool = False
    biased: bool = False
    stock_numbers: int = 0

    @property
    def kernel_heads(self) -> int:
        """KV heads as decode kernels see them."""
        return kv_heads_of_kernels(self.query_heads) if self.kind is Kind.LATENT else self.kv_heads

    @property
    def group_size(self) -> int:
        """Query heads per KV head; 1 where the config does not say it."""
        return max(1, self.query_heads // self.kv_heads) if self.kv_heads else 1

    @property
    def attention(self) -> str:
        """``MHA``, ``GQA`` or ``MQA``."""
        if self.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def numbers(self) -> int:
        """Numbers of a token's keys and values."""
        if self.kind is Kind.LATENT:
            return self.head_dim
        return self.kv_heads * (self.head_dim + self.value_dim)

    def stock_bytes(self, stored: int) -> int:
        """Bytes of a token in transformers' cache, of which `stored` are stored here."""
        return stored * self.stock_numbers // self.numbers if self.stock_numbers else stored
