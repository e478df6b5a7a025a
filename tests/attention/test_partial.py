"""The algebra of `merge`: partials over disjoint sets of keys form a commutative monoid, and merging is exact.

And the fp64 oracle itself, against PyTorch's own attention over a physical copy of the keys.
"""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest
from hf_fastdecode.attention.kv import Partial, empty_partial, merge

from .forests import FP64, PROPERTY, fp64_inputs, last_queries_see, make_inputs, own_keys_and_values

MANY = settings(deadline=None, database=None)
HEAD_DIM = 4

LSE = st.one_of(
    st.just(float("-inf")),
    st.sampled_from([0.0, 1e4, -1e4, 1e4 - 1, 88.0, -104.0]),
    st.floats(-1e4, 1e4, allow_nan=False, width=32),
)


@st.composite
def partials(draw: st.DrawFn, count: int | None = None, dtype: torch.dtype = torch.float64) -> list[Partial]:
    """Partials of one query, any of them empty, of any score range."""
    count = draw(st.integers(1, 6)) if count is None else count
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lses = draw(st.lists(st.lists(LSE, min_size=3, max_size=3), min_size=count, max_size=count))
    parts = []
    for numbers in lses:
        lse = torch.tensor(numbers, dtype=dtype)
        out = torch.randn(3, HEAD_DIM, generator=generator, dtype=dtype)
        parts.append(Partial(out.masked_fill(lse.isneginf()[:, None], 0.0), lse))
    return parts


def assert_same(actual: Partial, expected: Partial) -> None:
    """Equal up to what the size of the exponents costs in their dtype."""
    eps = torch.finfo(expected.lse.dtype).eps
    largest = expected.lse.nan_to_num(neginf=0.0).abs().max().item()
    tolerance = 32 * eps * (1 + largest)
    assert actual.out.dtype == actual.lse.dtype == expected.lse.dtype
    assert torch.equal(actual.lse.isneginf(), expected.lse.isneginf())
    torch.testing.assert_close(actual.lse, expected.lse, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(actual.out, expected.out, rtol=tolerance, atol=tolerance)


def attend(scores: Tensor, values: Tensor) -> Partial:
    """Attention by definition: ``scores [queries, keys]``, ``values [keys, head_dim]``, in fp64."""
    if scores.shape[1] == 0:
        return empty_partial((scores.shape[0], values.shape[1]), dtype=torch.float64)
    return Partial(torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@MANY
@given(data=st.data(), order=st.randoms(use_true_random=False))
def test_many_at_once_equal_pairs_in_any_order(dtype: torch.dtype, data: st.DataObject, order: object) -> None:
    parts = data.draw(partials(dtype=dtype))
    together = merge(*parts)
    assert_same(reduce(merge, parts), together)
    order.shuffle(parts)  # type: ignore[attr-defined]
    assert_same(merge(*parts), together)
    while len(parts) > 1:  # a balanced tree, as devices merge
        parts = [merge(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    assert_same(parts[0], together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@MANY
@given(data=st.data())
def test_empty_partial_is_the_identity_to_the_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    (part,) = data.draw(partials(1, dtype))
    empty = empty_partial((3, HEAD_DIM), dtype=dtype)
    for merged in (merge(part, empty), merge(empty, part)):
        assert torch.equal(merged.out, part.out)
        assert torch.equal(merged.lse, part.lse)


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_merging_empty_partials_stays_empty(count: int, dtype: torch.dtype) -> None:
    merged = merge(*[empty_partial((2, 3, HEAD_DIM), dtype=dtype)] * count)
    assert torch.equal(merged.out, torch.zeros(2, 3, HEAD_DIM, dtype=dtype))
    assert torch.equal(merged.lse, torch.full((2, 3), -torch.inf, dtype=dtype))


def test_an_empty_partial_has_zero_out_and_minus_infinite_fp32_lse() -> None:
    out, lse = empty_partial((2, 0, 5))
    assert (out.shape, lse.shape) == ((2, 0, 5), (2, 0))
    out, lse = empty_partial((2, 3, 5))
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert torch.equal(out, torch.zeros(2, 3, 5)) and bool((lse == -torch.inf).all())


def test_one_partial_alone_is_returned_as_it_is() -> None:
    part = empty_partial((2, HEAD_DIM))
    assert merge(part) is part


@MANY
@given(parts=partials())
def test_merge_leaves_its_arguments_alone(parts: list[Partial]) -> None:
    before = [Partial(part.out.clone(), part.lse.clone()) for part in parts]
    merge(*parts)
    for part, copy in zip(parts, before, strict=True):
        assert torch.equal(part.out, copy.out) and torch.equal(part.lse, copy.lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("gap", [200.0, 2e4, 3e38])
def test_a_negligible_part_leaves_the_other_as_it_is(gap: float, dtype: torch.dtype) -> None:
    a = Partial(torch.full((1, HEAD_DIM), 3.0, dtype=dtype), torch.full((1,), gap / 2, dtype=dtype))
    b = Partial(torch.full((1, HEAD_DIM), -7.0, dtype=dtype), torch.full((1,), -gap / 2, dtype=dtype))
    for merged in (merge(a, b), merge(b, a)):
        assert_same(merged, a)


def test_equal_parts_average_and_add_ln_2_at_any_score() -> None:
    for lse in (-1e4, -100.0, 0.0, 100.0, 1e4):
        a = Partial(torch.full((1, 1), 1.0, dtype=torch.float64), torch.full((1,), lse, dtype=torch.float64))
        merged = merge(a, Partial(a.out + 2.0, a.lse))
        assert merged.out.item() == pytest.approx(2.0, rel=1e-11)
        assert merged.lse.item() - lse == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-7)


@MANY
@given(
    owner=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    spread=st.sampled_from([0.0, 1.0, 30.0, 3000.0]),
    seed=st.integers(0, 2**32),
)
def test_partials_of_any_disjoint_split_merge_to_attention_over_the_union(
    owner: list[int], spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(3, len(owner), generator=generator, dtype=torch.float64)
    values = torch.randn(len(owner), HEAD_DIM, generator=generator, dtype=torch.float64)
    part_of = torch.tensor(owner)
    parts = [attend(scores[:, part_of == part], values[part_of == part]) for part in range(5)]
    assert_same(merge(*parts), attend(scores, values))


def test_partials_broadcast() -> None:
    generator = torch.Generator().manual_seed(0)
    one = Partial(torch.randn(1, HEAD_DIM, generator=generator), torch.randn(1, generator=generator))
    many = Partial(torch.randn(5, HEAD_DIM, generator=generator), torch.randn(5, generator=generator))
    spread = Partial(one.out.expand(5, HEAD_DIM), one.lse.expand(5))
    for merged, expected in ((merge(one, many), merge(spread, many)), (merge(many, one), merge(many, spread))):
        assert torch.equal(merged.out, expected.out) and torch.equal(merged.lse, expected.lse)


def test_nan_is_not_hidden():
    broken = Partial(torch.ones(1, 2), torch.tensor([torch.nan]))
    for merged in (merge(broken, Partial(torch.zeros(1, 2), torch.zeros(1))), merge(empty_partial((1, 2)), broken)):
        assert merged.out.isnan().all()
        assert merged.lse.isnan().all()


@PROPERTY
@given(data=st.data())
def test_the_oracle_is_pytorchs_attention_over_a_physical_copy(data: st.DataObject) -> None:
    query, kv = data.draw(fp64_inputs())
    out, lse = reference.forest_attention(query, kv, 0.3)
    head_dim, value_dim = query.shape[-1], out.shape[-1]
    for row in range(query.shape[0]):
        keys, values = own_keys_and_values(kv, row)
        group = query.shape[1] // keys.shape[0]
        visible = last_queries_see(query.shape[2], keys.shape[1], "cpu")
        for head in range(query.shape[1]):
            own = query[row, head], keys[head // group], values[head // group]
            torch.testing.assert_close(
                out[row, head], F.scaled_dot_product_attention(*own, visible, scale=0.3), **FP64
            )
            weights = torch.exp(0.3 * own[0] @ own[1].T) * visible
            torch.testing.assert_close(lse[row, head], weights.sum(-1).log(), **FP64)
    assert (out.shape[-1], head_dim) == (value_dim, kv.suffix.keys.shape[-1])


def test_the_oracle_caps_scores_softly() -> None:
    query, kv = make_inputs(Forest(1), [3], heads=1, kv_heads=1, head_dim=4, dtype=torch.float64)
    scores = 2.0 * torch.tanh(0.5 * query[0, 0] @ kv.suffix.keys[0, 0, :3].T / 2.0)
    out, lse = reference.forest_attention(query, kv, 0.5, softcap=2.0)
    torch.testing.assert_close(lse[0, 0], scores.exp().sum(-1).log(), **FP64)
    torch.testing.assert_close(out[0, 0], torch.softmax(scores, -1) @ kv.suffix.values[0, 0, :3], **FP64)
