"""What forest attention means: how context is shared, stored or cut changes nothing, and what a query sees.

Nothing shared is copied, and it is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Segment
from hf_fastdecode.attention.torch_operators.decode_ops import forest_attention

from .forests import (
    DTYPE_NAMES,
    LOW_AND_FULL,
    PROPERTY,
    Reads,
    assert_partials_close,
    fp64_inputs,
    make_inputs,
    own_keys_and_values,
)


@PROPERTY
@given(data=st.data())
def test_shared_equals_physically_duplicated(device: str, data: st.DataObject) -> None:
    query, kv = data.draw(fp64_inputs(device))
    segments, nodes, depth = [], [], [0] * kv.forest.rows
    for node in kv.forest.nodes:
        for row in range(node.row_start, node.row_stop):
            nodes.append(Node(Span(len(segments), 0, node.span.length), row, 1, depth[row]))
            segments.append(Segment(*(part.clone() for part in kv.node(node.span))))
            depth[row] += 1
    duplicated = ForestKV(Forest(kv.forest.rows, nodes), segments, kv.suffix, kv.suffix_lengths)
    assert_partials_close(forest_attention(query, kv), forest_attention(query, duplicated))


def test_segments_may_be_numbered_at_will(device: str) -> None:
    size = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float64, "device": device}
    query, kv = make_inputs(Forest(2, [Node(Span(0, 3, 9), 0, 2), Node(Span(1, 3, 4), 1, 1, 1)]), 5, **size)
    forest = Forest(2, [Node(Span(7, 3, 9), 0, 2), Node(Span(3, 3, 4), 1, 1, 1)])
    numbered = ForestKV(forest, {7: kv.segments[0], 3: kv.segments[1]}, kv.suffix, kv.suffix_lengths)
    assert_partials_close(forest_attention(query, numbered), forest_attention(query, kv))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [4, 9, 20, 38, 60])
def test_what_no_query_sees_is_not_read(window: int, queries: int, device: str) -> None:
    """Rows of one node see different parts of it; the tokens before all of these may be anything."""
    nodes = [Node(Span(0, 0, 40), 0, 6), Node(Span(1, 0, 9), 0, 3, 1), Node(Span(1, 9, 14), 3, 3, 1)]
    query, kv = make_inputs(Forest(6, nodes), 8, heads=4, kv_heads=2, head_dim=16, queries=queries, device=device)
    expected = forest_attention(query, kv, window=window)
    for node, behind in zip(kv.forest.nodes, (9 + 8, 8, 8), strict=True):  # the least that lies behind it
        hidden = node.span.length + behind - window - queries + 1
        for part in kv.node(node.span):
            part[:, : max(0, hidden)] = torch.nan
    for part in kv.suffix:
        part[:, :, : max(0, 8 - window - queries + 1)] = torch.nan
    for actual, same in zip(forest_attention(query, kv, window=window), expected, strict=True):
        assert torch.equal(actual, same)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_a_query_does_not_see_the_tokens_behind_it(ragged: bool, backend: str, queries: int, device: str) -> None:
    lengths = [9, 4 if ragged else 9]
    query, kv = make_inputs(
        Forest(2, [Node(Span(0, 0, 7), 0, 2)]),
        lengths,
        heads=2,
        kv_heads=1,
        head_dim=16,
        queries=queries,
        device=device,
    )
    before = forest_attention(query, kv, backend=backend)
    for behind in range(1, queries):
        for row, length in enumerate(lengths):
            kv.suffix.keys[row, :, length - behind] += 1.0
            kv.suffix.values[row, :, length - behind] += 1.0
        after = forest_attention(query, kv, backend=backend)
        torch.testing.assert_close(after.out[:, :, :-behind], before.out[:, :, :-behind])
        assert ((after.out - before.out)[:, :, -behind:].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, *LOW_AND_FULL], ids=DTYPE_NAMES.get)
def test_lse_is_the_natural_log_in_fp32(dtype: torch.dtype, backend: str, device: str) -> None:
    """A zero query scores 0 everywhere, so its log-sum-exp is ln(number of keys), and its output the mean value."""
    query, kv = make_inputs(
        Forest(3, [Node(Span(0, 0, 100), 0, 2)]),
        [5, 5, 5],
        heads=4,
        kv_heads=2,
        head_dim=16,
        dtype=dtype,
        device=device,
    )
    out, lse = forest_attention(torch.zeros_like(query), kv, backend=backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (out.dtype, lse.dtype) == (wide, wide)
    expected = torch.tensor([math.log(105), math.log(105), math.log(5)], dtype=wide, device=device)
    # Natural and binary logarithms differ by 44 %; PyTorch's CPU operator is right to 1e-5 in half precision.
    torch.testing.assert_close(lse, expected[:, None, None].expand(3, 4, 1), rtol=1e-4, atol=0)
    mean = torch.stack([own_keys_and_values(kv, row)[1].double().mean(1) for row in range(3)])
    assert (out[:, :, 0].double() - mean.repeat_interleave(2, 1)).abs().max() < 8 * torch.finfo(dtype).eps


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
