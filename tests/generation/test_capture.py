"""Captured decode steps: on a GPU in graphs; here the same steps over the same tables, uncaptured and interpreted."""

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation import modes
from hf_fastdecode.generation.capture import bucket
from hf_fastdecode.generation.seams import seams_of

from ..tiny_models import ragged_prompts, seeded, tiny_model

pytest.importorskip("triton")
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 6}
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")


@pytest.fixture
def uncaptured(monkeypatch):
    """Let captured modes run where kernels are interpreted."""
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)


def test_buckets():
    assert [bucket(rows) for rows in (1, 2, 3, 5, 64, 65, 128, 129, 192, 193, 257, 385, 1000, 1025)] == [
        *(1, 2, 4, 8, 64, 128, 128, 192, 192, 256, 384, 512, 1024, 1536),
    ]


@on_the_cpu
@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa", "qwen3", "gpt2"])
def test_tables_give_stock_tokens_in_every_call(name, uncaptured):
    """Other prompts, lengths, trees and fewer rows through the tables of one captured step."""
    model = tiny_model(name)
    calls = [
        ragged_prompts(41, 36, shared=33) | SAMPLING,
        ragged_prompts(57, 40, shared=35, seed=1) | SAMPLING,
        ragged_prompts(70, seed=2) | SAMPLING | {"num_return_sequences": 5},
    ]
    stock = [seeded(lambda call=call: model.generate(**call)) for call in calls]
    with fd.enabled(model, mode="graph", backend="triton"):
        for call, expected in zip(calls, stock, strict=True):
            assert torch.equal(seeded(lambda call=call: model.generate(**call)), expected)
            assert fd.explain(model).last_call.mode == "graph"
        assert seams_of(model).captures.count == 1


@on_the_cpu
def test_rows_that_end_leave_for_a_smaller_step(uncaptured):
    model = tiny_model("llama-gqa")
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    call |= {"num_return_sequences": 4, "eos_token_id": list(range(3, 20)), "max_new_tokens": 16}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        report = fd.explain(model).last_call
        used = {key[0] for key in seams_of(model).captures._steps}
    assert report.compactions >= 2
    assert {2, 8} <= used
    assert used <= {1, 2, 4, 8}
    assert report.captures == len(used)
