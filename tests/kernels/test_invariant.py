"""Products, attention and norms in a fixed order of sums: a row has the same bits in every launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from hf_fastdecode.kernels.invariant import api, schedule
from hf_fastdecode.kernels.invariant.api import addresses, attend, attention_config, linear
from hf_fastdecode.kernels.invariant.schedule import Config, Queries
from hf_fastdecode.kernels.pointwise.api import NormForm, rms_norm

from .operator_runs import DEVICE, assert_as_exact, random

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLACES = [(1, 0), (3, 2), (70, 0), (70, 68), (70, 33)]
"""Rows of a launch, and the place among them of the row that is looked at."""

SMALL = Config(16, block_n=16, split=32, stages=1)


def among(row, rows, place, seed=9):
    """`row` at a place among other rows."""
    others = random(rows, *row.shape, seed=seed, dtype=row.dtype)
    others[place] = row
    return others


def bits_of_products(dtype, compute=linear, width=200, columns=100):
    x, weight, bias = (random(*shape, seed=3, dtype=dtype) for shape in ((width,), (columns, width), (columns,)))
    return [compute(among(x, rows, place), weight, bias)[place] for rows, place in PLACES]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_has_the_same_bits_in_every_launch(dtype):
    first, *others = bits_of_products(dtype)
    assert all(torch.equal(first, other) for other in others)


def in_parts_for_many(x, weight, *bias):
    """A product whose width is summed in two parts, from 16 rows on."""
    if x.numel() < 16 * x.shape[-1]:
        return linear(x, weight, *bias)
    half = x.shape[-1] // 2
    return linear(x[..., :half], weight[:, :half], *bias) + linear(x[..., half:], weight[:, half:])


def test_products_whose_parts_depend_on_rows_have_not():
    """Which the test before would tell."""
    first, *others = bits_of_products(torch.float32, in_parts_for_many)
    assert not all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_products_and_their_gradients_are_pytorchs(dtype):
    x, weight, bias = (random(*shape, seed=4, dtype=dtype) for shape in ((2, 5, 72), (40, 72), (40,)))
    given = [part.requires_grad_() for part in (x, weight, bias)]
    found, stock = linear(*given), F.linear(*given)
    assert_as_exact(found, stock, F.linear(*(part.double() for part in given)))
    grad = random(*found.shape, seed=5, dtype=dtype)
    for mine, theirs in zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(stock, given, grad), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_has_the_same_bits_in_every_launch(dtype):
    x, weight = random(200, seed=3, dtype=dtype), random(200, seed=4, dtype=dtype)
    found = [rms_norm(among(x, *place), weight, 1e-6, NormForm.ROUNDED)[place[1]] for place in PLACES]
    assert all(torch.equal(found[0], other) for other in found)


def exact_attention(
    query: Tensor,
    runs: Sequence[tuple[Tensor, Tensor]],
    queries: Sequence[Queries],
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``out`` ``[queries, heads, head_dim]`` and ``lse`` ``[heads, queries]``, fp64."""
    outs, lses, done = [], [], 0
    for one in queries:
        keys, values = (torch.cat([runs[run][part] for run in one.path], 1).double() for part in (0, 1))
        own = query[done : done + one.tokens].double().transpose(0, 1)
        group = len(own) // len(keys)
        steps, stored = (torch.arange(size, device=query.device) for size in (one.tokens, keys.shape[1]))
        age = (one.position + steps)[:, None] - stored
        hidden = (age < 0) | (age >= (keys.shape[1] if window is None else window))
        scores = (own @ keys.repeat_interleave(group, 0).mT * scale).masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ values.repeat_interleave(group, 0)).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
        done += one.tokens
    return torch.cat(outs), torch.cat(lses, 1)


TOKENS, HEADS, KV_HEADS, HEAD_DIM = 90, 4, 2, 24


def cut(stored, *ends):
    """Runs of one row's keys and values that end after these tokens."""
    bounds = pairwise([0, *accumulate(ends)])
    return [tuple(part[:, first:last].clone() for part in stored) for first, last in bounds]


def bits_of_attention(dtype, window=None, config_of=lambda queries: SMALL):
    """The last token of a row of 90: of whole rows, and by steps whose rows share 0, 40 and 64 tokens."""
    size = (KV_HEADS, TOKENS, HEAD_DIM)
    stored = random(*size, seed=1, dtype=dtype), random(*size, seed=2, dtype=dtype)
    query = random(TOKENS, HEADS, HEAD_DIM, seed=3, dtype=dtype)
    other = tuple(random(*size, seed=seed, dtype=dtype) for seed in (7, 8))

    def of(runs, queries, rows):
        config = config_of(len(rows))
        launches = schedule.schedule(queries, [run[0].shape[1] for run in runs], HEADS // KV_HEADS, window, config)
        launches = [tables.to(rows.device) for tables in launches]
        return attend(rows, addresses(runs), launches, KV_HEADS, 0.2, config)[0], runs, queries, rows

    last = query[-1:]
    yield of([stored], [Queries((0,), 0, TOKENS)], query), -1
    yield of(cut(stored, 33, 57), [Queries((0,), 0, 33), Queries((0, 1), 33, 57)], query), -1
    yield of([stored], [Queries((0,), TOKENS - 1, 1)], last), 0
    for shared, rows, place in ((40, 3, 1), (64, 11, 10), (40, 11, 0)):
        node, own = cut(stored, shared, TOKENS - shared)
        theirs = tuple(part[:, shared:] for part in other)  # suffixes of other rows, some of which are shorter
        runs = [node, *(own if row == place else tuple(part[:, : 5 + row] for part in theirs) for row in range(rows))]
        queries = [Queries((0, 1 + row), shared + runs[1 + row][0].shape[1] - 1, 1) for row in range(rows)]
        yield of(runs, queries, among(last[0], rows, place)), place


@pytest.mark.parametrize(
    ("dtype", "window"),
    [(torch.float32, None), (torch.bfloat16, 50), pytest.param(torch.float16, None, marks=pytest.mark.exhaustive)],
)
def test_attention_has_the_same_bits_however_rows_share_keys(dtype, window):
    found = [
        (out[place], runs, queries, rows) for (out, runs, queries, rows), place in bits_of_attention(dtype, window)
    ]
    assert all(torch.equal(found[0][0], other) for other, *_ in found)


def test_attention_whose_splits_depend_on_rows_has_not():
    found = [
        out[place]
        for (out, *_), place in bits_of_attention(
            torch.float32, None, lambda rows: SMALL._replace(split=32 if rows < 4 else 64)
        )
    ]
    assert not all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("window", [None, 50])
def test_attention_is_that_of_the_oracle(window, monkeypatch):
    """In several launches, too."""
    monkeypatch.setattr(schedule, "MOST_ENTRIES", 40)
    monkeypatch.setattr(schedule, "_AT_ONCE", 16)
    for (out, runs, queries, rows), _ in bits_of_attention(torch.float32, window):
        exact, _ = exact_attention(rows, runs, queries, 0.2, window)
        assert (out - exact).abs().max() < 1e-5


def test_log_sum_exp_and_the_constants_of_models():
    """One KV head with seven query heads of 128."""
    keys = random(1, 600, 128, seed=1)
    query, runs, queries = random(30, 7, 128, seed=2), cut((keys, keys), 570, 30), [Queries((0, 1), 570, 30)]
    config = attention_config(128, torch.float32)
    launches = [part.to(query.device) for part in schedule.schedule(queries, [570, 30], 7, None, config)]
    out, lse = attend(query, addresses(runs), launches, 1, 0.1, config)
    exact = exact_attention(query, runs, queries, 0.1)
    assert (out - exact[0]).abs().max() < 1e-5
    assert (lse - exact[1]).abs().max() < 1e-5


def test_other_arguments_are_refused():
    x, weight = random(2, 8, seed=1), random(4, 8, seed=1)
    for given in ((x.half(), weight), (x[:, :4], weight), (x, weight, weight[:, 0].half()), (x, weight, x[0])):
        with pytest.raises(ValueError, match="linear takes"):
            linear(*given)
    with pytest.raises(ValueError, match="at most 128"):
        attend(random(1, 2, 256, seed=1), x, [], 2, 1.0, SMALL)
    assert (api.refusal(torch.device("cpu")) is None) == (DEVICE == "cpu")
