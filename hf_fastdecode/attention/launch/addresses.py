"""Device addresses of stored keys and values, as the kernels' tables hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..forest import Forest
from ..kv import Segment


def node_addresses(forest: Forest, segments: Sequence[Segment] | Mapping[int, Segment]) -> list[list[int]]:
    """Address of each node's keys, address of its values, and stride between KV heads in elements.

    Raises:
        ValueError: Keys and values of a segment have different strides.
    """
    spans = [node.span for node in forest.nodes]
    used = {span.segment: segments[span.segment] for span in spans}
    for segment in used.values():
        _check_strides(segment)
    head_strides = {number: segment.keys.stride(0) for number, segment in used.items()}

    def addresses(part: int) -> list[int]:  # computed, because `Segment.view` of every node takes many times as long
        bases = {number: segment[part].data_ptr() for number, segment in used.items()}
        token_bytes = {
            number: segment[part].stride(1) * segment[part].element_size() for number, segment in used.items()
        }
        return [bases[span.segment] + span.start * token_bytes[span.segment] for span in spans]

    return [addresses(0), addresses(1), [head_strides[span.segment] for span in spans]]


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
