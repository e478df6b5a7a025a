"""Samples of a call: what is kept of them, and their log-probabilities."""

from dataclasses import replace

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.evals import rescore as rescore
from hf_fastdecode.evals.generation import draw_rows, samples_of, sharing
from hf_fastdecode.evals.rescore import rescored
from hf_fastdecode.evals.run_folder import Drawing

DRAWING = Drawing(max_new_tokens=40)


def drawn_samples(small, drawing=DRAWING, count=6, seed=3):
    with sharing(small.model, drawing):
        drawn = draw_rows(small.model, small.tokenizer, small.form, small.tasks, count, drawing, seed=seed)
    return drawn, samples_of(drawn, small.model, small.tokenizer, small.form, small.tasks)


@pytest.fixture(scope="module")
def drawn_once(small):
    """What most tests look at; none changes it."""
    return drawn_samples(small)


def test_both_ways_draw_the_same_samples(small, drawn_once):
    drawn, shared = drawn_once
    _, stock = drawn_samples(small, replace(DRAWING, way="stock"))
    assert [(one.task_id, one.index, one.completion, one.tokens) for one in shared] == [
        (one.task_id, one.index, one.completion, one.tokens) for one in stock
    ]
    assert all(abs(one.sum_logp - other.sum_logp) < 1e-3 for one, other in zip(shared, stock))
    assert len({one.completion for one in shared}) > len(small.tasks)
    assert drawn.call.started < drawn.call.step_times[0] < min(drawn.finished_at) < max(drawn.finished_at)


def test_mean_log_probabilities_are_those_of_teacher_forcing(small, drawn_once):
    drawn, samples = drawn_once
    compared = 0
    for row, sample in enumerate(samples):
        task = next(task for task in small.tasks if task.task_id == sample.task_id)
        (forced,) = rescored(small.model, small.tokenizer, small.form, task, [sample])
        prompt = small.form.prompt(task)
        ids = small.tokenizer(prompt + sample.completion).input_ids[len(small.tokenizer(prompt).input_ids) :]
        if ids == drawn.call.tokens[row, : sample.tokens].tolist():  # a text may have been drawn as other tokens
            assert abs(sample.mean_logp - forced.mean_logp) < 1e-4
            compared += 1
    assert compared >= len(samples) // 2


def test_samples_are_rescored_together(small, drawn_once):
    _, samples = drawn_once
    task = small.tasks[0]
    own = [sample for sample in samples if sample.task_id == task.task_id]
    together = rescored(small.model, small.tokenizer, small.form, task, own, rows=4)
    alone = [rescored(small.model, small.tokenizer, small.form, task, [sample])[0] for sample in own]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert max(abs(one.sum_logp - other.sum_logp) for one, other in zip(together, alone)) < 1e-3


def test_rescoring_goes_on_after_an_interruption(small, drawn_once, tmp_path, monkeypatch):
    _, samples = drawn_once
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    arguments = (small.model, small.tokenizer, small.form, small.tasks, samples)
    rescore.rescore_samples(*arguments, whole)
    calls, once = [], rescore.rescored

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return once(*args, **kwargs)

    monkeypatch.setattr(rescore, "rescored", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rescore.rescore_samples(*arguments, broken)
    assert not broken.exists()
    rescore.rescore_samples(*arguments, broken)
    assert len(calls) == 1 + len(small.tasks)  # the first task is not computed again
    assert broken.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "whole.jsonl"]


def test_kept_tokens_hold_the_completion_and_no_more(small, drawn_once):
    drawn, samples = drawn_once
    for row, sample in zip(drawn.call.tokens.tolist(), samples):
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
    drawn_samples(small, count=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_top_k_is_off(small):
    assert DRAWING.options()["top_k"] == 0
    assert Drawing(temperature=0).options() == {"do_sample": False}


@pytest.mark.parametrize("way", ["shared", "stock"])
def test_greedy(small, way):
    drawing = Drawing(temperature=0, max_new_tokens=12, way=way)
    first, again = (drawn_samples(small, drawing, count=1, seed=seed)[1] for seed in (0, 1))
    assert first == again


def test_processed_log_probabilities_are_those_of_the_drawing(small):
    """After temperature 0.5 and a nucleus of 0.8, by one pass over prompt and tokens."""
    drawing = Drawing(temperature=0.5, top_p=0.8, max_new_tokens=12, processed=True)
    drawn, samples = drawn_samples(small, drawing, count=4)
    prompts, tokens = drawn.call.prompts, drawn.call.tokens
    mask = torch.cat([prompts != small.tokenizer.pad_token_id, torch.ones_like(tokens).bool()], dim=1).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = small.model(torch.cat([prompts, tokens], dim=1), attention_mask=mask, position_ids=positions).logits
    probabilities = (logits[:, prompts.shape[1] - 1 : -1] / 0.5).softmax(-1)
    ordered, order = probabilities.sort(-1, descending=True)
    kept = torch.where(ordered.cumsum(-1) - ordered < 0.8, ordered, 0.0)
    nucleus = torch.zeros_like(probabilities).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
    expected = nucleus.gather(2, tokens[..., None])[..., 0].log()
    for row, sample in enumerate(samples):
        assert sample.sum_processed_logp == pytest.approx(expected[row, : sample.tokens].sum().item(), abs=1e-3)


def test_processed_greedy_tokens_are_certain(small):
    drawing = Drawing(temperature=0, max_new_tokens=8, processed=True)
    assert all(sample.sum_processed_logp == 0 for sample in drawn_samples(small, drawing, count=1)[1])
