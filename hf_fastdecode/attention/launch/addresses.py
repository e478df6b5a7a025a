"""Device addresses of stored keys and values, as the kernels' tables hold them.

Keys and values of a segment, and of the suffixes, have equal strides, and tokens lie ``head_dim`` numbers apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..forest import Forest
from ..kv import Segment


def node_addresses(
    forest: Forest, segments: Sequence[Segment] | Mapping[int, Segment], suffix: Segment | None = None
) -> Tensor:
    """Address of each node's keys, address of its values, and stride between KV heads in numbers.

    Args:
        forest: The nodes.
        segments: Storage of shared nodes.
        suffix: Storage of own nodes, ``[rows, kv_heads, capacity, head_dim]`` each; needed if there are any.

    Returns:
        ``[3, nodes]`` int64, on the CPU.

    Raises:
        ValueError: Keys and values have different strides.
    """
    numbers, starts = forest.places
    table = np.zeros((3, len(numbers)), dtype=np.int64)  # arithmetic, because a view per node takes far longer
    for number in np.unique(numbers[numbers >= 0]).tolist():
        own, segment = numbers == number, segments[number]
        _check_strides(segment)
        for column, part in enumerate(segment):
            table[column, own] = part.data_ptr() + starts[own] * part.stride(1) * part.element_size()
        table[2, own] = segment.keys.stride(0)
    if suffix is not None:
        _check_strides(suffix)
        own = numbers < 0
        rows = -1 - numbers[own]  # see `own_segment`
        for column, part in enumerate(suffix):
            table[column, own] = part.data_ptr() + rows * part.stride(0) * part.element_size()
        table[2, own] = suffix.keys.stride(1)
    return torch.from_numpy(table)


def suffix_addresses(suffix: Segment, first: int = 0) -> list[int]:
    """Addresses of the suffixes' keys and values from token `first` on, and strides of rows and KV heads.

    Raises:
        ValueError: Keys and values have different strides.
    """
    _check_strides(suffix)
    begin = first * suffix.keys.stride(2) * suffix.keys.element_size()
    return [suffix.keys.data_ptr() + begin, suffix.values.data_ptr() + begin, *suffix.keys.stride()[:2]]


def _check_strides(segment: Segment) -> None:
    """The kernels step through values as through keys."""
    keys, values = segment
    if keys.stride() == values.stride():
        return
    if any(size > 1 and key != value for size, key, value in zip(keys.shape, keys.stride(), values.stride())):
        raise ValueError(
            f"keys and values need equal strides, got {keys.stride()} and {values.stride()}; store both in one layout"
        )
