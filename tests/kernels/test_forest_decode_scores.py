"""The decode kernels under windows, with sinks and with biases by distance, against the fp64 oracle."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest
from hf_fastdecode.attention.kv import ForestKV

from ..attention.forests import assert_error_rule, make_inputs, random_forest
from ..cases import exhaustive_but

pytest.importorskip("triton")
from hf_fastdecode.kernels.failures import Kernel, failure
from hf_fastdecode.kernels.forest_decode.api import Config, SuffixConfig

from .operator_runs import decode, pytorch_with_mask, rows_with_ages

INTERPRETED = not torch.cuda.is_available()


@pytest.mark.parametrize("queries", exhaustive_but([3], [1, 3]))
@pytest.mark.parametrize(
    ("window", "sinks"),
    [(None, True), *((window, sinks) for window in (1, 2, 40, 150, 10**6) for sinks in (False, True))],
)
def test_windows_and_sinks(window, sinks, queries):
    """A window may end in the new tokens, in the suffix, or in a node at any depth."""
    device = "cpu" if INTERPRETED else "cuda"
    rows, longest = (7, 60) if INTERPRETED else (70, 500)
    forest = random_forest(random.Random(5), rows, 3, longest=longest)
    assert len(forest.levels) == 3
    lengths = [queries + 9 * row % 50 for row in range(rows)]
    head_dim = 16 if INTERPRETED else 128
    options = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "queries": queries, "dtype": torch.half}
    query, kv = make_inputs(forest, lengths, **options, device=device)
    sink = torch.linspace(-3, 6, 8, device=device).half().float() if sinks else None
    suffix = SuffixConfig(merge=2)
    config = Config(16, block_n=16, overlap=False, suffix=suffix, overlap_suffix=queries == 3) if INTERPRETED else None
    out, lse = decode(query, kv, config=config, window=window, sinks=sink)
    oracle, oracle_lse = reference.forest_attention(query, kv, window=window, sinks=sink)
    yardstick, yardstick_lse = pytorch_with_mask(query, kv, window, sink)
    assert_error_rule(out, yardstick, oracle, oracle_lse)
    assert_error_rule(lse, yardstick_lse, oracle_lse, oracle_lse)


def with_biases(query: Tensor, kv: ForestKV, biases: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention of each row over a copy of its keys, in a dtype, with biases by distance; and its log-sum-exp."""
    outs, lses = [], []
    for *row, age in rows_with_ages(query, kv):
        bias = biases[:, age.clamp(0, biases.shape[1] - 1)].masked_fill(age < 0, -torch.inf).to(dtype)
        own, keys, values = (part.to(dtype) for part in row)
        outs.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=bias))
        lses.append(torch.logsumexp(own.double() @ keys.double().mT * query.shape[-1] ** -0.5 + bias.double(), -1))
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("rows", [7] if INTERPRETED else [12, 30, 48, 70, 150])  # by which tiles are chosen
@pytest.mark.parametrize(("queries", "group"), [(1, 1), (3, 1), (1, 4)])
def test_biases_by_distance(queries, group, rows):
    """Distances reach into the new tokens, the suffix, and nodes at any depth, beyond the last that has its own."""
    device = "cpu" if INTERPRETED else "cuda"
    forest = random_forest(random.Random(5), rows, 3, longest=60 if INTERPRETED else 500)
    lengths = [queries + 9 * row % 50 for row in range(rows)]
    heads, head_dim = 4, 16 if INTERPRETED else 128
    options = {"heads": heads, "kv_heads": heads // group, "head_dim": head_dim, "queries": queries}
    query, kv = make_inputs(forest, lengths, **options, dtype=torch.half, device=device)
    biases = 3 * torch.randn(heads, 41, generator=torch.Generator().manual_seed(0)).half().float().to(device)
    suffix = SuffixConfig(merge=2)
    config = Config(16, block_n=16, overlap=False, suffix=suffix, overlap_suffix=queries == 3) if INTERPRETED else None
    out, lse = decode(query, kv, config=config, biases=biases)
    oracle, oracle_lse = with_biases(query, kv, biases, torch.double)
    yardstick, yardstick_lse = with_biases(query, kv, biases, torch.half)
    assert_error_rule(out, yardstick, oracle, oracle_lse)
    assert_error_rule(lse, yardstick_lse.float(), oracle_lse, oracle_lse)


@pytest.mark.gpu
def test_more_tiles_than_a_multiprocessor_holds():
    """Biases are in flight too: these tiles take 272 KiB. Fewer are in flight then, and nothing else fails later."""
    forest = random_forest(random.Random(6), 48, 2, longest=500)
    options = {"heads": 2, "kv_heads": 2, "head_dim": 128, "dtype": torch.half}
    query, kv = make_inputs(forest, 20, **options, device="cuda")
    biases = torch.randn(2, 41, generator=torch.Generator().manual_seed(0)).half().float().cuda()
    out, _ = decode(query, kv, config=Config(64, block_n=128, stages=3, overlap=False), biases=biases)
    oracle, oracle_lse = with_biases(query, kv, biases, torch.double)
    assert_error_rule(out, with_biases(query, kv, biases, torch.half)[0], oracle, oracle_lse)
    assert failure(Kernel.FOREST, query.device) is None


@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min, -1e30])
@pytest.mark.parametrize(("window", "queries"), [(None, 1), (1, 1), (2, 4)])
def test_the_least_sink_is_none(least, window, queries):
    """Also where a tile of the suffix hides from a query."""
    device = "cpu" if INTERPRETED else "cuda"
    options = {"heads": 2, "kv_heads": 1, "head_dim": 16, "queries": queries, "dtype": torch.half}
    query, kv = make_inputs(Forest(2), queries + 20, **options, device=device)
    config = Config(16, block_n=16, overlap=False, suffix=SuffixConfig(merge=2))
    sinks = torch.full((2,), least, device=device)
    out, _ = decode(query, kv, config=config, window=window, sinks=sinks)
    without, _ = decode(query, kv, config=config, window=window)
    assert torch.equal(out, without)
