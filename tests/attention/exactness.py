"""Exact comparison: in fp64 only the order of additions is left."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from hf_fastdecode.attention.kv import ForestKV
from hf_fastdecode.attention.partial import Partial

from .forests import make_inputs, random_forest

PROPERTY = settings(deadline=None, database=None, max_examples=60)
FP64 = {"rtol": 1e-11, "atol": 1e-12}


def assert_partials_close(actual: Partial | tuple[Tensor, Tensor], expected: Partial | tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, other, **FP64)


@st.composite
def fp64_inputs(draw: st.DrawFn, device: str = "cpu") -> tuple[Tensor, ForestKV]:
    """Any forest of up to four levels, any suffixes, any grouping of heads, and one to four queries a row."""
    rows, queries = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    forest = random_forest(draw(st.randoms(use_true_random=False)), rows, draw(st.integers(0, 4)))
    length = st.integers(queries, queries + 6)
    lengths = draw(
        st.one_of(length, length.map(lambda same: [same] * rows), st.lists(length, min_size=rows, max_size=rows))
    )
    kv_heads = draw(st.integers(1, 3))
    return make_inputs(
        forest,
        lengths,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 20])),
        value_dim=draw(st.sampled_from([None, None, 12])),
        queries=queries,
        dtype=torch.float64,
        device=device,
        seed=draw(st.integers(0, 1000)),
    )
