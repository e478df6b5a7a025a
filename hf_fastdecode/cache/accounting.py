"""Bytes of keys and values, stored and read per decode step, with and without sharing.

Bifurcated attention, section 4.3. Its symbols: ``g`` KV heads of ``k`` elements, ``b`` rows, ``m_c`` tokens of shared
context, ``m_d`` tokens that each row has added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .layout import ModelLayout
from .stores import Kind, Store

_COUNTED = frozenset({Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.LATENT})


class StockShared(NamedTuple):
    """A quantity with the context duplicated per row, as in stock transformers, and with it stored once."""

    stock: int
    shared: int

    @property
    def ratio(self) -> float:
        return self.stock / self.shared


class CacheBytes(NamedTuple):
    """Bytes of a cache's keys and values over all layers.

    Attributes:
        stored: Every segment, also where rows attend to part of it, every row's suffix, and an encoder's distinct
            inputs.
        allocated: As `stored`, with preallocated suffix buffers counted in full.
        stock: A stock transformers cache for the same rows, padded to one length; layers with a window keep only
            the window, and an encoder's inputs are held once per row. Of a slim encoder-decoder, its ordinary form's.
    """

    stored: int
    allocated: int
    stock: int


def within(length: int, window: int | None) -> int:
    """Number of the last `length` tokens that a window keeps."""
    return length if window is None else min(length, window)


def memory_io(kv_heads: int, head_dim: int, rows: int, context: int, decoded: int) -> StockShared:
    """Elements of K that one layer reads in one decode step, and as many of V.

    Bifurcated attention, equations 5 and 6: ``g k b (m_c + m_d)`` and ``g k (m_c + b m_d)``.
    """
    return StockShared(
        stock=kv_heads * head_dim * rows * (context + decoded), shared=kv_heads * head_dim * (context + rows * decoded)
    )


@dataclass(frozen=True)
class KVSizes:
    """The stores of each layer of a decoder that stores keys and values, or latents of which these are made."""

    stores: tuple[Store, ...]

    @classmethod
    def from_config(cls, config: Any) -> KVSizes:
        """Read them from a config, without building the model; raises ValueError for an encoder-decoder."""
        if config.is_encoder_decoder:
            raise ValueError(
                f"{config.model_type} is an encoder-decoder; only the KV of decoder-only models is counted"
            )
        return cls.of_decoder(config)

    @classmethod
    def of_decoder(cls, config: Any) -> KVSizes:
        """Those of a decoder's self-attention, an encoder-decoder's too; ValueError where it stores others."""
        layout = ModelLayout.from_config(config)
        if not layout.layers:
            raise ValueError(f"{layout.model_type} has no number of layers in its config (num_hidden_layers)")
        cross = Kind.CROSS if config.is_encoder_decoder else None
        stores = [(index, store) for index, store in layout if store.kind is not cross]
        for index, store in stores:
            if store.kind not in _COUNTED:
                stored = _OTHERS.get(store.kind, "more than keys and values")
                raise ValueError(
                    f"layer {index} of {layout.model_type} ({layout.types[index]}) stores {stored}; only keys and "
                    "values are counted"
                )
            if not store.numbers:
                raise ValueError(f"the config of {layout.model_type} does not say the heads of layer {index}")
        return cls(tuple(store for _, store in stores))

    @property
    def layers(self) -> int:
        return len(self.stores)

    @property
    def alike(self) -> Store | None:
        """Heads of every layer, as of one without a window; None where layers differ in them, or store latents."""
        if any(store.kind is Kind.LATENT for store in self.stores):
            return None
        heads = {(store.query_heads, store.kv_heads, store.head_dim, store.value_dim) for store in self.stores}
        return Store(Kind.FULL, *heads.pop()) if len(heads) == 1 else None

    @property
    def same(self) -> Store:
        """As `alike`, for what is made for models of like layers; ValueError where layers differ in heads."""
        if (alike := self.alike) is None:
            raise ValueError("its layers differ in heads, or store latents")
        return alike

    @property
    def local_layers(self) -> int:
        return sum(store.window is not None for store in self.stores)

    @property
    def window(self) -> int | None:
        """The smallest window, in tokens; None without any."""
        return min((store.window for store in self.stores if store.window is not None), default=None)

    @property
    def chunked(self) -> bool:
        """Whether windows are chunks, which restart at their multiples, rather than sliding."""
        return any(store.kind is Kind.CHUNKED for store in self.stores)

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return element_bytes * sum(store.numbers for store in self.stores)

    def kv_bytes(self, rows: int, context: int, decoded: int, element_bytes: int) -> StockShared:
        """Bytes of all keys and values stored at a decode step, equations 5 and 6 for K and V, summed over layers.

        In a local layer a stock cache keeps only the window; the shared cache keeps all tokens. Arguments are as for
        `memory_io`.
        """
        stock = sum(store.numbers * rows * within(context + decoded, store.window) for store in self.stores)
        shared = sum(store.numbers for store in self.stores) * (context + rows * decoded)
        return StockShared(stock * element_bytes, shared * element_bytes)

    def step_bytes(self, rows: int, context: int, decoded: int, element_bytes: int) -> StockShared:
        """Bytes of keys and values that a step reads; local layers read only the window. See `kv_bytes`."""
        read = 0
        for store in self.stores:
            own = within(decoded, store.window)
            shown = context if store.window is None else min(context, store.window - own)
            read += store.numbers * (shown + rows * own)
        stored = self.kv_bytes(rows, context, decoded, element_bytes)
        return StockShared(stored.stock, read * element_bytes)


_OTHERS = {Kind.STATE: "a state", Kind.CROSS: "keys and values of another sequence", Kind.OWN: "a layout of its own"}
