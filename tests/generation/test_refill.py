"""Waiting rows take the places of finished ones, with the tokens of a call in which all rows decode at once."""

import copy
from weakref import WeakSet

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.cache import storage
from hf_fastdecode.generation.decoding import refill, waves
from hf_fastdecode.generation.decoding.stopping import RowLengthCriteria
from hf_fastdecode.generation.steps.modes import EagerSteps

from ..architectures.classes import tiny_model_of
from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import as_in_stock, tokens_embedded
from .uncaptured import SMALL, on_the_cpu

PROMPTS = ragged_prompts(70, 60, 66, 50, shared=40)
ENDS = {"eos_token_id": list(range(3, 12)), "max_new_tokens": 20}
GREEDY = {"do_sample": False, **ENDS}


def copies(prompts, count):
    return {key: value.repeat_interleave(count, 0) for key, value in prompts.items()}


def distinct(count, shared=40):
    """As many prompts that differ behind what all share, so that greedy rows end at steps of their own."""
    return ragged_prompts(*(44 + index % 5 for index in range(count)), shared=shared)


def check(model, prompts, arguments, *, at_once, **options):
    stock = seeded(lambda: model.generate(**prompts, **arguments))
    with fd.enabled(model, max_rows=at_once, **options), tokens_embedded(model) as counted:
        found = seeded(lambda: model.generate(**prompts, **arguments))
        report = fd.explain(model).last_call
    assert torch.equal(found, stock)
    assert (report.path, report.rows_at_once, report.waves) == ("shared", at_once, 0)
    assert report.refilled == len(stock) - at_once
    return stock, counted, report


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch):
    """Tables of tokens grow within a call."""
    for file in (refill, waves):
        monkeypatch.setattr(file, "FIRST_ROOM", 4)


def test_greedy_rows_of_many_prompts(model):
    stock, counted, _ = check(model, distinct(14), GREEDY, at_once=4)
    drawn = (~torch.isin(stock[:, 48:], torch.tensor(ENDS["eos_token_id"]))).int().cumprod(1).sum(1)
    assert drawn.min() < 4 < 14 < drawn.max()
    assert sum(counted[1:]) < 4 * drawn.sum()  # in waves of four, and in one batch, it would be more


def test_several_samples_of_several_prompts(model):
    """Greedy rows of one prompt end together, and the next prompt's take their places."""
    check(model, copies(PROMPTS, 3), GREEDY, at_once=5)


def test_rows_that_run_to_the_end(model):
    """They end by their length, which the host knows, at once in their own suffixes."""
    check(model, distinct(7), GREEDY | {"eos_token_id": 96, "max_new_tokens": 9}, at_once=3)


def test_rows_that_end_at_lengths_of_their_own(model):
    """The host reads no tokens for it; without an end token among those drawn, all tokens count."""
    lengths = torch.tensor([9, 1, 4, 2, 12, 3, 1, 6])
    arguments = {"do_sample": False, "max_new_tokens": 12, "stopping_criteria": [RowLengthCriteria(48, lengths)]}
    stock, _, _ = check(model, distinct(8), arguments, at_once=3)
    assert ((stock[:, 48:] != 0).sum(1) >= lengths - 1).all()


def test_processors_see_rows_of_one_length(model):
    arguments = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4}
    check(model, distinct(10), GREEDY | arguments, at_once=4)


def test_log_probs_of_refilled_rows(model):
    prompts, found = distinct(9), []
    for options in ({}, {"max_rows": 4}):
        log_probs = fd.TokenLogProbs()
        with fd.enabled(model, **options):
            tokens = model.generate(**prompts, **GREEDY, logits_processor=[log_probs])[:, 48:]
        kept = (~torch.isin(tokens, torch.tensor(ENDS["eos_token_id"]))).int().cumprod(1).bool()
        found.append(log_probs.of(tokens)[kept])
    assert (found[0] - found[1]).abs().max() < 1e-4


def test_rows_that_outgrow_memory_wait_and_begin_anew(model, monkeypatch):
    monkeypatch.setattr(storage, "_FIRST_CAPACITY", 6)
    asked = []

    def may_grow(cache, tokens):
        asked.append(cache.rows)
        return tokens < 7 or cache.rows < 4

    monkeypatch.setattr(refill, "suffixes_may_grow", may_grow)
    as_in_stock(model, lambda: model.generate(**distinct(8), **GREEDY), max_rows=5)
    assert max(asked) == 5 > min(asked)


def test_memory_that_runs_out_all_the_same(model, monkeypatch):
    """The rows that begin anew find what the first ones took free."""
    feed, caches = EagerSteps.feed, WeakSet()

    def failing(self, ids, positions):
        caches.add(self.cache)
        assert len(caches) == 1
        if self.cache.rows > 3 and self.cache.suffix_length > 2:
            raise torch.OutOfMemoryError("on purpose")
        return feed(self, ids, positions)

    monkeypatch.setattr(EagerSteps, "feed", failing)
    assert as_in_stock(model, lambda: model.generate(**distinct(8), **GREEDY), max_rows=5).rows_at_once == 3


def test_the_sampling_kernel_draws_as_for_all_rows_at_once(model):
    """A row's random numbers are of its own number and step; the penalty is of its own tokens."""
    pytest.importorskip("triton")
    prompts = copies(ragged_prompts(40, 40, shared=33), 3)
    arguments = {"do_sample": True, "repetition_penalty": 1.2, "min_new_tokens": 2, "top_k": 0} | ENDS
    arguments |= {"eos_token_id": list(range(3, 40)), "max_new_tokens": 8}
    found = []
    for options in ({}, {"max_rows": 4}):
        with fd.enabled(model, sampler="fast", **options):
            found.append(seeded(lambda: model.generate(**prompts, **arguments)))
            report = fd.explain(model).last_call
    assert report.refilled == 2
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"do_sample": True}, "the sampler of transformers draws for all rows at once"),
        ({"eos_token_id": None}, "without end tokens all rows end at one length"),
        ({"max_time": 1000.0}, "a time limit counts for all rows"),
    ],
)
def test_why_waiting_rows_run_in_waves(model, extra, reason):
    arguments = GREEDY | {"max_new_tokens": 4} | extra
    report = as_in_stock(model, lambda: model.generate(**PROMPTS, **arguments), max_rows=3)
    assert (report.waves, report.waves_reason) == (2, reason)
    assert f"rows at once: 3 of 4, in waves: {reason}" in str(report.lines())


@on_the_cpu
def test_captured_steps_go_on_with_other_rows(uncaptured, monkeypatch):
    """Their tables follow the places; nothing is captured again, but for the batch that is left at the end."""
    pytest.importorskip("triton")
    model, prompts = tiny_model("llama-gqa", **SMALL), distinct(7)
    arguments = GREEDY | {"max_new_tokens": 7, "eos_token_id": list(range(3, 30))}
    report = as_in_stock(
        model, lambda: model.generate(**prompts, **arguments), mode="graph", backend="triton", max_rows=4
    )
    assert (report.mode, report.refilled) == ("graph", 3)
    assert report.captures <= 2


@pytest.mark.parametrize("name", ["FalconH1ForCausalLM", "Lfm2MoeForCausalLM"])
def test_states_are_forked_to_refilled_rows(name):
    model, prompts = tiny_model_of(name), copies(PROMPTS, 2)
    drawn = model.generate(**prompts, **GREEDY | {"eos_token_id": None, "max_new_tokens": 6})[:, 70:]
    ends = [*drawn[:4, 1].tolist(), int(drawn[5, 3])]  # by which prompts end after different numbers of steps
    check(model, prompts, GREEDY | {"eos_token_id": ends, "max_new_tokens": 6}, at_once=3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_refilled_rows_on_a_gpu(mode):
    """Their tokens' log-probabilities are the model's own, as precise as stock's in one pass over the same tokens."""
    model = tiny_model("llama-gqa", hidden_size=256).bfloat16().cuda()
    whole = copy.deepcopy(model).float()
    prompts = {key: value.cuda() for key, value in copies(ragged_prompts(90, 90, shared=60), 40).items()}
    ends = torch.arange(3, 8, device="cuda")
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 200, "eos_token_id": ends.tolist()}
    log_probs = fd.TokenLogProbs()
    with fd.enabled(model, mode=mode, sampler="fast", max_rows=24):
        torch.manual_seed(0)
        found = model.generate(**prompts, **arguments, logits_processor=[log_probs])
        report = fd.explain(model).last_call
    tokens = found[:, 90:]
    ended = torch.isin(tokens, ends).int().cumsum(1).roll(1, 1)
    ended[:, 0] = 0

    def errors(given):
        return (given - expected)[ended == 0].abs()

    def one_pass(of):
        logits = torch.cat([of(rows[:, :-1]).logits[:, 89:].float() for rows in found.split(20)])
        return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]

    with torch.no_grad():
        expected = one_pass(whole)
        ours, stock = errors(log_probs.of(tokens)), errors(one_pass(model))
    assert report.refilled == 56
    assert report.captures <= 4
    assert ours.quantile(0.99) <= 1.3 * stock.quantile(0.99)
    assert ours.max() <= 2 * stock.max()


@on_the_cpu
def test_waiting_rows_that_outgrow_a_window(uncaptured):
    """Steps are captured for the longest row of the call, which may wait at first: replays look at no window."""
    pytest.importorskip("triton")
    model, prompts = (
        tiny_model("mistral-window", **SMALL, sliding_window=56),
        ragged_prompts(44, 45, 60, 61, shared=40),
    )
    arguments = GREEDY | {"max_new_tokens": 7, "eos_token_id": list(range(3, 30))}
    report = as_in_stock(
        model, lambda: model.generate(**prompts, **arguments), mode="graph", backend="triton", max_rows=2
    )
    assert (report.mode, report.refilled) == ("graph", 2)
