"""Calls of a model that two processes compute together: they agree, or say where they differ."""

from __future__ import annotations

from typing import Any

import pytest

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.prompts import start

from .processes import Models, scenario
from .scenarios import (
    GREEDY,
    PROMPT,
    PROMPTS,
    draw,
    raising,
    reason,
    same_value,
    values,
)


@scenario
def other_lengths(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY | {"max_new_tokens": 8 + models.rank})


@scenario
def other_prompts(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, (PROMPTS + models.rank).contiguous(), **GREEDY)


@scenario
def other_options(models: Models) -> Any:
    with fd.enabled(models.split["llama"], min_shared_tokens=32 + models.rank) as model:
        return draw(model, 0, PROMPTS, **GREEDY)


@scenario
def other_end_tokens(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY, eos_token_id=[5, 6 + models.rank])


@scenario
def other_cache(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        long, short = fd.prefill(model, PROMPT), fd.prefill(model, PROMPT[:, :80])
        return draw(model, 0, PROMPTS, **GREEDY, **{CACHE: (long, short)[models.rank]})


@scenario
def other_prefill(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return fd.prefill(model, PROMPT[:, : 80 + models.rank]).rows


@scenario
def one_rank_refuses(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        model.model.layers[0].train(models.rank == 1)
        model.model.layers[0].self_attn.attention_dropout = 0.1 * models.rank
        try:
            tokens = draw(model, 0, PROMPTS, **GREEDY)
        finally:
            model.model.layers[0].eval()
            model.model.layers[0].self_attn.attention_dropout = 0.0
        return len(tokens), reason(model)


@scenario
def one_rank_raises(models: Models) -> Any:
    with raising(1, models, start, "check_prompts", KeyError("no prompt")), fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY)


@scenario
def one_rank_refuses_and_one_raises(models: Models) -> Any:
    error = (Unsupported("it cannot share"), KeyError("no prompt"))[models.rank]
    with raising(models.rank, models, start, "check_prompts", error), fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY)


@scenario
def after_errors(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model, fd.enabled(models.alone["llama"]) as alone:
        return draw(model, 0, PROMPTS, **GREEDY), draw(alone, 0, PROMPTS, **GREEDY), reason(model)


@scenario
def other_stores_of_prefixes(models: Models) -> Any:
    with fd.enabled(models.split["llama"], reuse_prefix=True) as model:
        first = draw(model, 0, PROMPTS, **GREEDY)
        if models.rank:
            vars(model)["_hf_fastdecode"].prefix_store.clear()
        again = draw(model, 0, PROMPTS, **GREEDY)
        known = fd.explain(model).last_call.known_tokens
        third = draw(model, 0, PROMPTS, **GREEDY)
        return first == again == third, known, fd.explain(model).last_call.known_tokens


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("other_lengths", "max_new_tokens is 8 on rank 0 and 9 on rank 1"),
        ("other_prompts", "inputs is int64 [4, 87] with content"),
        ("other_options", "enable(..., min_shared_tokens=) is 32 on rank 0 and 33 on rank 1"),
        ("other_end_tokens", "eos_token_id is [5, 6] on rank 0 and [5, 7] on rank 1"),
        ("other_cache", "is SharedContextCache(Forest("),
        ("other_prefill", "the prompts' tokens is int64 [80] with content"),
    ],
)
def test_the_field_that_differs_is_named_on_all_ranks(seen, name, field):
    first, second = seen[name]
    assert first == second
    assert first.error.startswith("ValueError: ")
    assert field in first.error
    assert first.error.endswith("give all of them the same call")


def test_what_one_rank_refuses_all_run_stock(seen):
    first, second = values(seen, "one_rank_refuses")
    assert first[0] == second[0] == 4
    assert second[1].startswith("stock: the model is in training mode with ")
    assert first[1] == second[1].replace("stock: ", "stock: on rank 1, ")


def test_an_error_of_one_rank_ends_the_call_on_all(seen):
    first, second = seen["one_rank_raises"]
    assert second.error == "KeyError: 'no prompt'"
    assert first.error == (
        "PeerFailedError: rank 1, with which this process computes the model, failed: KeyError: 'no prompt'"
    )
    assert seen["one_rank_refuses_and_one_raises"] == (first, second)
    tokens, alone, path = same_value(seen, "after_errors")
    assert tokens == alone
    assert path.startswith("shared: ")


def test_ranks_that_keep_other_prompts_plan_alike(seen):
    same, known, then = same_value(seen, "other_stores_of_prefixes")
    assert same
    assert known is None
    assert then == [87]
