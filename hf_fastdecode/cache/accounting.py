"""Bytes of keys and values, stored and read per decode step, with and without sharing.

Bifurcated attention, section 4.3. Its symbols: ``g`` KV heads of ``k`` numbers, ``b`` rows, ``m_c`` tokens of shared
context, ``m_d`` tokens that each row has added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_LOCAL = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}  # by layer type
# With any of these set, layers store different shapes, or something other than per-head keys and values.
_UNCOUNTED = ("kv_lora_rank", "num_kv_shared_layers", "cross_attention_layers", "swa_num_key_value_heads")


class StockShared(NamedTuple):
    """A quantity with the context duplicated per row, as in stock transformers, and with it stored once."""

    stock: int
    shared: int

    @property
    def ratio(self) -> float:
        """Stock divided by shared."""
        return self.stock / self.shared


class CacheBytes(NamedTuple):
    """Bytes of a cache's keys and values over all layers.

    Attributes:
        stored: Every segment, also where rows attend to part of it, and every row's suffix.
        allocated: As `stored`, with preallocated suffix buffers counted in full.
        stock: A stock transformers cache for the same rows, padded to one length; layers with a window keep only
            the window.
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

    Args:
        kv_heads: ``g``.
        head_dim: ``k``.
        rows: ``b``.
        context: ``m_c``, in tokens.
        decoded: ``m_d``, in tokens.
    """
    return StockShared(
        stock=kv_heads * head_dim * rows * (context + decoded),
        shared=kv_heads * head_dim * (context + rows * decoded),
    )


@dataclass(frozen=True)
class KVShape:
    """Shape of the keys and values that a decoder's attention layers store.

    Attributes:
        layers: Layers that store keys and values.
        query_heads: ``h``.
        kv_heads: ``g``.
        head_dim: Width of one head's keys and values.
        local_layers: Number of layers with a window.
        window: Window length in tokens; None without such layers.
        chunked: Whether the window is a chunk, which restarts at its multiples, rather than sliding.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    local_layers: int = 0
    window: int | None = None
    chunked: bool = False

    @classmethod
    def from_config(cls, config: Any) -> KVShape:
        """Read the shape from a transformers config, without building the model.

        Raises:
            ValueError: The model is not decoder-only, or its layers store different shapes.
        """
        if config.is_encoder_decoder:
            raise ValueError(
                f"{config.model_type} is an encoder-decoder; only the KV of decoder-only models is counted"
            )
        return cls.of_decoder(config)

    @classmethod
    def of_decoder(cls, config: Any) -> KVShape:
        """Read the shape of the self-attention of a decoder, which may be an encoder-decoder's.

        Raises:
            ValueError: The decoder's layers store different shapes.
        """
        name = config.model_type
        text = config.get_text_config(decoder=True)
        if odd := [field for field in _UNCOUNTED if getattr(text, field, None)]:
            raise ValueError(
                f"{name} has {odd[0]} = {getattr(text, odd[0])}; only layers that all store keys and values of the "
                "same heads are counted"
            )
        if getattr(text, "slim_layers", None):
            raise ValueError(
                f"{name} caches keys and V-coordinates per layer, which slim_report.json beside its weights counts; "
                "only keys and values are counted"
            )
        layers, heads = _count(text, "num_hidden_layers"), _count(text, "num_attention_heads")
        types = _layer_types(text)
        if other := sorted(set(types) - set(_LOCAL)):
            raise ValueError(f"{name} has layers of type {', '.join(other)}; only attention layers are counted")
        local, window = local_layers(text)
        chunked = local > 0 and "chunked_attention" in types
        return cls(layers, heads, _kv_heads(text, heads), _head_dim(text, heads), local, window, chunked)

    @property
    def group_size(self) -> int:
        """Query heads per KV head, ``p = h / g``."""
        return self.query_heads // self.kv_heads

    @property
    def kind(self) -> str:
        """``MHA``, ``GQA`` or ``MQA``."""
        if self.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def kv_bytes(self, rows: int, context: int, decoded: int, element_bytes: int) -> StockShared:
        """Bytes of all keys and values stored at a decode step.

        Equations 5 and 6, for K and V, summed over layers. In a local layer a stock cache keeps only the window; the
        shared cache keeps all tokens.

        Args:
            rows: Samples per context, ``b``.
            context: Shared tokens, ``m_c``.
            decoded: Tokens appended by each row, ``m_d``.
            element_bytes: Bytes per element.
        """
        own = memory_io(self.kv_heads, self.head_dim, rows, context, decoded)
        cut = own.stock
        if self.window is not None:
            cut = memory_io(self.kv_heads, self.head_dim, rows, 0, min(self.window, context + decoded)).stock
        stock = (self.layers - self.local_layers) * own.stock + self.local_layers * cut
        return StockShared(2 * stock * element_bytes, 2 * self.layers * own.shared * element_bytes)

    def step_bytes(self, rows: int, context: int, decoded: int, element_bytes: int) -> StockShared:
        """Bytes of keys and values that a step reads; local layers read only the window. See `kv_bytes`."""
        stored = self.kv_bytes(rows, context, decoded, element_bytes)
        if self.window is None:
            return stored
        own = min(self.window, decoded)
        cut = memory_io(self.kv_heads, self.head_dim, rows, min(context, self.window - own), own).shared
        whole = memory_io(self.kv_heads, self.head_dim, rows, context, decoded).shared
        read = (self.layers - self.local_layers) * whole + self.local_layers * cut
        return StockShared(stored.stock, 2 * read * element_bytes)


def local_layers(config: Any) -> tuple[int, int | None]:
    """Number of layers with a window, and the window in tokens; ``(0, None)`` without one."""
    window, types = _window(config), _layer_types(config)
    local = config.num_hidden_layers * sum(_LOCAL.get(kind, False) for kind in types) // len(types)
    return (local, window) if window is not None and local else (0, None)


def _layer_types(config: Any) -> Sequence[str]:
    """Layer types, or a single type when the config lists none; a window then applies to all layers."""
    alike = "full_attention" if _window(config) is None else "sliding_attention"
    return getattr(config, "layer_types", None) or [alike]


def _field(config: Any, name: str) -> Any:
    """A config field, or None; some configs raise when layers differ in it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return "a value per layer"


def _count(config: Any, name: str) -> int:
    value = _field(config, name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{config.model_type} has {name} = {value}; one positive number for all layers is needed")
    return value


def _kv_heads(config: Any, heads: int) -> int:
    if _field(config, "num_key_value_heads") is not None:
        return _count(config, "num_key_value_heads")
    return 1 if getattr(config, "multi_query", False) else heads  # gpt_bigcode names the choice, not the number


def _head_dim(config: Any, heads: int) -> int:
    given = _field(config, "head_dim") is not None
    head_dim = _count(config, "head_dim") if given else _count(config, "hidden_size") // heads
    if _field(config, "v_head_dim") not in (None, head_dim):
        raise ValueError(f"{config.model_type} has v_head_dim = {config.v_head_dim}, not head_dim = {head_dim}")
    return head_dim


def _window(config: Any) -> int | None:
    """Window length of local layers in tokens, or None when the config uses none."""
    if not getattr(config, "use_sliding_window", True):
        return None
    sizes = (_field(config, name) for name in ("sliding_window", "attention_chunk_size"))
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)  # 0 and -1 mean none
