"""Direct passes over rows of unequal length: every row goes on at its own position."""

import inspect

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..module_calls import before_calls
from ..tiny_models import ragged_prompts, tiny_model

LENGTHS = (63, 90, 55)
PROMPTS = ragged_prompts(*LENGTHS, shared=37)
STEPS = [ragged_prompts(count, count, count, seed=count)["input_ids"] for count in (1, 5, 1)]


def expected(model, rows, steps=STEPS):
    """Logits that a stock model gives each row by itself, for the steps' tokens."""
    width, found = PROMPTS["input_ids"].shape[1], []
    for row in rows:
        own = torch.cat([PROMPTS["input_ids"][row, width - LENGTHS[row] :], *[step[row] for step in steps]])
        found.append(model(own[None]).logits[0, LENGTHS[row] :])
    return torch.stack(found)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "opt", "gpt_neox", "gemma3_text"])
def test_rows_go_on_at_their_own_positions(name):
    model = tiny_model(name)
    with torch.no_grad():
        stock = expected(model, range(3))
        with fd.enabled(model):
            cache = fd.prefill(model, PROMPTS)
            found = torch.cat([model(step, **{CACHE: cache}).logits for step in STEPS], 1)
    torch.testing.assert_close(found, stock)


@pytest.mark.parametrize("rows", [[2], [0, 2], [1, 0, 1]], ids=str)
def test_rows_behind_padding_go_on_at_their_own_positions(model, rows):
    """Rows that were selected keep the padding of the longest one that was dropped."""
    with torch.no_grad():
        stock = expected(model, rows)
        with fd.enabled(model):
            cache = fd.prefill(model, PROMPTS)
            model(STEPS[0], **{CACHE: cache})
            cache.select_rows(rows)
            kept = [model(step[rows], **{CACHE: cache}).logits for step in STEPS[1:]]
    torch.testing.assert_close(torch.cat(kept, 1), stock[:, 1:])


def positional(model, tokens, cache, positions):
    order = list(inspect.signature(type(model).forward).parameters)[1:]
    given = {"input_ids": tokens, CACHE: cache, "position_ids": positions}
    return model(*[given.get(name) for name in order[: 1 + max(map(order.index, given))]])


def named(model, tokens, cache, positions):
    return model(tokens, **{CACHE: cache}, position_ids=positions)


@pytest.mark.parametrize("call", [positional, named], ids=lambda call: call.__name__)
@pytest.mark.parametrize("offset", [None, 0, 3])
def test_given_positions_stay_as_they_are(model, call, offset):
    """Given as None they are filled; otherwise the user's hold, also when they differ from ours."""
    with torch.no_grad(), fd.enabled(model):
        tokens = STEPS[1]
        own = torch.tensor(LENGTHS)[:, None] + torch.arange(tokens.shape[1])
        seen = []
        with before_calls(model.model, lambda args, kwargs: seen.append(kwargs["position_ids"])):
            call(model, tokens, fd.prefill(model, PROMPTS), None if offset is None else own + offset)
    assert torch.equal(seen[-1], own + (offset or 0))


def test_embeddings_go_on_at_their_own_positions(model):
    with torch.no_grad():
        given = model.get_input_embeddings()(STEPS[1])
        with fd.enabled(model):
            found = model(inputs_embeds=given, **{CACHE: fd.prefill(model, PROMPTS)}).logits
        torch.testing.assert_close(found, expected(model, range(3), STEPS[1:2]))
