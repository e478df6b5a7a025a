"""Levels of sharing: the same rows and tokens, and only what is shared differs."""

from __future__ import annotations

from functools import wraps

import pytest
import torch

import hf_fastdecode as fd
from benchmarks.workloads import measure as calls
from benchmarks.workloads import measure as hier
from benchmarks.workloads.cases import LEVELS
from benchmarks.workloads.measure import HierBench
from hf_fastdecode.measurement import calls as measurement

from .models import OWN, QUICK, SHARED, problem_tokens

SAMPLES = 4


@pytest.fixture
def bench(model):
    return HierBench(model, problem_tokens(), name="tiny", task="random", shots=2, timing=QUICK)


@pytest.fixture
def case(bench):
    return bench.case(3, SAMPLES)


def test_the_levels_give_the_same_greedy_tokens(model, bench, case):
    alone = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=3, min_new_tokens=3)[0, len(prompt) :]
        for prompt in problem_tokens()
    ]
    expected = torch.stack(alone)[:, None].expand(-1, SAMPLES, -1)
    assert len({tuple(tokens.tolist()) for tokens in alone}) == 3
    for name, level in LEVELS.items():
        assert torch.equal(bench._greedy(case, level), expected), name


ALL_OWN = sum(OWN)


@pytest.mark.parametrize(
    ("level", "nodes", "prefilled"),
    [
        ("none", "", 3 * SAMPLES * (SHARED + max(OWN))),
        ("few-shot", f"1 node(s), {SHARED} tokens, depth 1: {3 * SAMPLES} node(s)", SHARED + SAMPLES * ALL_OWN),
        ("problem", f"depth 0: 3 node(s), {3 * SHARED + ALL_OWN} tokens)", 3 * SHARED + ALL_OWN),
        ("two-level", f"1 node(s), {SHARED} tokens, depth 1: 3 node(s), {ALL_OWN} tokens)", SHARED + ALL_OWN),
    ],
    ids=list(LEVELS),
)
def test_a_level_shares_what_it_says_and_no_more(bench, case, level, nodes, prefilled):
    row = bench.measure(case, level)
    assert row["status"] == "ok"
    assert nodes in row.get("forest", "")
    assert row["prefilled_tokens"] == prefilled
    new = 3 * SAMPLES * (QUICK.new_tokens - 1)
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head_dim, bytes
    assert row["kv_bytes"] == (prefilled + new) * per_token
    assert row["prefill_s"] > 0
    assert row["total_s"] == row["prefill_s"] + row["decode_s"]
    assert row["ms_per_step"] == pytest.approx(1e3 * row["decode_s"] / (QUICK.new_tokens - 1))


def test_a_case_says_what_its_prompts_share(bench, case):
    assert case.shared_tokens == SHARED
    assert case.prompt_tokens == SHARED + max(OWN)
    assert case.columns()["problems"] == 3
    assert bench.case(2, 2).prompt_tokens == SHARED + OWN[0]


def test_the_model_is_left_as_it_was(model, bench, case):
    before, config = vars(model).copy(), model.generation_config
    for level in LEVELS:
        bench.measure(case, level)
    assert vars(model) == before
    assert model.generation_config is config
    assert not fd.explain(model).enabled


def test_other_tokens_than_stocks_are_told(monkeypatch, bench, case):
    def wrong(model, batch, enable, new_tokens):
        return torch.full((len(batch["input_ids"]), new_tokens), 5 if enable is None else 6)

    monkeypatch.setattr(hier, "greedy_tokens", wrong)
    assert bench.measure(case, "two-level") == {"status": "wrong: other greedy tokens than stock"}
    assert bench.measure(case, "none")["status"] == "ok"
    bench._check = False
    assert bench.measure(case, "two-level")["status"] == "ok"


def test_a_level_that_ran_stock_is_no_measurement(model, case):
    bench = HierBench(model, problem_tokens(), name="tiny", task="random", shots=2, timing=QUICK, check=False)
    model.register_forward_hook(lambda *args: None)  # which must see what stock gives it
    row = bench.measure(case, "two-level")
    assert row["status"].startswith("not run: it ran stock: ")


@pytest.mark.parametrize("level", ["none", "two-level"])
def test_where_calls_are_captured_decoding_is_what_is_over_one_token(monkeypatch, bench, case, level):
    # The numbers of a GPU, on a CPU: calls of one token and whole ones, in turn.
    lengths = []
    inner = bench.model.generate

    @wraps(inner)
    def counted(*args, **kwargs):
        lengths.append(kwargs["max_new_tokens"])
        return inner(*args, **kwargs)

    monkeypatch.setattr(bench.model, "generate", counted)
    monkeypatch.setattr(measurement, "begin_peak", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 25)
    monkeypatch.setattr(
        measurement, "wall_samples", lambda call, *args, **kwargs: [call() is None or 0.5 * lengths[-1]]
    )
    row = calls.measure_calls(
        bench.model, bench._batch(case, LEVELS[level]), bench._enable(case, LEVELS[level]), QUICK
    )
    assert lengths == [3, 1, 1, 3]
    assert (row["prefill_s"], row["decode_s"], row["ms_per_step"]) == (0.5, 1.0, 500.0)
    assert row["peak_bytes"] == 15
    assert row["tokens_per_s"] == 3 * SAMPLES * 2
