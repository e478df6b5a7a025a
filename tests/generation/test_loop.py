"""The decoding loop: rows that leave, waves, and what is undone."""

import gc
import logging

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.decoding.stopping import FinishedRowPoller, HostStoppingCriteria, Stopping
from hf_fastdecode.generation.steps.modes import EagerSteps

from ..cases import exhaustive_but
from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import tokens_embedded

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 8, "max_new_tokens": 24}
ENDS = {"eos_token_id": list(range(3, 10))}


def embedded(model, run):
    """Tokens that went through the embedding while `run` ran."""
    with tokens_embedded(model) as counted:
        run()
    return sum(counted)


def test_rows_that_ended_are_not_computed(model):
    prompt = ragged_prompts(70, 60, shared=40)
    stock = seeded(lambda: model.generate(**prompt, **SAMPLING, **ENDS))
    with fd.enabled(model):
        shared = seeded(lambda: model.generate(**prompt, **SAMPLING, **ENDS))
        assert fd.explain(model).last_call.compactions >= 2
        steps = shared.shape[1] - 70 - 1
        count = embedded(model, lambda: seeded(lambda: model.generate(**prompt, **SAMPLING, **ENDS)))
    assert torch.equal(shared, stock)
    ended = torch.isin(stock[:, 70:], torch.tensor(ENDS["eos_token_id"])).int().cummax(1).values.bool()
    alive = (~ended).sum(0)[:steps].tolist()
    assert sum(alive) <= count - 90 <= sum(rows * 4 / 3 + 1 for rows in alive) < 16 * steps


class EndsAtItsOwnLength(StoppingCriteria):
    """A criterion of the user's own, row by row."""

    def __init__(self, width):
        self.width = width

    def __call__(self, input_ids, scores, **kwargs):
        drawn = input_ids.shape[1] - self.width
        return torch.arange(len(input_ids), device=input_ids.device) * 3 + 2 <= drawn


def test_rows_that_a_criterion_has_finished_are_not_computed(model):
    """In stock they are padded and computed until the last one ends."""
    prompt = ragged_prompts(70)
    arguments = SAMPLING | {"eos_token_id": 96, "stopping_criteria": [EndsAtItsOwnLength(70)]}
    stock = seeded(lambda: model.generate(**prompt, **arguments))
    with fd.enabled(model):
        with tokens_embedded(model) as counted:
            shared = seeded(lambda: model.generate(**prompt, **arguments))
        assert fd.explain(model).last_call.compactions >= 2
    assert torch.equal(shared, stock)
    assert stock.shape[1] - 70 >= 20
    assert sum(counted) - 70 < 8 * 19 * 3 / 4  # of which stock computes all


def test_a_returned_cache_keeps_all_rows(model):
    prompt = ragged_prompts(70)
    arguments = SAMPLING | ENDS | {"return_dict_in_generate": True}
    stock = seeded(lambda: model.generate(**prompt, **arguments))
    with fd.enabled(model):
        shared = seeded(lambda: model.generate(**prompt, **arguments))
        assert fd.explain(model).last_call.compactions == 0
    assert torch.equal(shared.sequences, stock.sequences)
    assert shared[CACHE].rows == 8
    assert shared[CACHE].get_seq_length() == stock[CACHE].get_seq_length()


def out_of_memory(monkeypatch, *, rows, after):
    """Let eager steps of more than `rows` rows fail once `after` steps have run."""
    feed, done = EagerSteps.feed, []

    def failing(self, ids, positions):
        if self.cache.rows > rows and len(done) >= after:
            raise torch.OutOfMemoryError("on purpose")
        done.append(1)
        return feed(self, ids, positions)

    monkeypatch.setattr(EagerSteps, "feed", failing)


@pytest.mark.parametrize("after", exhaustive_but([1], [0, 1, 20]), ids=lambda after: f"after-{after}-steps")
@pytest.mark.parametrize("ends", [{}, ENDS], ids=["to-the-end", "eos"])
@pytest.mark.parametrize("held", [False, True], ids=["", "prefilled"])
def test_smaller_waves_when_memory_runs_out(model, monkeypatch, caplog, after, ends, held):
    prompt = {key: value.repeat_interleave(5, 0) for key, value in ragged_prompts(70, 60, shared=40).items()}
    arguments = {"max_new_tokens": 30, "do_sample": False} | ends
    stock = model.generate(**prompt, **arguments)
    with fd.enabled(model), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        given = {CACHE: fd.prefill(model, ragged_prompts(70, 60, shared=40))} if held else {}
        out_of_memory(monkeypatch, rows=3, after=after)
        shared = model.generate(**prompt, **arguments, **given)
        report = fd.explain(model).last_call
    assert torch.equal(shared, stock)
    assert report.waves >= 3
    assert [record.message for record in caplog.records] == [
        "10 rows do not fit in memory at once; continuing in smaller waves"
    ]


def test_memory_that_runs_out_within_a_step_loses_no_end(model):
    """The criterion runs between the draw and its bookkeeping; what it raises must leave the step undone."""
    prompt = {key: value.repeat_interleave(4, 0) for key, value in ragged_prompts(70, 60, shared=40).items()}
    arguments = {"max_new_tokens": 30, "do_sample": False} | ENDS
    stock = model.generate(**prompt, **arguments)
    for call in (1, 2, 5):
        counted, ends = [], Stopping.rows_end

        def failing(self, *args, call=call, counted=counted, ends=ends):
            counted.append(1)
            if len(counted) == call:
                raise torch.OutOfMemoryError("on purpose")
            return ends(self, *args)

        with fd.enabled(model), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stopping, "rows_end", failing)
            assert torch.equal(model.generate(**prompt, **arguments), stock)
            assert fd.explain(model).last_call.waves == 2


class EndsAt(HostStoppingCriteria):
    def __init__(self, length):
        self.length = length

    def is_over(self, length):
        return length >= self.length


def test_criteria_that_read_no_tokens_are_asked_on_the_host(model):
    prompt = ragged_prompts(70)
    stop = EndsAt(prompt["input_ids"].shape[1] + 7)
    assert not Stopping(StoppingCriteriaList([stop]), torch.device("cpu")).custom
    stock = seeded(lambda: model.generate(**prompt, **SAMPLING, stopping_criteria=[stop]))
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**prompt, **SAMPLING, stopping_criteria=[stop])), stock)
    assert stock.shape[1] == stop.length


def test_rows_with_code_of_the_users_stay_together(model, monkeypatch):
    out_of_memory(monkeypatch, rows=3, after=2)
    stop = [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]
    with fd.enabled(model), pytest.raises(torch.OutOfMemoryError) as caught:
        model.generate(**ragged_prompts(70), **SAMPLING, stopping_criteria=stop)
    assert "use fewer samples" in caught.value.__notes__[0]


def test_what_is_returned_is_the_callers_own(model):
    """Its memory is its own and no larger; changing it does not change what a returned cache knows."""
    prompt = ragged_prompts(70)
    with fd.enabled(model):
        cut = seeded(lambda: model.generate(**prompt, **SAMPLING | {"max_new_tokens": 400} | ENDS))
        assert cut.is_contiguous()
        assert cut.untyped_storage().nbytes() == cut.numel() * 8
        out = seeded(lambda: model.generate(**prompt, **SAMPLING, return_dict_in_generate=True))
        before = out[CACHE].suffix_tokens()
        out.sequences.zero_()
        assert torch.equal(out[CACHE].suffix_tokens(), before)


def test_a_bound_that_is_never_reached_takes_no_memory(model):
    stop = [lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 75)]
    with fd.enabled(model):
        out = model.generate(**ragged_prompts(70), **SAMPLING | {"max_new_tokens": 10**9}, stopping_criteria=stop)
    assert out.shape == (8, 75)


def test_one_row_that_does_not_fit_is_an_error(model, monkeypatch):
    out_of_memory(monkeypatch, rows=0, after=0)
    with fd.enabled(model), pytest.raises(torch.OutOfMemoryError) as caught:
        model.generate(**ragged_prompts(70), num_return_sequences=2, do_sample=True, max_new_tokens=4)
    assert caught.value.__notes__ == ["1 rows at once; use shorter prompts"]


def test_no_bound_on_the_length(model):
    """A user's own criterion in the place of a length."""
    prompt = {key: value.repeat(4, 1) for key, value in ragged_prompts(70).items()}

    def generate():
        stop = [lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 85)]
        return model.generate(**prompt, stopping_criteria=stop, do_sample=True, max_length=10_000)

    stock = seeded(generate)
    with fd.enabled(model):
        assert torch.equal(seeded(generate), stock)
    assert stock.shape == (4, 85)


@pytest.mark.gpu
def test_what_was_drawn_past_the_end_is_undone():
    """On a GPU the host learns late that all rows ended; tokens, cache and random state must not show it."""
    device = torch.device("cuda")
    poller = FinishedRowPoller(device, synchronous=False, draws=True)
    states, looks = [], []
    for step in range(1, 20):
        torch.rand(3, device=device)
        states.append(torch.cuda.get_rng_state(device))
        looks.append(poller.poll(torch.tensor([step < 5], device=device), step))
    assert [step for step, look in enumerate(looks, 1) if look is not None] == [16]
    assert not torch.equal(looks[15], torch.tensor([True]))
    poller.restore_generator(5)
    assert torch.equal(torch.cuda.get_rng_state(device), states[4])

    model = tiny_model("llama-gqa").cuda()
    prompt = {key: value.cuda() for key, value in ragged_prompts(70).items()}
    arguments = SAMPLING | {"eos_token_id": list(range(3, 30)), "return_dict_in_generate": True}
    outs, after = [], []
    for enabled in (False, True):
        with fd.enabled(model) if enabled else torch.no_grad():
            outs.append(seeded(lambda: model.generate(**prompt, **arguments)))
            after.append(torch.rand(4, device=device))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[0][CACHE].get_seq_length() == outs[1][CACHE].get_seq_length()
    assert torch.equal(*after)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_gpu_that_is_too_small(mode, caplog):
    """Suffixes outgrow the memory half-way; the rows go on in waves, and none of their tokens is lost."""
    model = tiny_model("llama-gqa", hidden_size=256).bfloat16().cuda()
    prompt = {key: value.repeat(1024, 1).cuda() for key, value in ragged_prompts(300).items()}
    arguments = {"max_new_tokens": 560, "do_sample": False}
    with fd.enabled(model, mode=mode), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        whole = model.generate(**prompt, **arguments)
        assert fd.explain(model).last_call.waves == 0
        gc.collect()  # other tests' models, whose memory would else become free in the next call
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        try:
            # Reserved memory that is in pieces counts as room.
            room = max(torch.cuda.memory_reserved(), torch.cuda.memory_allocated() + 600 * 2**20)
            torch.cuda.set_per_process_memory_fraction(room / total)
            parts = model.generate(**prompt, **arguments)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert fd.explain(model).last_call.waves >= 2
    assert len([record for record in caplog.records if record.name == "hf_fastdecode"]) == 1
    assert parts.shape == whole.shape
    assert torch.equal(parts[:, :300], whole[:, :300])
    # Greedy rows of one prompt are equal, whichever wave they were in, but for rounding after very many steps.
    assert (parts[:, :364] == parts[:1, :364]).float().mean() > 0.9
    assert (parts[:, :364] == whole[:, :364]).float().mean() > 0.9
