"""Size of one kind of cache: what is stored, and what a generated token reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from hf_fastdecode.patches.layers.slim_values import SlimValues

KV: Final = "keys and values"
_INT8_GROUP: Final = 64  # numbers per scale, as transformers' QuantizedCache groups them
_SCALE_BYTES: Final = 2


@dataclass(frozen=True)
class CacheSize:
    """One kind of cache of a model, for one row, in bytes.

    Attributes:
        name: Of what is cached.
        stored: Bytes in memory.
        read: Bytes of it that a step reads from memory.
        matrices: Bytes of weight matrices that a step reads, once for all rows; None when unknown.
    """

    name: str
    stored: int
    read: int
    matrices: int | None

    def reads(self, rows: int) -> float | None:
        """Bytes read per generated token: a row's cache, and its share of the matrices (section 7); or None.

        Args:
            rows: In the batch.
        """
        return None if self.matrices is None else self.read + self.matrices / rows


def int8_size(numbers: int, matrices: int | None) -> CacheSize:
    """Keys and values in int8, with a scale in half precision for each 64 numbers.

    Args:
        numbers: Keys and values of a row, in all layers.
        matrices: As of `CacheSize`.
    """
    stored = numbers + _SCALE_BYTES * -(-numbers // _INT8_GROUP)
    return CacheSize("int8 keys and values", stored, stored, matrices)


def value_matrices(inputs: int, width: int, rank: int, matrix_dtype: torch.dtype) -> int:
    """Bytes of the matrices that a slim layer has in the place of ``W_V``: ``W_KV``, and two for V-coordinates.

    Args:
        inputs: d, of the projections.
        width: e, of keys and of values.
        rank: r, V-coordinates.
        matrix_dtype: Of the matrices.
    """
    with torch.device("meta"):
        values = SlimValues(inputs, width, width, rank, matrix_dtype)
    return sum(one.nbytes for one in values.buffers() if one.dim() == 2)
