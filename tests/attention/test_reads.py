"""Nothing shared is copied, and it is read once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Segment
from hf_fastdecode.attention.torch_operators.decode_ops import forest_attention

from .forests import DTYPE_NAMES, LOW_AND_FULL, make_inputs
from .reads import Reads


def shared_kv(*nodes: Node, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ForestKV]:
    """Six rows over nodes that fill their storage and are larger than all their scores."""
    query, kv = make_inputs(
        Forest(6, nodes), [5, 6, 7, 8, 5, 6], heads=4, kv_heads=2, head_dim=64, dtype=dtype, device=device
    )
    size = [max(node.span.stop for node in nodes if node.span.segment == index) for index in range(len(kv.segments))]
    segments = [
        Segment(*(part[:, :stop].clone() for part in segment)) for segment, stop in zip(kv.segments, size, strict=True)
    ]
    return query, ForestKV(kv.forest, segments, kv.suffix, kv.suffix_lengths)


TREE = (Node(Span(0, 0, 400), 0, 6), Node(Span(1, 0, 300), 0, 4, 1), Node(Span(2, 0, 350), 4, 2, 1))
ALIKE = tuple(Node(Span(0, 200 * index, 200), 2 * index, 2) for index in range(3))


@pytest.mark.parametrize("dtype", LOW_AND_FULL, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["nocap", "softcap5"])
@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("nodes", [TREE, ALIKE], ids=["tree", "alike"])
def test_shared_keys_and_values_are_read_once_and_never_spread(
    nodes: tuple[Node, ...], backend: str, softcap: float | None, dtype: torch.dtype, device: str
) -> None:
    query, kv = shared_kv(*nodes, device=device, dtype=dtype)
    plain = backend == "plain" or softcap is not None  # needs fp32 operands, which a batch of nodes must lie close for
    with Reads([tensor for segment in kv.segments for tensor in segment], may_copy=plain) as reads:
        forest_attention(query, kv, softcap=softcap, backend=backend)
    assert list(reads.count.values()) == [1] * len(reads.count)


@pytest.mark.parametrize(
    "spread",
    [
        pytest.param(lambda keys: keys.repeat_interleave(2, 0), id="repeat_interleave"),
        pytest.param(lambda keys: keys[None].expand(6, -1, -1, -1), id="expand"),
        pytest.param(lambda keys: keys.clone(), id="clone"),
    ],
)
def test_the_watch_for_copies_sees_one(spread: Callable[[Tensor], Tensor]) -> None:
    keys = torch.randn(2, 40, 8)
    with Reads([keys]), pytest.raises(AssertionError, match=r"spreads|copies"):
        spread(keys)
    if spread(keys).numel() > keys.numel():
        with Reads([keys], may_copy=True), pytest.raises(AssertionError, match="spreads"):
            spread(keys.double())
