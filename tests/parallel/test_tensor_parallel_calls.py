"""Calls of a model that two processes compute together: they agree, or say where they differ."""

from __future__ import annotations

from contextlib import ExitStack
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.prompts import reading
from hf_fastdecode.generation.steps.captures import Captures, LockHolder
from hf_fastdecode.parallel.ranks import Together
from hf_fastdecode.parallel.watchdog import Watchdog

from .processes import Models, scenario
from .scenarios import GREEDY, PROMPTS, capturing, draw, raising, reason, same_value, sees, sights, values


@scenario
def other_lengths(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY | {"max_new_tokens": 8 + models.rank})


@sees(True)
def calls_of_threads(models: Models) -> Any:
    """Two threads of each process make the same call: one waits for the other."""
    found: list[list[list[int]]] = []
    with fd.enabled(models.split["llama"]) as model:
        threads = [Thread(target=lambda: found.append(draw(model, 0, PROMPTS, **GREEDY))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found == [draw(models.alone["llama"], 0, PROMPTS, **GREEDY)] * 2


@scenario
def other_options(models: Models) -> Any:
    with fd.enabled(models.split["llama"], min_shared_tokens=32 + models.rank) as model:
        return draw(model, 0, PROMPTS, **GREEDY)


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
    with (
        raising(1, models, reading, "check_prompts", KeyError("no prompt")),
        fd.enabled(models.split["llama"]) as model,
    ):
        return draw(model, 0, PROMPTS, **GREEDY)


@scenario
def one_rank_refuses_and_one_raises(models: Models) -> Any:
    error = (Unsupported("it cannot share"), KeyError("no prompt"))[models.rank]
    with raising(models.rank, models, reading, "check_prompts", error), fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY)


@scenario
def after_errors(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model, fd.enabled(models.alone["llama"]) as alone:
        return draw(model, 0, PROMPTS, **GREEDY), draw(alone, 0, PROMPTS, **GREEDY), reason(model)


@sees([True, None, [87]])
def other_stores_of_prefixes(models: Models) -> Any:
    """Ranks that keep other prompts plan alike: without them, and then with those of that call."""
    with fd.enabled(models.split["llama"], reuse_prefix=True) as model:
        first = draw(model, 0, PROMPTS, **GREEDY)
        if models.rank:
            vars(model)["_hf_fastdecode"].prefix_store.clear()
        again = draw(model, 0, PROMPTS, **GREEDY)
        known = fd.explain(model).last_call.known_tokens
        third = draw(model, 0, PROMPTS, **GREEDY)
        return first == again == third, known, fd.explain(model).last_call.known_tokens


@scenario
def comparisons(models: Models) -> Any:
    """How often a call compares what its processes have, whether all of them share it or one refuses it early."""
    refused, found = Unsupported("it cannot share"), {}
    sampled = {"do_sample": True, "max_new_tokens": 4}
    with fd.enabled(models.split["llama"]) as model:
        for loop, arguments in (
            ("ours", sampled | {"num_return_sequences": 4}),
            ("beams", sampled | {"num_beams": 3, "num_return_sequences": 3}),
        ):
            for refuses in (False, True):
                with ExitStack() as stack:
                    if refuses:
                        stack.enter_context(raising(1, models, reading, "check_prompts", refused))
                    asked = [stack.enter_context(_counting(name)) for name in ("first", "smallest", "_gathered")]
                    asked.append(stack.enter_context(_counting("enter_foreign_loop", Watchdog)))
                    draw(model, 0, **arguments)
                found[loop, refuses] = *[one.call_count for one in asked], reason(model)[:6]
    return list(found.values())


def _counting(name: str, owner: type = Together) -> Any:
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


@sees([[0, 7], [0.5, 0.5], [[True], [False]], False])
def tensors_of_rank_0(models: Models) -> Any:
    """One broadcast has tensors of all dtypes, the widest elements first."""
    rank, ranks = models.rank, Together(models.group, torch.device("cpu"))
    given = torch.tensor([[True], [False]]) ^ bool(rank), torch.tensor([rank, 7 - rank]), torch.full((2,), 0.5 + rank)
    rows, tokens, numbers, over = ranks.first(*given, torch.tensor(bool(rank)))
    return tokens.tolist(), numbers.tolist(), rows.tolist(), over.item()


@scenario
def prefill_begun_on_one_rank(models: Models) -> Any:
    """A process that could begin a call's prefill, and so hold its captures, compares who holds them all the same."""

    def begin(captures: Captures, model: Any, inputs: Any, scope: Any) -> None:
        captures.lock.acquire(LockHolder(scope), wait=False)

    with capturing(), fd.enabled(models.split["small"], mode="graph", backend="triton") as model:
        if models.rank:
            vars(model)["_hf_fastdecode"].captures.prefills.again = None, mock.ANY
        with mock.patch.object(Captures, "begin_prefill", begin), _counting("smallest") as asked:
            tokens = draw(model, 0, PROMPTS, **GREEDY | {"max_new_tokens": 3})
        return tokens, asked.call_count, fd.explain(model).last_call.mode


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("other_lengths", "max_new_tokens is 8 on rank 0 and 9 on rank 1"),
        ("other_options", "enable(..., min_shared_tokens=) is 32 on rank 0 and 33 on rank 1"),
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


def test_all_ranks_compare_as_often_also_where_one_refuses_early(seen):
    ours, ours_refused, beams, beams_refused = same_value(seen, "comparisons")
    assert [one[-1] for one in (ours, ours_refused, beams, beams_refused)] == ["shared", "stock:", "shared", "stock:"]
    for one, exchanges in ((ours, 0), (ours_refused, 1), (beams, 0), (beams_refused, 1)):
        assert one[1] > 0
        assert one[2] == exchanges  # of the reason
        assert one[3] == exchanges  # passes are transformers' from then on, which the watch does not count


def test_a_rank_that_could_hold_captures_before_the_others_asks_them(seen):
    pytest.importorskip("triton")
    assert same_value(seen, "prefill_begun_on_one_rank")[2] == "graph"


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


test_what_processes_see = sights(__name__)
