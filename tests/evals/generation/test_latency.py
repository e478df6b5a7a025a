"""Latency of drawing n samples, apart from what they are worth."""

import pytest
import torch

from hf_fastdecode.evals import generation as latency
from hf_fastdecode.evals.generation import measure_latency
from hf_fastdecode.evals.run_folder import Drawing


def measured(small, n, **options):
    drawing = Drawing(max_new_tokens=24, **options)
    return measure_latency(small.model, small.tokenizer, small.form, small.tasks[:2], n, drawing, device="a CPU")


@pytest.mark.parametrize("way", ["shared", "stock"])
def test_times_are_in_order(small, way):
    row = measured(small, 4, way=way)
    assert (row.way, row.mode, row.n, row.device, row.runs, row.status) == (way, "eager", 4, "a CPU", 2, "ok")
    assert 0 < row.prefill_s < row.first_sample_s <= row.median_sample_s <= row.last_sample_s <= row.last_sample_s_p90
    assert 0 < row.ms_per_step_p50 <= row.ms_per_step_p90
    assert row.peak_bytes is None


def test_one_sample_gains_nothing_and_is_timed_all_the_same(small):
    assert measured(small, 1).last_sample_s > 0


def test_memory_that_runs_out_is_a_status(small, monkeypatch):
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(latency, "draw_rows", exhausted)
    for mode, named in (("auto", "eager"), ("graph", "graph"), ("compile", "compile")):
        assert measured(small, 4, mode=mode).mode == named
    row = measured(small, 4)
    assert row.status == "out of memory"
    assert row.last_sample_s != row.last_sample_s  # NaN


def test_other_errors_are_raised(small, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("something else")

    monkeypatch.setattr(latency, "draw_rows", broken)
    with pytest.raises(RuntimeError, match="something else"):
        measured(small, 4)
