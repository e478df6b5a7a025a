"""Draws and log-probabilities of samples, the end of each row, and latencies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import hf_fastdecode as fd
from hf_fastdecode.assets import load_embedded
from hf_fastdecode.evals import generation
from hf_fastdecode.evals.generation import (
    RowStopping,
    draw_rows,
    measure_latency,
    model_digest,
    rescored,
    samples_of,
    sharing,
)
from hf_fastdecode.evals.run_folder import Drawing
from hf_fastdecode.evals.stop_rules import StopWords

DRAWING = Drawing(max_new_tokens=40)


def drawn_samples(small, drawing=DRAWING, count=6, seed=3):
    with sharing(small.model, drawing):
        drawn = draw_rows(small.model, small.tokenizer, small.form, small.tasks, count, drawing, seed=seed)
    return drawn, samples_of(drawn, small.model, small.tokenizer, small.form, small.tasks)


@pytest.fixture(scope="module")
def drawn_once(small):
    """Samples that most tests look at; none changes them."""
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
    generation.rescore_samples(*arguments, whole)
    calls, once = [], generation.rescored

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return once(*args, **kwargs)

    monkeypatch.setattr(generation, "rescored", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generation.rescore_samples(*arguments, broken)
    assert not broken.exists()
    generation.rescore_samples(*arguments, broken)
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


def test_rows_end_by_their_rules() -> None:
    tokenizer = ByT5Tokenizer()
    text = "\u00e9a[DONE]b"
    ids = torch.tensor([tokenizer("x" + text, add_special_tokens=False).input_ids])
    stopping = RowStopping(tokenizer, [StopWords(["[DONE]"])], ids[:, :1], [1])
    ended = [bool(stopping(ids[:, : 1 + length], None)[0]) for length in range(1, ids.shape[1])]
    assert ended.index(True) + 1 == len("\u00e9a[DONE]".encode())


def test_samples_are_drawn_both_ways(small) -> None:
    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, pad_token_id=0, eos_token_id=1)
    model = LlamaForCausalLM(config).eval()
    tokenizer.padding_side = "left"
    found = []
    for way in ("shared", "stock"):
        drawing = Drawing(max_new_tokens=6, way=way)
        with sharing(model, drawing):
            drawn = draw_rows(model, tokenizer, small.form, small.tasks[:2], 2, drawing, seed=0)
        found.append([one.completion for one in samples_of(drawn, model, tokenizer, small.form, small.tasks[:2])])
    assert found[0] == found[1]
    assert len(found[0]) == 4
    other = ByT5Tokenizer(extra_ids=100)
    assert model_digest(model, tokenizer) == model_digest(model, ByT5Tokenizer()) != model_digest(model, other)


def stopped_after(texts, words, end_tokens=()):
    """Count the tokens of each text when its row is stopped; None for rows that are not."""
    _, tokenizer = load_embedded()
    prompt = torch.tensor([tokenizer("say:").input_ids] * len(texts))
    rows = [tokenizer(text).input_ids for text in texts]
    steps = max(map(len, rows))
    rows = [[*row, *[tokenizer.pad_token_id] * (steps - len(row))] for row in rows]
    stopping = RowStopping(tokenizer, [StopWords(own) for own in words], prompt, end_tokens)
    found: list[int | None] = [None] * len(texts)
    for step in range(1, steps + 1):
        ended = stopping(torch.cat([prompt, torch.tensor(rows)[:, :step]], dim=1), None)
        found = [step if is_ended and at is None else at for at, is_ended in zip(found, ended.tolist())]
    assert [at is not None for at in stopping.finished_at] == [at is not None for at in found]
    return found, tokenizer


def test_each_row_ends_at_its_own_word():
    texts = ["one two stop three", "one two stop three", "stop", "nothing"]
    found, tokenizer = stopped_after(texts, [["stop"], ["three"], ["stop"], ["stop"]])
    for text, at, word in zip(texts[:3], found, ("stop", "three", "stop")):
        assert word in tokenizer.decode(tokenizer(text).input_ids[:at])
        assert word not in tokenizer.decode(tokenizer(text).input_ids[: at - 1])
    assert found[3] is None


def test_a_word_across_tokens_and_letters_of_several_bytes():
    found, tokenizer = stopped_after(["naïve \n\nEND of it"], [["\n\nEND"]])
    assert tokenizer.decode(tokenizer("naïve \n\nEND of it").input_ids[: found[0]]).endswith("END")


def test_many_rows_are_looked_at_more_seldom():
    _, tokenizer = load_embedded()
    ids = tokenizer("stop, and so on and on and on").input_ids
    first = next(count for count in range(1, 10) if "stop" in tokenizer.decode(ids[:count]))
    for rows, interval in ((255, 1), (256, 2), (1024, 8)):
        prompt = torch.tensor([tokenizer("say:").input_ids] * rows)
        stopping = RowStopping(tokenizer, [StopWords(["stop"]) for _ in range(rows)], prompt, ())
        text = torch.tensor([ids] * rows)
        ended = [stopping(torch.cat([prompt, text[:, :step]], dim=1), None).all().item() for step in range(1, 10)]
        assert ended.index(True) + 1 == -(-first // interval) * interval


def test_end_tokens_are_noted():
    found, _ = stopped_after(["one two"], [["zzz"]], end_tokens=[load_embedded()[1]("one two").input_ids[1]])
    assert found == [2]


def test_texts_that_do_not_grow_are_decoded_whole(monkeypatch):
    """Some tokenizers' text of more tokens does not begin with that of fewer, which their stream refuses."""

    class Refusing:
        def __init__(self, **arguments):
            self.steps = 0

        def step(self, tokenizer, tokens):
            self.steps += 1
            if self.steps > 2:
                raise Exception("Invalid prefix encountered while decoding stream")
            return tokenizer.decode(tokens)

    text = "one two naïve stop three"
    found, _ = stopped_after([text], [["stop"]])
    monkeypatch.setattr(generation, "DecodeStream", Refusing)
    assert stopped_after([text], [["stop"]])[0] == found


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

    monkeypatch.setattr(generation, "draw_rows", exhausted)
    for mode, named in (("auto", "eager"), ("graph", "graph")):
        assert measured(small, 4, mode=mode).mode == named
    row = measured(small, 4)
    assert row.status == "out of memory"
    assert row.last_sample_s != row.last_sample_s  # NaN


def test_other_errors_are_raised(small, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("something else")

    monkeypatch.setattr(generation, "draw_rows", broken)
    with pytest.raises(RuntimeError, match="something else"):
        measured(small, 4)
