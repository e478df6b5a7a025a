"""Devices, dtypes and random inputs of kernel tests; `forest_decode` on a forest, compared with the fp64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest
from hf_fastdecode.attention.kv import ForestKV, Partial, Segment
from hf_fastdecode.attention.launch.kernel_call import AddressesOfLayers, suffix_addresses
from hf_fastdecode.attention.launch.plan import node_shapes
from hf_fastdecode.kernels.device import compute_capability, multiprocessors, shared_memory
from hf_fastdecode.kernels.forest_decode.api import Config, SuffixConfig, choose_config, forest_decode
from hf_fastdecode.kernels.forest_decode.schedule import Capacity, Schedule, make_schedule
from hf_fastdecode.parallel.shards import Shard, stored_forest

from ..attention.forests import assert_error_rule, own_keys_and_values, pytorch_attention, pytorch_lse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Triton's interpreter cuts numbers off where bf16 rounds them.
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)

DTYPES = [torch.float32, torch.float16, BF16]

PRODUCT_DTYPES = [
    torch.float16,
    BF16,
    pytest.param(torch.float32, marks=pytest.mark.skipif(DEVICE == "cuda", reason="Triton multiplies fp32 in tf32")),
]
"""Of kernels with matrix products."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, the same on each device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_as_exact(found: Tensor, stock: Tensor, exact: Tensor) -> None:
    """Error at most twice that of PyTorch's or transformers' implementation, and a rounding."""
    assert (found.shape, found.dtype) == (stock.shape, stock.dtype)
    assert found.isfinite().all()
    most = 2 * (stock - exact).norm() + torch.finfo(found.dtype).eps * exact.norm()
    assert (found - exact).norm() <= most


def small_config(**changes: Any) -> Config:
    """Launch parameters for nodes and suffixes of few tokens; the kernels start early where they are compiled."""
    return Config(16, block_n=16, overlap=DEVICE == "cuda", suffix=SuffixConfig(merge=2), **changes)


def schedule_of(
    forest: Forest,
    kv_heads: int,
    queries: int,
    config: Config,
    device: torch.device,
    *,
    fewer_programs: bool = False,
    capacity: Capacity | None = None,
) -> Schedule:
    """The schedule of a forest for so many packed queries of a row and KV head, see `decode`."""
    grid = config.per_sm * multiprocessors(device)
    return make_schedule(
        node_shapes(forest, queries, config),
        forest.rows,
        kv_heads=kv_heads,
        queries=queries,
        block_m=config.block_m,
        block_n=config.block_n,
        programs=max(1, grid * 2 // 3) if config.overlap_suffix and fewer_programs else grid,
        device=device,
        capacity=capacity,
        grid=grid,
        chain=config.chain,
    )


def decode(
    query: Tensor,
    kv: ForestKV,
    *,
    softcap: float | None = None,
    config: Config | None = None,
    slots: Tensor | None = None,
    capacity: Capacity | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    biases: Tensor | None = None,
    fewer_programs: bool = True,
    origins: Tensor | None = None,
    into: Partial | None = None,
    divided: bool = False,
    return_lse: bool = True,
    rounded: bool = True,
):
    """Run the kernels: the last tokens of the suffixes are handed over as new, and poisoned where they belong.

    The result is in the query's dtype, unless not `rounded`: then it is the partial in fp32.

    With `origins` ``[rows, tokens]``, which name each slot once for a token, earlier tokens are stored there.
    Where a configuration allows for it, the schedule leaves a third of the programs to suffixes if `fewer_programs`.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads = kv.suffix.keys.shape[1]
    queries_per_kv_head = heads // kv_heads * queries
    before = torch.tensor(kv.lengths(), dtype=torch.int32, device=query.device) - queries
    at = before[:, None] + torch.arange(queries, device=query.device)
    widths = [part.shape[-1] for part in kv.suffix]  # latents differ in them
    indices = [at[:, None, :, None].expand(-1, kv_heads, -1, width).long() for width in widths]
    new = [part.gather(2, index) for part, index in zip(kv.suffix, indices)]
    new[1] = torch.cat([new[1], torch.full_like(new[1], torch.nan)], -1)[..., : widths[1]]  # strides of their own
    suffix = Segment(*(part.scatter(2, index, torch.nan) for part, index in zip(kv.suffix, indices)))
    slots = torch.arange(rows, dtype=torch.int32, device=query.device) if slots is None else slots
    taking = slots >= 0
    stored = Segment(*(torch.full_like(part, torch.nan) for part in suffix))
    for whole, part in zip(stored, suffix, strict=True):
        if origins is None:
            whole[slots[taking].long()] = part[taking]
        else:
            tokens = torch.arange(origins.shape[1], device=query.device)
            whole.movedim(2, 1)[origins.long(), tokens] = part[:, :, : len(tokens)].movedim(2, 1)
    widest = max((node.row_count for node in kv.forest.nodes), default=1) * queries_per_kv_head
    config = config or choose_config(
        widest,
        head_dim,
        queries_per_kv_head=queries_per_kv_head,
        rows=rows,
        kv_heads=kv_heads,
        overlap=query.is_cuda and compute_capability(query.device) >= (9, 0),
        shared_memory=shared_memory(query.device),
        windowed=window is not None or biases is not None,
        biased=biases is not None,
        latents=widths[0] != head_dim,
    )
    if into is None and return_lse:
        shape = (rows, heads, queries, widths[0])
        into = Partial(*(torch.empty(size, device=query.device) for size in (shape, shape[:3])))
    sizes = (kv_heads, queries_per_kv_head, config, query.device)
    schedule = schedule_of(kv.forest, *sizes, fewer_programs=fewer_programs, capacity=capacity)
    out, lse = forest_decode(
        query,
        *new,
        AddressesOfLayers(kv.forest).of(kv.segments).to(query.device),
        torch.tensor(suffix_addresses(stored), device=query.device),
        slots,
        before.repeat(3, 1) if divided else before,
        schedule,
        config,
        scale=head_dim**-0.5,
        soft_cap=softcap,
        window=window,
        sinks=sinks,
        biases=biases,
        origins=origins,
        into=into,
    )
    for whole, part, index in zip(stored, new, indices, strict=True):
        written = whole[slots[taking].long()].gather(2, index[taking])
        assert torch.equal(written, part[taking]), "the new tokens were not appended"
    return out.to(query.dtype) if rounded else out, lse


def decode_divided(
    query: Tensor, kv: ForestKV, shard: Shard, *, softcap: float | None, config: Config, sinks: Tensor | None = None
) -> Partial:
    """The partial of one rank, from what it stores of nodes and suffixes; checks what it appends."""
    rows, heads, queries, head_dim = query.shape
    kv_heads = kv.suffix.keys.shape[1]
    whole = torch.tensor(kv.lengths(), dtype=torch.int32, device=query.device)
    before, nodes = whole - queries, replace(shard, block=1)
    forest = stored_forest(kv.forest, lambda _: nodes)
    segments = [
        Segment._make(part[:, nodes.stored_tokens(0, part.shape[1]).to(part.device)] for part in segment)
        for segment in kv.segments
    ]
    places = [shard.stored_tokens(0, int(length)).to(query.device) for length in whole]
    stored = Segment(*(torch.full_like(part, torch.nan) for part in kv.suffix))
    expected = Segment(*(part.clone() for part in stored))
    for row, own in enumerate(places):
        old = own[own < before[row]]
        for empty, full, part in zip(stored, expected, kv.suffix, strict=True):
            empty[row, :, : len(old)] = part[row, :, old]
            full[row, :, : len(own)] = part[row, :, own]
    at = before[:, None] + torch.arange(queries, device=query.device)
    new = [part.gather(2, at[:, None, :, None].expand(-1, kv_heads, -1, head_dim).long()) for part in kv.suffix]
    schedule = schedule_of(forest, kv_heads, heads // kv_heads * queries, config, query.device)
    buffer = torch.full((query.numel() // head_dim * (head_dim + 1),), torch.nan, device=query.device)
    into = buffer[: query.numel()].view(query.shape), buffer[query.numel() :].view(query.shape[:-1])
    forest_decode(
        query,
        *new,
        AddressesOfLayers(forest).of(segments).to(query.device),
        torch.tensor(suffix_addresses(stored), device=query.device),
        torch.arange(rows, dtype=torch.int32, device=query.device),
        torch.stack([shard.counts(before), *shard.next_stored(before)]),
        schedule,
        config,
        scale=head_dim**-0.5,
        soft_cap=softcap,
        sinks=sinks if shard.counts_sinks else None,
        into=into,
    )
    for found, wanted in zip(stored, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    return Partial(*into)


def check(
    query: Tensor,
    kv: ForestKV,
    *,
    softcap: float | None = None,
    config: Config | None = None,
    fewer_programs: bool = True,
) -> None:
    options = {"softcap": softcap, "config": config, "fewer_programs": fewer_programs}
    partial, lse = decode(query, kv, **options, rounded=False)
    out, _ = decode(query, kv, **options, return_lse=False)
    assert partial.dtype == torch.float32
    assert torch.equal(out, partial.to(query.dtype)), "not the same bits twice"
    check_result((out, lse), query, kv, softcap=softcap)


def check_result(
    found: tuple[Tensor, Tensor],
    query: Tensor,
    kv: ForestKV,
    *,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Hold a result and its log-sum-exp against the oracle: at most twice the errors of PyTorch's attention."""
    oracle, oracle_lse = reference.forest_attention(query, kv, softcap=softcap, window=window, sinks=sinks)
    if window is None and sinks is None:
        stock = pytorch_attention(query, kv, softcap=softcap), pytorch_lse(query, kv, softcap=softcap)
    else:
        stock = pytorch_with_mask(query, kv, window, sinks)
    assert_error_rule(found[0], stock[0], oracle, oracle_lse)
    assert_error_rule(found[1], stock[1], oracle_lse, oracle_lse)


def rows_with_ages(query: Tensor, kv: ForestKV) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Each row's queries ``[heads, queries, head_dim]``, its keys and values for each query head, and the distance of
    each key from each query, ``[queries, keys]``."""
    heads, queries, _ = query.shape[1:]
    for row, own in enumerate(query):
        keys, values = (part.repeat_interleave(heads // part.shape[0], 0) for part in own_keys_and_values(kv, row))
        length = keys.shape[1]
        age = length - queries + torch.arange(queries, device=query.device)[:, None]
        yield own, keys, values, age - torch.arange(length, device=query.device)


def pytorch_with_mask(query: Tensor, kv: ForestKV, window: int | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """PyTorch's attention under a mask that hides what a window does, with a sink as a key of zeros; and its LSE."""
    outs, lses = [], []
    for own, keys, values, age in rows_with_ages(query, kv):
        hidden = (age < 0) | (age >= (window or keys.shape[1] + 1))
        bias = torch.zeros(len(own), *age.shape, device=query.device).masked_fill(hidden, -torch.inf)
        if sinks is not None:
            bias = torch.cat([bias, sinks[:, None, None].expand(-1, len(age), 1)], dim=2)
            keys, values = (F.pad(part, (0, 0, 0, 1)) for part in (keys, values))
        outs.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=bias.to(query.dtype)))
        lses.append(torch.logsumexp(own.float() @ keys.float().mT * query.shape[-1] ** -0.5 + bias, -1))
    return torch.stack(outs), torch.stack(lses)
