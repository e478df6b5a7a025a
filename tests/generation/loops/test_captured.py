"""Captured passes of other decoding loops: on a GPU in graphs; here the same passes, uncaptured and interpreted."""

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ...tiny_models import tiny_model
from ..calls import PROMPT
from .passes import DICT, PROMPTS, WINDOWED, both, check, enabled, logits_of, reorder, require_captured, small

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU"),
    pytest.mark.usefixtures("uncaptured"),
]

CALLS = {
    "beams": {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 5} | DICT | {"output_scores": True},
    "beam-sample": {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4, "do_sample": True, "top_k": 0},
    "finished-beams": {"num_beams": 3, "max_new_tokens": 8, "eos_token_id": list(range(3, 40))},
    "hidden-states": {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 4}
    | DICT
    | {"output_hidden_states": True, "output_logits": True},
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *((name, call) for name in ("llama-gqa", "gemma3_text") for call in CALLS),
        *((name, "beams") for name in ("llama-mha", "gpt2", "mistral-window")),
    ],
)
def test_tokens_are_those_of_stock(name, call):
    stock, captured, report = both(small(name), PROMPTS, CALLS[call])
    require_captured(report, 1)
    assert (report.path, "captured" in report.layers[0]) == ("shared", True)
    if call == "beams":
        torch.testing.assert_close(captured.sequences_scores, stock.sequences_scores)
        assert torch.equal(captured.beam_indices, stock.beam_indices)
    if call == "hidden-states":
        for own, theirs in zip(captured.hidden_states[1:], stock.hidden_states[1:], strict=True):
            torch.testing.assert_close(own, theirs, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(captured.logits, stock.logits, atol=2e-4, rtol=2e-4)


def test_a_loop_under_autocast():
    """Of fp16, as interpreted kernels round bf16 otherwise."""
    model, actions = small(), [1, 3, 1]
    exact, _ = logits_of(model, actions, mode="eager")
    with torch.autocast("cpu", torch.float16):
        eager, _ = logits_of(model, actions, mode="eager")
        captured, report = logits_of(model, actions)
    require_captured(report, 2)
    ours, theirs = (
        max(float((one - other).abs().max()) for one, other in zip(found, exact, strict=True))
        for found in (captured, eager)
    )
    assert 0 < ours <= 2 * theirs


@pytest.mark.parametrize(
    ("name", "draft"), [("llama-gqa", "model"), ("llama-gqa", "lookup"), ("llama-mha", "lookup"), ("gpt2", "model")]
)
def test_drafts(name, draft):
    """Tokens that are not accepted are cropped, at first from the prompt, then from the suffix."""
    model, arguments = small(name), {"max_new_tokens": 8}
    arguments |= {"assistant_model": tiny_model(name, seed=3)} if draft == "model" else {"prompt_lookup_num_tokens": 3}
    repeating = {key: part[:, :30].repeat(1, 2) for key, part in PROMPT.items()}
    stock = model.generate(**repeating, **arguments)
    with enabled(model):
        cache = fd.prefill(model, repeating["input_ids"][:, :-1])
        assert torch.equal(model.generate(**repeating, **arguments, **{CACHE: cache}), stock)
        report = fd.explain(model).last_call
    require_captured(report)
    assert report.captures in (1, 2)  # of one token, and of up to four
    assert cache.later_passes is None


def test_drafts_of_a_lone_prompt():
    """It shares with no other row, but captured passes are faster than stock's all the same."""
    repeating = {key: part[:1, :30].repeat(1, 2) for key, part in PROMPTS.items()}
    *_, report = both(small(), repeating, {"max_new_tokens": 6, "prompt_lookup_num_tokens": 3})
    assert (report.path, report.mode) == ("shared", "graph")


def test_a_users_loop_over_a_lone_prompt_keeps_its_keys():
    def reads(model, input_ids, **arguments):
        model(input_ids, **{CACHE: arguments[CACHE]})
        return arguments[CACHE].layers[0].keys

    model = small()
    with enabled(model):
        assert model.generate(**PROMPT, custom_generate=reads, max_new_tokens=4).shape[2] == 80


LOOPS = {
    "several tokens": [1, 3, 4, 1],
    "a divided pass": [20, 1],
    "cropped": [4, lambda model, cache: cache.crop(-3), 2, lambda model, cache: cache.crop(-6), 1],
    "reordered": [2, reorder(1, 0), 1, reorder(1, 1), 3, reorder(0, 1), 1],
    "reordered and cropped": [2, reorder(1, 1), 3, lambda model, cache: cache.crop(-2), reorder(1, 0), 2],
    "rows of other lengths": [3, lambda model, cache: cache.drop_last([2, 0]), 2, reorder(1, 0), 1],
    "fewer rows": [2, lambda model, cache: cache.select_rows([1]), 1],
    "kept logits": [{"logits_to_keep": 1}, 3],
    "longer than an own node": [64, 63, 2, 3, lambda model, cache: cache.crop(-6), 16, 1],
}


@pytest.mark.parametrize("actions", LOOPS.values(), ids=LOOPS)
def test_loops_of_the_users(actions):
    """All outputs are compared at the end: no later pass overwrites them."""
    require_captured(check(small(), actions))


@pytest.mark.parametrize("name", WINDOWED)
def test_passes_that_outgrow_a_window(name):
    model = tiny_model(name, **WINDOWED[name] | {"sliding_window": 84})
    assert check(model, [1, 3, reorder(1, 0), 4, 1]).mode == "graph"


def test_a_suffix_that_moves(monkeypatch):
    monkeypatch.setattr("hf_fastdecode.cache.storage._FIRST_CAPACITY", 2)
    report = check(small(), [1, 1, 3, reorder(1, 0), 1, 1])
    assert report.captures == 3  # of one and of several tokens in order, and of one reordered
