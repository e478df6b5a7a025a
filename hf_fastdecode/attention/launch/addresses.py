"""Device addresses of stored keys and values, as the kernels' tables hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..forest import Forest
from ..kv import Segment


def node_addresses(forest: Forest, segments: Sequence[Segment] | Mapping[int, Segment]) -> list[list[int]]:
    """Address of each node's keys, address of its values, and stride between KV heads in elements."""
    spans = [node.span for node in forest.nodes]
    used = {span.segment: segments[span.segment] for span in spans}

    def column(part: int) -> list[int]:  # arithmetic, because a view per node takes longer than the rest of a plan
        bases = {number: segment[part].data_ptr() for number, segment in used.items()}
        steps = {number: segment[part].stride(1) * segment[part].element_size() for number, segment in used.items()}
        return [bases[span.segment] + span.start * steps[span.segment] for span in spans]

    heads = {number: segment.keys.stride(0) for number, segment in used.items()}
    return [column(0), column(1), [heads[span.segment] for span in spans]]


def suffix_addresses(suffix: Segment, first: int = 0) -> list[int]:
    """Addresses of the suffixes' keys and values from token `first` on, and strides of rows and KV heads."""
    begin = first * suffix.keys.stride(2) * suffix.keys.element_size()
    return [suffix.keys.data_ptr() + begin, suffix.values.data_ptr() + begin, *suffix.keys.stride()[:2]]
