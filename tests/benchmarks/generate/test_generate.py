"""Whole calls of generate on the CPU, tiny: what a row holds, what is refused, attention that is replaced; models."""

import math
from dataclasses import replace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_fastdecode as fd
from benchmarks.generate import measure as generate
from benchmarks.generate import ways as replacing
from benchmarks.generate.calls import caller, check_way, load, logits_error
from benchmarks.generate.cases import WAYS
from benchmarks.generate.measure import GenerateBench
from benchmarks.generate.ways import find_way, using, without_attention
from hf_fastdecode.attention.interface import shared_context_attention
from hf_fastdecode.attention.overrides import ATTENTION_NAME
from hf_fastdecode.measurement.rows import NotAvailableError
from hf_fastdecode.measurement.shapes import SHAPES, parameters, random_model

from .tiny_case import CASE, CPU, PER_TOKEN


def test_stock_and_shared(bench):
    stock, shared = (bench.measure(CASE, way) for way in ("stock", "shared"))
    assert stock["status"] == shared["status"] == "ok"
    assert stock["embedded_tokens"] == 4 * (120 + 7)
    assert shared["embedded_tokens"] == 120 + 4 * 7
    assert shared["kv_bytes"] == shared["floor_kv_bytes"] == (120 + 4 * 8) * PER_TOKEN
    assert stock["kv_bytes"] == 4 * (120 + 7) * PER_TOKEN
    assert shared["total_s"] > shared["prefill_s"] > 0
    assert shared["first_call_s"] > 0
    assert shared["tokens_per_s"] == pytest.approx(4e3 / shared["ms_per_step"])
    assert (stock["ran"], shared["ran"], shared["steps"]) == (None, "eager, sampler hf", 7)
    assert list(stock) == list(shared)


@pytest.mark.parametrize("way", ["stock-static", "eager", "eager+sampler=hf"])
def test_other_ways(bench, way):
    row = bench.measure(CASE, way)
    assert row["status"] == "ok"
    assert math.isfinite(row["ms_per_step"])


def test_the_ceiling_has_steps_only(bench):
    row = bench.measure(CASE, "eager-no-attention")
    assert row["status"] == "ok"
    assert math.isfinite(row["ms_per_step"])
    assert row["prefill_s"] is row["total_s"] is row["kv_bytes"] is None


def test_what_cannot_run_here_says_why(bench):
    fresh = GenerateBench(torch.device("cpu"))
    for way in ("graph", "graph-no-attention"):
        assert fresh.measure(CASE, way)["status"] == "not run: mode='graph' needs a CUDA device, got cpu"
    assert fresh._model.key is None  # which may have taken gigabytes
    with pytest.raises(ValueError, match=r"an option of a way is one of .*, got 'nosuch' in 'shared\+nosuch=1'"):
        bench.measure(CASE, "shared+nosuch=1")


def test_a_call_that_ran_stock_is_not_measured_as_ours(bench):
    row = bench.measure(replace(CASE, samples=1), "shared")
    assert row["status"].startswith("not run: it ran stock: sharing would save 0 tokens")
    assert row["ms_per_step"] is None


def test_wrong_tokens_are_not_measured(monkeypatch):
    monkeypatch.setattr(replacing.GenerateWay, "exact", True)
    row = GenerateBench(CPU, repeats=1).measure(CASE, "eager-no-attention")
    assert row["status"] == "wrong: other tokens than stock in fp32 on cpu"
    assert row["ms_per_step"] is None
    assert GenerateBench(CPU, repeats=1, check=False).measure(CASE, "eager-no-attention")["status"] == "ok"


def test_wrong_tokens_of_the_case_itself_are_not_measured(monkeypatch):
    bench = GenerateBench(CPU, repeats=1)
    monkeypatch.setattr(generate, "check_way", lambda *arguments: None)
    monkeypatch.setattr(replacing.GenerateWay, "exact", True)
    row = bench.measure(CASE, "eager-no-attention")
    assert row["status"] == "wrong: other tokens than stock in this very case"
    assert row["ms_per_step"] is None


def test_logits_in_half_precision(monkeypatch):
    assert 0 < logits_error(find_way("eager"), CPU, torch.bfloat16) <= 2
    monkeypatch.setattr("benchmarks.generate.calls.gives_stock_tokens", lambda *arguments: True)
    monkeypatch.setattr(replacing.GenerateWay, "exact", True)
    assert check_way(find_way("eager-no-attention"), CPU, torch.bfloat16).startswith("wrong: logits err ")


def test_slow_calls_run_as_often_as_their_times_need(monkeypatch):
    ran = []
    monkeypatch.setattr(
        generate, "caller", lambda *args: lambda count, **more: ran.append(count) or made(count, **more)
    )
    model = random_model("tiny", CPU, torch.float32)
    made = caller(model, CASE, find_way("shared"))
    slow = GenerateBench(CPU, repeats=1, check=False, budget_s=0.0001)
    monkeypatch.setattr(slow, "model", lambda *args: model)
    row = slow.measure(CASE, "shared")
    assert row["status"] == "ok"
    assert row["kv_bytes"] == row["floor_kv_bytes"] - 4 * PER_TOKEN  # by the report: but for the last tokens
    assert ran == [8, 1, 8, 1, 1]  # first, to the first token, whole; of one sample


def test_calls_that_warm_up_may_be_short(monkeypatch):
    """The timed call alone draws all tokens, after the shorter first one and one of one token."""
    asked, bench = [], GenerateBench(CPU, repeats=1, check=False, warm_up=3)
    real = generate.caller

    def counting(*args, **kwargs):
        call = real(*args, **kwargs)
        return lambda tokens, **more: asked.append(tokens) or call(tokens, **more)

    monkeypatch.setattr(generate, "caller", counting)
    assert bench.measure(CASE, "shared")["status"] == "ok"
    assert asked.count(CASE.new_tokens) == 1 and asked[0] == 3


def test_the_check_is_of_attention_whoever_draws():
    assert check_way(find_way("eager+sampler=fast"), CPU, torch.float32) is None


def test_out_of_memory_and_errors_are_results(bench, monkeypatch):
    def fail(error):
        def call(*arguments, **options):
            raise error

        return call

    model = bench.model(CASE, find_way("stock"))
    monkeypatch.setattr(model, "generate", fail(torch.OutOfMemoryError("on purpose")))
    assert bench.measure(CASE, "stock")["status"] == "out of memory"
    monkeypatch.setattr(model, "generate", fail(RuntimeError("on purpose")))
    row = bench.measure(CASE, "shared")
    assert row["status"] == "failed: RuntimeError: on purpose"
    monkeypatch.setattr(model, "generate", fail(ValueError("num_beams is wrong")))
    assert bench.measure(CASE, "shared")["status"] == "failed: ValueError: num_beams is wrong"
    assert not fd.explain(model).enabled


def test_every_way_is_known():
    for name in WAYS:
        assert find_way(name).exact != (name.endswith("-no-attention") or name.startswith("quantized-"))
    with pytest.raises(ValueError, match=r"a way is one of stock, .*, got 'fast'"):
        find_way("fast")
    with pytest.raises(ValueError, match=r"options are written NAME=VALUE behind one of ours.*got 'stock\+a=1'"):
        find_way("stock+a=1")
    assert find_way("slim-k+r+sampler=hf") == replace(find_way("slim-k+r"), enable={"sampler": "hf"})
    assert find_way("slim-k+mode=graph").enable == {"mode": "graph"}
    with pytest.raises(ValueError, match=r"an option of a way is one of .*, got 'mode' in 'graph\+mode=eager'"):
        find_way("graph+mode=eager")
    with pytest.raises(
        ValueError, match=r"options are written NAME=VALUE behind one of ours.*got 'stock-slim-k\+r\+a=1'"
    ):
        find_way("stock-slim-k+r+a=1")
    assert find_way("graph+sampler=fast+min_shared_tokens=8").enable == {
        "mode": "graph",
        "sampler": "fast",
        "min_shared_tokens": 8,
    }


def test_attention_is_put_back(model):
    before = dict(vars(ALL_ATTENTION_FUNCTIONS)["_local_mapping"])

    def twice():
        with without_attention():
            assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is not shared_context_attention
            with without_attention():
                pass

    with pytest.raises(RuntimeError, match="replaced already"):
        twice()
    assert vars(ALL_ATTENTION_FUNCTIONS)["_local_mapping"] == before
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is shared_context_attention


def test_attention_that_was_not_replaced_is_noticed(model):
    with pytest.raises(NotAvailableError, match="not replaced"), using(model, find_way("eager-no-attention")):
        pass
    assert not fd.explain(model).enabled


def test_without_attention_in_steps_tokens_after_the_first_differ(model):
    """Prefill attends all the same: a captured pass stores keys and values where its attention is called."""
    drawn = []
    for way in ("eager", "eager-no-attention"):
        torch.manual_seed(0)
        with using(model, find_way(way)):
            drawn.append(caller(model, CASE, find_way(way))(8))
    assert not torch.equal(*drawn)
    assert torch.equal(*(tokens[:, : CASE.context + 1] for tokens in drawn))


def test_models(tmp_path, model):
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = load(str(tmp_path / "checkpoint"), CPU, torch.float32)
    assert loaded.generation_config.eos_token_id is None
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    with pytest.raises(
        ValueError,
        match=r"shape must be one of 7b-mha, .*, tiny-mha, tiny-experts, tiny-8-heads, got '9b'",
    ):
        random_model("9b", CPU, torch.float32)


BILLIONS = {
    **{"7b-mha": 6.7, "7b-gqa": 7.2, "8b-gqa": 8.0, "8b-mqa": 7.8, "13b-mha": 13.0, "1b-gqa": 1.2, "qwen3-4b": 4.0},
    **{"mistral-7b": 7.2, "gemma2-9b": 9.2, "gemma3-12b": 11.8, "gpt-oss-20b": 20.9, "deepseek-v2-lite": 15.7},
    "qwen3-30b-a3b": 30.5,
    **{"qwen3.5-4b": 4.2, "nemotron-h-8b": 8.1, "falcon-7b": 6.9},
    **{"tiny": 0.0, "tiny-mha": 0.0, "tiny-experts": 0.0, "tiny-8-heads": 0.0},
}


def test_sizes_of_shapes() -> None:
    """The published numbers of weights; Gemma 3's is of its text model."""
    assert {shape: round(parameters(shape) / 1e9, 1) for shape in SHAPES} == BILLIONS
