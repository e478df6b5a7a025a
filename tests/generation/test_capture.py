"""Captured decode steps: on a GPU in graphs; here the same steps over the same tables, uncaptured and interpreted."""

import gc
import weakref

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captures as capture
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.steps.captured_step import CapturedStep, bucket

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import as_in_stock
from .uncaptured import SAMPLING, SMALL, on_the_cpu

pytest.importorskip("triton")
SMALL_GPT2 = {"n_layer": 1, "n_head": 2}


def test_buckets():
    assert [bucket(rows) for rows in (1, 2, 3, 5, 64, 65, 128, 129, 192, 193, 257, 385, 520, 1000, 1025)] == [
        *(1, 2, 4, 8, 64, 128, 128, 192, 192, 256, 320, 448, 640, 1024, 1280)
    ]


@pytest.mark.parametrize(
    ("now", "then", "known", "least"),
    [
        (256, 128, {256}, 25),  # 25 steps of 128 rows fewer, against 8 of 128 and the time of 256
        (256, 128, {256, 128}, 0),
    ],
)
def test_a_smaller_size_must_pay_for_its_capture(now, then, known, least):
    assert modes.switch_saves_time(now, then, least, known)
    assert not least or not modes.switch_saves_time(now, then, least - 1, known)
    assert not modes.switch_saves_time(now, now, 10**9, known)


@on_the_cpu
@pytest.mark.parametrize(
    ("name", "sizes"), [("llama-gqa", {"num_hidden_layers": 1}), ("gpt2", SMALL_GPT2)], ids=["llama-gqa", "gpt2"]
)
def test_tables_give_stock_tokens_in_every_call(name, sizes, uncaptured):
    """Other prompts, lengths, trees and fewer rows through the tables of one captured step."""
    model = tiny_model(name, **sizes)
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
        assert state_of(model).captures.count == 1


@on_the_cpu
def test_rows_that_end_leave_for_a_smaller_step(uncaptured, monkeypatch):
    monkeypatch.setattr(modes, "_STEPS_OF_A_CAPTURE", 0)  # of so few steps none pays for a capture
    model = tiny_model(**SMALL)
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    call |= {"num_return_sequences": 4, "eos_token_id": list(range(3, 20)), "max_new_tokens": 16}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        report = fd.explain(model).last_call
        used = {step.rows for step in state_of(model).captures._steps}
    assert report.compactions >= 2
    assert {2, 8} <= used
    assert used <= {1, 2, 4, 8}
    assert report.captures == len(used)


@on_the_cpu
@pytest.mark.parametrize(
    ("mode", "error"),
    [("auto", torch.OutOfMemoryError("no memory")), ("graph", RuntimeError("not permitted when capturing"))],
)
def test_rows_go_on_in_the_captured_steps_of_more(uncaptured, monkeypatch, mode, error):
    """Where those of fewer rows cannot be captured: the batch is not split, and it is not tried again."""
    monkeypatch.setattr(modes, "_STEPS_OF_A_CAPTURE", 0)
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0)
    make, sizes = CapturedStep.__init__, []

    def make_or_fail(self, model, rows, *args):
        sizes.append(rows)
        if len(sizes) > 1:
            raise error
        make(self, model, rows, *args)

    monkeypatch.setattr(CapturedStep, "__init__", make_or_fail)
    model = tiny_model(**SMALL)
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    call |= {"num_return_sequences": 2, "eos_token_id": list(range(3, 20)), "max_new_tokens": 16}
    report = as_in_stock(model, lambda: model.generate(**call), mode=mode, backend="triton")
    assert (report.mode, report.waves, report.captures) == ("graph", 0, 1)
    assert len(sizes) == 2


@on_the_cpu
def test_the_steps_that_were_used_last_are_kept(uncaptured, monkeypatch):
    monkeypatch.setattr(capture, "_MOST_STEPS", 2)
    model = tiny_model(**SMALL)
    call = ragged_prompts(41) | SAMPLING | {"max_new_tokens": 2}
    with fd.enabled(model, mode="graph", backend="triton"):
        captures, tables = state_of(model).captures, {}
        for samples, captured, kept in ((1, 1, [1]), (2, 2, [1, 2]), (1, 2, [2, 1]), (3, 3, [1, 4]), (2, 4, [4, 2])):
            model.generate(**call | {"num_return_sequences": samples})
            assert captures.count == captured
            assert [step.rows for step in captures._steps] == kept
            tables |= {step.rows: weakref.ref(step.tables) for step in captures._steps}
        gc.collect()
        assert {rows for rows, table in tables.items() if table() is not None} == {2, 4}


@on_the_cpu
def test_captures_are_freed_with_the_option(uncaptured):
    model = tiny_model(**SMALL)
    with fd.enabled(model, mode="graph", backend="triton"):
        model.generate(**ragged_prompts(70), **SAMPLING)
        tables = [weakref.ref(step.tables) for step in state_of(model).captures._steps]
    gc.collect()
    assert tables
    assert not any(table() for table in tables)


@on_the_cpu
def test_a_few_steps_do_not_pay_for_a_capture(uncaptured, monkeypatch):
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE", 6)
    model = tiny_model(**SMALL)
    call = ragged_prompts(70) | SAMPLING | {"max_new_tokens": 2}
    modes_seen = []
    with fd.enabled(model, backend="triton"):
        for _ in range(3):
            model.generate(**call)
            modes_seen.append(fd.explain(model).last_call.mode)
    assert modes_seen == ["eager", "eager", "graph"]


@on_the_cpu
def test_one_row_is_captured_too(uncaptured):
    model = tiny_model(**SMALL)
    call = ragged_prompts(60) | SAMPLING | {"num_return_sequences": 1}
    as_in_stock(model, lambda: model.generate(**call), "shared", mode="graph", backend="triton")
