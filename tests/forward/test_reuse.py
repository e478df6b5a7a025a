"""Prefixes that passes without gradients keep for later passes, with `reuse_prefix`."""

from __future__ import annotations

import copy
import gc
from weakref import ref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_fastdecode as fd

SHOTS, QUESTION = 120, 40


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model():
    return fd.enable(tiny(), reuse_prefix=True)


def drawn(count: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 100, (count,), generator=torch.Generator().manual_seed(seed))


def questions(*seeds: int, answers: int = 4) -> torch.Tensor:
    """Answers to questions after the same examples, padded at the right with a token."""
    rows = [
        torch.cat([drawn(SHOTS, 0), drawn(QUESTION, seed), drawn(3 + answer, 100 * seed + answer)])
        for seed in seeds
        for answer in range(answers)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def check(model: LlamaForCausalLM, ids: torch.Tensor, *, computed: int, kept: int, **arguments: object) -> None:
    stock = copy.deepcopy(model)
    fd.disable(stock)
    with torch.no_grad():
        ours, theirs = model(ids, **arguments).logits, stock(ids, **arguments).logits
    report = fd.explain(model).last_forward
    assert (report.path, report.computed, report.kept) == ("shared", computed, kept)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_examples_are_computed_once(model):
    check(model, questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    check(model, questions(2, 3), computed=2 * (QUESTION + 4 * 6), kept=SHOTS)
    check(model, questions(4), computed=QUESTION + 4 * 6, kept=SHOTS)
    check(model, questions(4), computed=4 * 6, kept=SHOTS + QUESTION)


def check_stock(model: LlamaForCausalLM, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids)
    assert fd.explain(model).last_forward.path == "stock"


def test_one_row_at_a_time(model):
    """The first pass has nothing to share, and is remembered; the second computes what the third then finds."""
    rows = questions(1)
    check_stock(model, rows[:1])
    check(model, rows[1:2], computed=166, kept=0)
    check(model, rows[2:3], computed=6, kept=SHOTS + QUESTION)
    check(model, questions(2)[:1], computed=QUESTION + 6, kept=SHOTS)
    check(model, questions(2)[1:2], computed=QUESTION + 6, kept=SHOTS)
    check(model, questions(2)[2:3], computed=QUESTION + 6, kept=SHOTS)


def test_passes_that_share_nothing_run_stock(model):
    for seed in range(3):
        check_stock(model, drawn(2 * 90, seed).view(2, 90))


def test_rows_of_which_all_tokens_are_kept_run_stock(model):
    row = questions(1)[:1]
    check_stock(model, row)
    check(model, row, computed=166, kept=0)
    check_stock(model, row)
    check(model, questions(1)[1:2], computed=6, kept=SHOTS + QUESTION)


def test_a_cache_of_a_pass_with_kept_tokens(model):
    check(model, questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    stock = copy.deepcopy(model)
    fd.disable(stock)
    caches = []
    for one in (model, stock):
        with torch.no_grad():
            output = one(questions(2), use_cache=True)
        caches.append(next(output[name] for name in ("cache", "past_key_values") if name in output))
    assert fd.explain(model).last_forward.kept == SHOTS
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


def change_weights(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def write_data(model):
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)


def change_config(model):
    model.config.rms_norm_eps = 0.1
    model.model.norm.variance_epsilon = 0.1


@pytest.mark.parametrize("change", [change_weights, write_data, change_config])
def test_what_another_model_computed_is_dropped(model, change):
    check(model, questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    change(model)
    check(model, questions(2), computed=SHOTS + QUESTION + 4 * 6, kept=0)


def test_passes_with_gradients_keep_and_use_nothing(model):
    check(model, questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    model(questions(2), labels=questions(2)).loss.backward()
    assert fd.explain(model).last_forward.kept == 0
    assert all(weight.grad is not None for weight in model.parameters())


def test_hidden_states_of_all_layers_are_not_kept(model):
    check(model, questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    with torch.no_grad():
        output = model(questions(2), output_hidden_states=True)
    assert fd.explain(model).last_forward.kept == 0
    assert all(states.shape[:2] == questions(2).shape for states in output.hidden_states)


def test_a_bound_in_bytes():
    token = 2 * 2 * 2 * 8 * 4 + 32 * 4  # keys and values of both layers, and the hidden state, in fp32
    model = fd.enable(tiny(), reuse_prefix=token * (SHOTS + QUESTION))
    check(model, questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    check(model, questions(2), computed=QUESTION + 4 * 6, kept=SHOTS)
    model = fd.enable(tiny(), reuse_prefix=token * (SHOTS + QUESTION) - 1)
    for _ in range(2):
        check(model, questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)


def test_copies_and_disabled_models_keep_nothing(model):
    check(model, questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    check(copy.deepcopy(model), questions(1), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    kept = ref(vars(model.model)["_hf_fastdecode"].kept_forward.hidden)
    fd.enable(model)
    gc.collect()
    assert kept() is None
    check(model, questions(2), computed=SHOTS + QUESTION + 4 * 6, kept=0)
    check(model, questions(3), computed=SHOTS + QUESTION + 4 * 6, kept=0)
