"""Rows that cannot all decode at once: `max_rows`, and waves planned from free memory."""

import logging
from weakref import ref

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache import storage
from hf_fastdecode.generation.decoding import stopping, waves
from hf_fastdecode.generation.decoding.loop import Loop
from hf_fastdecode.generation.steps.modes import EagerSteps

from ..tiny_models import ragged_prompts, seeded
from .calls import as_in_stock, tokens_embedded

ENDS = {"eos_token_id": list(range(3, 16))}
GREEDY = {"do_sample": False, "max_new_tokens": 14}
SAMPLED = {"do_sample": True, "top_k": 0, "num_return_sequences": 5, "max_new_tokens": 14}


def many(*, shared=40, copies=5):
    """Ragged prompts, each several times in a row."""
    prompts = ragged_prompts(70, 60, 66, shared=shared)
    return {key: value.repeat_interleave(copies, 0) for key, value in prompts.items()}


@pytest.fixture
def widths(monkeypatch):
    """Rows of each step that runs."""
    found, feed = [], EagerSteps.feed

    def watched(self, ids, positions):
        found.append(len(ids))
        return feed(self, ids, positions)

    monkeypatch.setattr(EagerSteps, "feed", watched)
    return found


@pytest.mark.parametrize(("held", "ends"), [(False, ENDS), (True, {})], ids=["eos", "prefilled"])
def test_no_more_rows_decode_at_once_than_max_rows(model, widths, held, ends):
    stock = model.generate(**many(), **GREEDY, **ends)
    with fd.enabled(model, max_rows=4):
        given = {CACHE: fd.prefill(model, ragged_prompts(70, 60, 66, shared=40))} if held else {}
        assert torch.equal(model.generate(**many(), **GREEDY, **ends, **given), stock)
        assert fd.explain(model).last_call.path == "shared"
    assert max(widths) == 4


@pytest.mark.parametrize(
    ("prompts", "ends"), [(ragged_prompts(70), {}), (ragged_prompts(70, 60, shared=40), ENDS)], ids=["one", "two-eos"]
)
def test_the_sampler_of_transformers_draws_as_for_all_rows(model, widths, prompts, ends):
    """Also what is drawn after the call is the same."""

    def drawn():
        return model.generate(**prompts, **SAMPLED, **ends), torch.rand(1)

    stock = seeded(drawn)
    with fd.enabled(model, max_rows=3, sampler="hf"):
        assert all(map(torch.equal, seeded(drawn), stock))
        assert fd.explain(model).last_call.waves == -(-len(stock[0]) // 3)
    assert max(widths) == 3


def test_waves_free_their_suffixes(model, monkeypatch):
    """Before the next wave begins."""
    caches, resume = [], Loop._resume

    def resumed(loop, *given):
        assert all(known() is None for known in caches)
        cache = resume(loop, *given)
        caches.append(ref(cache))
        return cache

    monkeypatch.setattr(Loop, "_resume", resumed)
    with fd.enabled(model, max_rows=2):
        model.generate(**ragged_prompts(70), **SAMPLED)
    assert len(caches) == 3


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "extra", [{"return_dict_in_generate": True}, {"stopping_criteria": [Never()]}], ids=["cache", "criterion"]
)
def test_rows_that_must_stay_together_are_an_error(model, extra):
    call = SAMPLED | extra
    with fd.enabled(model, max_rows=4):
        with pytest.raises(
            ValueError, match=r"max_rows=4 cannot hold for the 5 rows of this call: .*, or max_rows=None"
        ):
            model.generate(**ragged_prompts(70), **call)
        model.generate(**ragged_prompts(70), **call | {"num_return_sequences": 4})


def test_other_loops_say_that_they_decode_all_rows(model, caplog):
    call = {"num_beams": 3, "max_new_tokens": 2}
    with fd.enabled(model, max_rows=3), caplog.at_level(logging.INFO, logger="hf_fastdecode"):
        model.generate(**ragged_prompts(70), **call)
        assert "max_rows" not in caplog.text
        model.generate(**ragged_prompts(70, 70, shared=60), **call)
    assert "max_rows=3 not used: generation mode 'beam_search' uses another decoding loop" in caplog.text


def test_stop_strings_are_for_each_row():
    """They are criteria of transformers that read each row's own tokens."""
    model, tokenizer = fd.load_embedded()
    prompt = tokenizer("def add(a, b):\n    return a + b\n\n\n" * 8, return_tensors="pt")
    call = SAMPLED | {"stop_strings": ["("], "tokenizer": tokenizer, "max_new_tokens": 12}
    assert as_in_stock(model, lambda: model.generate(**prompt, **call), max_rows=2).waves == 3


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "log-probs"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "samples"])
def test_rows_that_stop_strings_end_draw_on_without_an_end_token(model, sampled, recorded):
    """Until the last row of the call ends, also those of waves that end before; and so does the generator."""
    prompts = ragged_prompts(70) if sampled else many(copies=2)
    call = SAMPLED if sampled else GREEDY
    arguments = {"stop_strings": [chr(97 + number) for number in range(0, 97, 4)], "tokenizer": letters(), **call}
    logs = [fd.TokenLogProbs() for _ in range(2)]

    def drawn(log):
        given = {"logits_processor": [log]} if recorded else {}
        return model.generate(**prompts, **arguments, **given), torch.rand(1)

    with fd.enabled(model, sampler="hf"):
        together = seeded(lambda: drawn(logs[0]))
    stock = seeded(lambda: model.generate(**prompts, **arguments))
    width = prompts["input_ids"].shape[1]
    assert torch.equal(together[0], stock)
    assert width + 1 < stock.shape[1] < width + 14
    for most in (1, 2):
        with fd.enabled(model, max_rows=most, sampler="hf"):
            assert all(map(torch.equal, seeded(lambda: drawn(logs[1])), together))
            assert fd.explain(model).last_call.waves == -(-len(stock) // most)
        if recorded:
            new = stock[:, width:]
            torch.testing.assert_close(logs[1].of(new), logs[0].of(new))


def letters():
    """A tokenizer of single letters, for the tiny models' vocabulary."""
    plain = Tokenizer(models.WordLevel({chr(97 + number): number for number in range(97)}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")

    class Letters(PreTrainedTokenizerFast):
        def convert_tokens_to_string(self, tokens):
            return "".join(tokens)

    return Letters(tokenizer_object=plain, pad_token="a")


def test_waves_are_planned_from_free_memory(model, widths, monkeypatch, caplog):
    """No step fails for lack of memory: what rows may need is counted before."""
    prompts, call = ragged_prompts(70), SAMPLED | {"num_return_sequences": 8}
    stock = seeded(lambda: model.generate(**prompts, **call))
    of_row = 14 * 2 * 2 * 2 * 16 * 4 + 97 * 16  # tokens, layers, keys and values, heads, numbers, bytes; logits
    monkeypatch.setattr(waves, "usable_memory", lambda device: 8 * 97 * 8 + 3 * of_row)
    with fd.enabled(model), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        assert torch.equal(seeded(lambda: model.generate(**prompts, **call)), stock)
        assert fd.explain(model).last_call.waves == 3
    assert max(widths) == 3
    assert caplog.messages == ["8 rows do not fit in memory at once; 3 decode at a time"]


def test_rows_that_outgrow_memory_go_on_in_waves(model, monkeypatch):
    """They are counted again before suffixes grow, and none of their tokens is lost."""
    prompts, call = ragged_prompts(70), SAMPLED | {"num_return_sequences": 4, "max_new_tokens": 24}
    stock = seeded(lambda: model.generate(**prompts, **call))
    monkeypatch.setattr(storage, "_FIRST_CAPACITY", 8)
    asked = []

    def may_grow(cache, tokens):
        asked.append((cache.rows, tokens))
        return cache.rows < 4 or tokens <= 8

    monkeypatch.setattr(stopping, "suffixes_may_grow", may_grow)
    with fd.enabled(model), tokens_embedded(model) as counted:
        assert torch.equal(seeded(lambda: model.generate(**prompts, **call)), stock)
        assert fd.explain(model).last_call.waves == 2
    assert asked[:2] == [(4, 1), (4, 9)]
    assert sum(counted) == 70 + 4 * 8 + 4 * 23
