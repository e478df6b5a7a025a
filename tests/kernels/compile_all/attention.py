"""Launches of the decode and the prefill kernels."""

from __future__ import annotations

from itertools import cycle, product

import torch
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import Scoring
from hf_fastdecode.attention.launch.plan import HeadShape, LaunchPlan
from hf_fastdecode.kernels.forest_decode.api import Config, forest_decode, forest_partial
from hf_fastdecode.kernels.forest_decode.limits import most_packed_of_latents
from hf_fastdecode.kernels.forest_decode.merge import merge_ranks
from hf_fastdecode.kernels.forest_decode.schedule import Schedule
from hf_fastdecode.kernels.prefill.api import prefill_attention, prefill_partial

from .pretended import CUDA, made


def attend_everything() -> None:
    """Decode steps of many layouts over contexts of many lengths, in turn with everything that scores can undergo."""
    dtypes = cycle((torch.bfloat16, torch.float16))
    scorings = cycle(
        Scoring(0.1, softcap=softcap, window=window, sinks=sinks)
        for softcap, window, sinks in product((None, 30.0), (None, 500), (None, torch.zeros(1)))
    )
    layouts = product(
        (64, 80, 96, 128, 192, 256),  # head_dim
        ((1, 8), (1, 32), (3, 3), (4, 8), (8, 1), (16, 2)),  # query heads of a KV head, KV heads
        (1, 7, 33, 128, 1024),  # rows
        (300, 20_000),  # tokens of the node that all rows share
        (1, 3),  # tokens of a row
    )
    for (head_dim, (group, kv_heads), rows, context, queries), dtype, scoring in zip(layouts, dtypes, scorings):
        attend(dtype, head_dim, group, kv_heads, shared(rows, context), queries, scoring)
    # Many tokens of a row, as of prompt lookup; 256 packed queries of 256 numbers are more than small GPUs hold.
    for head_dim, (group, kv_heads), rows in product((64, 128, 256), ((2, 8), (4, 8), (7, 4), (8, 1)), (1, 40)):
        attend(torch.bfloat16, head_dim, group, kv_heads, shared(rows, 300), 16, Scoring(0.1))
    for dtype, softcap, (group, kv_heads), head_dim in product(
        (torch.bfloat16, torch.float16), (None, 30.0), ((1, 32), (4, 8), (16, 1)), (64, 80, 128)
    ):
        attend(dtype, head_dim, group, kv_heads, deep_tree(), 1, Scoring(0.1, softcap))
    for head_dim, rows, queries in product((64, 128), (1, 16, 32, 64, 128), (1, 3)):
        biased = Scoring(1.0, distances=torch.empty(32, 129, device=CUDA))
        attend(torch.bfloat16, head_dim, 1, 32, shared(rows, 4), queries, biased)


def attend_to_latents() -> None:
    """Decode steps of multi-head latent attention."""
    for (latent, rest), rows, queries in product(((512, 64), (256, 64), (256, 32)), (1, 7, 64), (1, 3)):
        if 16 * queries > most_packed_of_latents(CUDA):
            continue
        attend(torch.bfloat16, latent, 16, 2, shared(rows, 8192), queries, Scoring(0.1), rest)
    for (head_dim, rest), rows, queries in product(((128, 64), (256, 64), (64, 32)), (16, 64, 128), (1, 3)):
        # The nodes as keys and values that were made of latents.
        query = made(rows, 16, queries, head_dim + rest, dtype=torch.bfloat16)
        plan = LaunchPlan(shared(rows, 8192), HeadShape(16, queries, head_dim, False, rest=rest), CUDA)
        tables = made(4, 1, dtype=torch.int64), made(rows, dtype=torch.int32), plan.schedule(plan.grid), plan.config
        forest_partial(query, *tables, kv_heads=16, scale=0.1, rest=rest)


def shared(rows: int, tokens: int) -> Forest:
    """A node that all rows share."""
    return Forest(rows, [Node(Span(0, 0, tokens), 0, rows)])


def deep_tree() -> Forest:
    """Eight levels of short nodes, which are read in chains."""
    levels = [(depth, 1 << depth) for depth in range(8)]
    nodes = [
        Node(Span(depth, 16 * index, 16), index * 1024 // count, 1024 // count, depth)
        for depth, count in levels
        for index in range(count)
    ]
    return Forest(1024, nodes)


def attend(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    kv_heads: int,
    forest: Forest,
    queries: int,
    scoring: Scoring,
    rest: int = 0,
) -> None:
    """One decode step of a layer, with suffixes that are short and long, in order and reordered."""

    rows = forest.rows
    query = made(rows, group * kv_heads, queries, head_dim + rest, dtype=dtype)
    new = tuple(made(rows, kv_heads, queries, width, dtype=dtype) for width in (head_dim, rest or head_dim))
    if scoring.sinks is not None:
        scoring = Scoring(scoring.scale, scoring.softcap, scoring.window, made(group * kv_heads))
    addresses = made(3, len(forest.nodes), dtype=torch.int64), made(4, dtype=torch.int64)
    rows_of = made(rows, dtype=torch.int32), made(rows, dtype=torch.int32)
    plan = LaunchPlan(forest, HeadShape.of(query, new[0], scoring), CUDA)
    for programs in {plan.programs(0), plan.programs(2000)}:
        schedule = plan.schedule(programs)
        for origins in (None, made(rows, 4096, dtype=torch.int32)):
            tables = (*addresses, *rows_of, schedule, plan.config)
            scores = {"scale": scoring.scale, "soft_cap": scoring.softcap, "window": scoring.window}
            biases = {"sinks": scoring.sinks, "biases": scoring.distances}
            forest_decode(query, *new, *tables, **scores, **biases, origins=origins)
        if not rest:
            attend_in_parts(query, new, addresses, rows_of, schedule, plan.config, scoring)


def attend_in_parts(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    addresses: tuple[Tensor, Tensor],
    rows_of: tuple[Tensor, Tensor],
    schedule: Schedule,
    config: Config,
    scoring: Scoring,
) -> None:
    """The nodes alone, a step that returns its partial, and one of divided suffixes."""
    nodes, kv_heads = addresses[0], new[0].shape[1]
    parts = {"scale": scoring.scale, "soft_cap": scoring.softcap}
    if scoring.window is not None or scoring.distances is not None:
        return
    forest_partial(query, nodes, rows_of[0], schedule, config, kv_heads=kv_heads, **parts)
    into = made(*query.shape), made(*query.shape[:-1])
    merge_ranks(made(2, query.numel() + query[..., 0].numel()), *into)
    parts |= {"sinks": scoring.sinks, "into": into}
    for lengths in (rows_of[1], made(3, query.shape[0], dtype=torch.int32)):
        forest_decode(query, *new, *addresses, rows_of[0], lengths, schedule, config, **parts)


def prefill_everything() -> None:
    """Passes of layers with soft caps, windows and sinks: alone, and over a context, whose partial is merged.

    With gradients, or over two runs of keys at once, as in passes without a cache.
    """
    layouts = product((64, 80, 96, 128, 192, 256), ((1, 8), (2, 8), (8, 8)), (torch.bfloat16, torch.float16))
    for (head_dim, (group, kv_heads), dtype), (softcap, sinks) in product(
        layouts, product((None, 30.0), (False, True))
    ):
        query = made(group * kv_heads, 1000, head_dim, dtype=dtype)
        keys = made(kv_heads, 1000, head_dim, dtype=dtype)
        earlier = made(*query.shape), made(*query.shape[:2])
        own = made(len(query)) if sinks else None
        options = {"scale": 0.1, "soft_cap": softcap}
        for rows in (3, 5) if dtype == torch.bfloat16 else (3,):
            intervals = made(rows, 1000, dtype=torch.int32)
            prefill_partial(query, keys, keys, intervals, earlier=earlier, **options)
            for before, lse in product((None, earlier), (None, earlier[1]) if rows == 5 else (None,)):
                prefill_attention(query, keys, keys, intervals, sinks=own, earlier=before, lse=lse, **options)
