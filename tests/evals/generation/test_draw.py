"""Samples of a call: what is kept of them, and their log-probabilities."""

from dataclasses import replace

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.evals.generation.draw import Drawing, draw_rows, read_samples, sharing
from hf_fastdecode.evals.generation.rescore import rescored

DRAWING = Drawing(max_new_tokens=40)


def samples_of(small, drawing=DRAWING, count=6, seed=3):
    with sharing(small.model, drawing):
        drawn = draw_rows(small.model, small.tokenizer, small.form, small.tasks, count, drawing, seed=seed)
    return drawn, read_samples(drawn, small.model, small.tokenizer, small.form, small.tasks)


def test_both_ways_draw_the_same_samples(small):
    drawn, shared = samples_of(small)
    _, stock = samples_of(small, replace(DRAWING, way="stock"))
    assert [(one.task_id, one.index, one.completion, one.tokens) for one in shared] == [
        (one.task_id, one.index, one.completion, one.tokens) for one in stock
    ]
    assert all(abs(one.sum_logp - other.sum_logp) < 1e-3 for one, other in zip(shared, stock))
    assert len({one.completion for one in shared}) > len(small.tasks)
    assert drawn.started < drawn.step_times[0] < min(drawn.finished_at) < max(drawn.finished_at)


def test_mean_log_probabilities_are_those_of_teacher_forcing(small):
    drawn, samples = samples_of(small)
    compared = 0
    for row, sample in enumerate(samples):
        task = next(task for task in small.tasks if task.task_id == sample.task_id)
        (forced,) = rescored(small.model, small.tokenizer, small.form, task, [sample])
        prompt = small.form.prompt(task)
        ids = small.tokenizer(prompt + sample.completion).input_ids[len(small.tokenizer(prompt).input_ids) :]
        if ids == drawn.tokens[row, : sample.tokens].tolist():  # a text may have been drawn as other tokens
            assert abs(sample.mean_logp - forced.mean_logp) < 1e-4
            compared += 1
    assert compared >= len(samples) // 2


def test_samples_are_rescored_together(small):
    _, samples = samples_of(small)
    task = small.tasks[0]
    own = [sample for sample in samples if sample.task_id == task.task_id]
    together = rescored(small.model, small.tokenizer, small.form, task, own, rows=4)
    alone = [rescored(small.model, small.tokenizer, small.form, task, [sample])[0] for sample in own]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert max(abs(one.sum_logp - other.sum_logp) for one, other in zip(together, alone)) < 1e-3


def test_kept_tokens_hold_the_completion_and_no_more(small):
    drawn, samples = samples_of(small)
    for row, sample in zip(drawn.tokens.tolist(), samples):
        assert sample.completion in small.tokenizer.decode(row[: sample.tokens])
        if sample.tokens:
            assert sample.completion not in small.tokenizer.decode(row[: sample.tokens - 1])
    assert any(sample.tokens < 39 for sample in samples)


def test_finished_rows_leave_the_batch(small):
    with sharing(small.model, DRAWING):
        draw_rows(small.model, small.tokenizer, small.form, small.tasks, 8, DRAWING, seed=0)
        report = fd.explain(small.model).last_call
    assert report.path == "shared"
    assert report.compactions >= 1


def test_the_generator_is_left_as_it_was(small):
    state = torch.get_rng_state()
    samples_of(small, count=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_top_k_is_off(small):
    assert DRAWING.options()["top_k"] == 0
    assert Drawing(temperature=0).options() == {"do_sample": False}


@pytest.mark.parametrize("way", ["shared", "stock"])
def test_greedy(small, way):
    drawing = Drawing(temperature=0, max_new_tokens=12, way=way)
    first, again = (samples_of(small, drawing, count=1, seed=seed)[1] for seed in (0, 1))
    assert first == again
