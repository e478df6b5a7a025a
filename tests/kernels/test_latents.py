"""The decode kernels over latents, whose first numbers are values too, against the fp64 oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.kv import ForestKV, Segment

from ..attention.forests import assert_error_rule, make_inputs, pytorch_attention, random_forest

pytest.importorskip("triton")
from hf_fastdecode.kernels.device import shared_memory
from hf_fastdecode.kernels.forest_decode.api import Config, SuffixConfig
from hf_fastdecode.kernels.forest_decode.config import choose_config
from hf_fastdecode.kernels.forest_decode.limits import refusal

from .operator_runs import decode

GPU = torch.cuda.is_available()


def keys_and_values(kv: ForestKV) -> ForestKV:
    """Latents with what follows them as keys, and latents as values."""

    def joined(parts: Segment) -> Segment:
        return Segment(torch.cat(parts, -1), parts.keys)

    return replace(kv, segments=[joined(parts) for parts in kv.segments], suffix=joined(kv.suffix))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("latent", "rest"), [(512, 64), (256, 64), (256, 32)] if GPU else [(32, 8)])
def test_against_the_oracle(latent, rest, queries):
    """Nodes at two depths, and suffixes that differ in length."""
    device, rows = ("cuda", 33) if GPU else ("cpu", 3)
    forest = random_forest(random.Random(3), rows, 2, longest=700 if GPU else 60)
    lengths = [queries + 7 * row % 40 for row in range(rows)]
    dtype = torch.bfloat16 if GPU else torch.float16
    sizes = {"heads": 16 if GPU else 2, "kv_heads": 1, "queries": queries, "dtype": dtype, "device": device}
    _, kv = make_inputs(forest, lengths, head_dim=latent, value_dim=rest, **sizes)
    query, _ = make_inputs(forest, lengths, head_dim=latent + rest, **sizes)
    config = None if GPU else Config(16, block_n=16, overlap=False, suffix=SuffixConfig(merge=2))
    out, lse = decode(query, kv, config=config)
    whole = keys_and_values(kv)
    oracle, oracle_lse = reference.forest_attention(query, whole)
    assert_error_rule(out, pytorch_attention(query, whole), oracle, oracle_lse)
    torch.testing.assert_close(lse.double(), oracle_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("memory", [227, 163, 99])
def test_launch_parameters_fit(memory):
    for packed in (1, 16, 512):
        config = choose_config(packed, 576, overlap=True, latents=True, shared_memory=1024 * memory)
        assert 2 * 576 * (config.block_m + config.stages * config.block_n) <= 1024 * memory


def test_queries_that_tiles_do_not_hold_are_refused():
    """128 queries of a group of 16 heads would take 256 KiB of shared memory."""
    device = "cuda" if GPU else "cpu"
    for queries, most in ((4, None), (5, 64)):
        query, keys, rest = (
            torch.zeros(1, heads, queries, width, dtype=torch.half, device=device)
            for heads, width in ((16, 576), (1, 512), (1, 64))
        )
        found = refusal(query, keys, rest, [])
        if not GPU or shared_memory(query.device) >= 160 * 1024:
            assert found == (
                most and f"it takes up to {most} queries of a group of heads over latents at once here, got 80"
            )
