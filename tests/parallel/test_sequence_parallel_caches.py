"""Caches whose nodes are divided between processes: kept, returned, changed, and read by direct passes."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.forest import Span
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.parallel import shards

from ..cases import exhaustive_but
from ..tiny_models import VOCABULARY, ragged_prompts, tiny_model
from .processes import Models, add_scenario, scenario
from .scenarios import by_pytorch, same_value, sees, sights, values
from .sequence_calls import GREEDY, SAMPLING, TEXT, levels, ones, text

SAMPLES = SAMPLING | {"num_return_sequences": 3}


def drawn(model: PreTrainedModel, seed: int, prompts: dict[str, Tensor], **arguments: Any) -> Any:
    torch.manual_seed(seed)
    return model.generate(**prompts, **arguments)


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def gathered(cache: SharedContextCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all nodes' segments in every layer, from what each process stores."""
    found = []
    for layer in cache.attention_layers:
        for number, length in enumerate(cache.state.segment_lengths):
            if number in layer.storage.segments:
                segment = layer.storage.keys_and_values(layer.storage.segments[number])
                found.append(
                    tuple(cache.state.division.whole(segment, Span(number, 0, length), cache.state.segment_runs))
                )
    return found


@scenario
@by_pytorch
def kept_divided_caches(models: Models) -> Any:
    model, found = tiny_model(), []
    prompts = levels()
    longer = {name: torch.cat([part, part[:, -9:]], 1) for name, part in prompts.items()}
    expected = [drawn(model, 0, one, **SAMPLES) for one in (prompts, longer, longer)]
    with fd.enabled(model):
        of_all = fd.prefill(model, prompts).nbytes.stored
    with fd.enabled(model, sequence_parallel="auto") as model:
        cache = fd.prefill(model, prompts)
        before = repr(cache), cache.nbytes.stored
        for one, tokens in zip((prompts, longer, longer), expected, strict=True):
            again = drawn(model, models.rank, one, **SAMPLES, **{CACHE: cache})
            found.append((torch.equal(again, tokens), fd.explain(model).last_call.prefilled_tokens))
        same = (repr(cache), cache.nbytes.stored) == before
        # Each stores every other token of a node.
        return found, same, cache.nbytes.stored / of_all, cache.stored_node_tokens, cache.node_tokens


@sees([True, 3 * 8])
@by_pytorch
def returned_caches(models: Models) -> Any:
    """Three turns of a conversation, whose rows go on from the cache of the turn before."""

    def turns(model: PreTrainedModel, rank: int, *, passed_on: bool) -> Tensor:
        done = drawn(model, rank, text(), **SAMPLES, return_dict_in_generate=True)
        for turn in range(2):
            more = ragged_prompts(7, seed=turn)["input_ids"].repeat(3, 1)
            prompts = ones(torch.cat([done.sequences, more], 1))
            given = {CACHE: done[CACHE]} if passed_on else {}
            done = drawn(model, rank, prompts, **SAMPLING, **given, return_dict_in_generate=True)
        return done.sequences

    model = tiny_model()
    expected = turns(model, 0, passed_on=False)
    with fd.enabled(model, sequence_parallel="auto"):
        found = turns(model, models.rank, passed_on=True)
        return torch.equal(found, expected), fd.explain(model).last_call.prefilled_tokens


@sees([[True, "shared", known] for known in (None, [87], [96], [87])])
@by_pytorch
def reused_prefixes(models: Models) -> Any:
    model, found = tiny_model(), []
    prompts = [
        ones(torch.cat([TEXT, ragged_prompts(length, seed=length)["input_ids"]], 1)) for length in (3, 9, 9, 30)
    ]
    expected = [drawn(model, 0, one, **SAMPLING) for one in prompts]
    with fd.enabled(model, sequence_parallel="auto", reuse_prefix=True):
        for one, tokens in zip(prompts, expected, strict=True):
            same = torch.equal(drawn(model, models.rank, one, **SAMPLING), tokens)
            call = fd.explain(model).last_call
            found.append((same, call.path, call.known_tokens))
    return found


@sees([True, "shared", 2])
@by_pytorch
def loops_of_users(models: Models) -> Any:
    """A loop that drops tokens, reorders rows and forks the cache while it decodes."""

    def loop(model: PreTrainedModel, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache, tokens = kwargs[CACHE], input_ids
        for step in range(6):
            passed = {"position_ids": None} if step == 0 else {}
            logits = model(tokens, **{CACHE: cache}, **passed).logits[:, -1:]
            tokens = logits.argmax(-1)
            if step == 2:
                cache.crop(-1)  # computed once more
                model(input_ids[:, -1:], **{CACHE: cache})
            if step == 3:
                cache.reorder_cache(torch.tensor([1, 0, 2]))
                input_ids, tokens = input_ids[[1, 0, 2]], tokens[[1, 0, 2]]
            input_ids = torch.cat([input_ids, tokens], dim=1)
        return input_ids

    prompts = ragged_prompts(70, 70, 70, shared=60)
    model = tiny_model()
    expected = model.generate(**prompts, custom_generate=loop, max_new_tokens=6)
    with fd.enabled(model, sequence_parallel="auto"):
        found = model.generate(**prompts, custom_generate=loop, max_new_tokens=6)
        call = fd.explain(model).last_call
        return torch.equal(found, expected), call.path, call.ranks


@sees([True, "shared"])
@by_pytorch
def embeddings(models: Models) -> Any:
    model = tiny_model()
    given = {"inputs_embeds": model.get_input_embeddings()(TEXT).detach()} | GREEDY
    hidden = {"output_hidden_states": True, "return_dict_in_generate": True}
    expected, states = model.generate(**given), model.generate(**text(), **GREEDY, **hidden).hidden_states
    with fd.enabled(model, sequence_parallel="auto"):
        same, path = torch.equal(model.generate(**given), expected), fd.explain(model).last_call.path
        found = model.generate(**text(), **GREEDY, **hidden).hidden_states
    for one, other in zip(found, states, strict=True):
        torch.testing.assert_close(one, other)
    return same, path


@sees([True, True])
@by_pytorch
def copies(models: Models) -> Any:
    """A copy of a cache and of an enabled model go on between the same processes; none can be saved."""
    model = tiny_model()
    expected = model.generate(**text(), **GREEDY)
    with fd.enabled(model, sequence_parallel="auto"):
        cache = fd.prefill(model, TEXT)
        twin, other = copy.deepcopy(cache), copy.deepcopy(model)
        fd.enable(other, sequence_parallel="auto")
        found = [
            torch.equal(model.generate(**text(), **GREEDY, **{CACHE: twin}), expected),
            torch.equal(other.generate(**text(), **GREEDY), expected),
        ]
        with pytest.raises(TypeError, match="divided between 2 processes cannot be saved"):
            pickle.dumps(cache)
    return found


@sees([True, [None, [87], None, [87], None]])
@by_pytorch
def enabled_again(models: Models) -> Any:
    """A kept cache outlives `disable`; prefixes kept by one way of dividing are not read by another."""
    model, known = tiny_model(), []
    expected = model.generate(**text(), **GREEDY)
    with fd.enabled(model, sequence_parallel="auto"):
        cache = fd.prefill(model, TEXT)
    with fd.enabled(model, sequence_parallel="auto"):
        same = torch.equal(model.generate(**text(), **GREEDY, **{CACHE: cache}), expected)
    for way in ("auto", "auto", False, False, "auto"):
        fd.enable(model, sequence_parallel=way, reuse_prefix=True)
        same = same and torch.equal(model.generate(**text(), **GREEDY), expected)
        known.append(fd.explain(model).last_call.known_tokens)
    return same, known


def random_operations(models: Models) -> Any:
    """The same operations on a divided cache and on a whole one: equal nodes to the bit, and logits up to rounding.

    Nodes of passes that processes divided are equal up to rounding, as products of fewer rows are.
    """
    model, compared = tiny_model(num_hidden_layers=1), 0
    for seed in range(6):
        rng = random.Random(seed)
        prompts = padded(
            [
                [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 2, 9, 40]))]
                for _ in range(rng.randint(1, 3))
            ]
        )
        chunk, divides, caches = rng.choice([5, 16384]), seed % 2, []
        for group in (False, models.group):
            fd.enable(model, sequence_parallel=group, max_prefill_tokens=chunk)
            with mock.patch.object(shards, "FEWEST_TOKENS", 2 if divides else 10**9):
                caches.append(fd.prefill(model, prompts))
        whole, divided = caches
        for of_whole, of_all in zip(gathered(whole), gathered(divided), strict=True):
            torch.testing.assert_close(of_all, of_whole, **({} if divides else {"rtol": 0, "atol": 0}))
        for _ in range(8):
            rows, own = whole.rows, whole.suffix_lengths
            kind = rng.choice(["fork", "crop", "drop_last", "select", "reorder", "repeat", "pass", "pass", "pass"])
            if kind == "fork":
                whole, divided = whole.fork(), divided.fork()
                for of_whole, of_all in zip(gathered(whole), gathered(divided), strict=True):
                    torch.testing.assert_close(of_whole, of_all)
            elif kind == "crop":
                count = -rng.randint(0, int(whole.suffix_lengths.min()) + 1)
                if min(map(sum, zip(whole.forest.context_lengths, own.tolist(), strict=True))) > -count:
                    whole.crop(count), divided.crop(count)
            elif kind == "drop_last":
                counts = [rng.randint(0, most) for most in own.tolist()]
                if all(
                    most - count + context
                    for most, count, context in zip(own.tolist(), counts, whole.forest.context_lengths, strict=True)
                ):
                    whole.drop_last(counts), divided.drop_last(counts)
            elif kind in ("select", "reorder"):
                chosen = [rng.randrange(rows) for _ in range(rng.randint(1, 5) if kind == "select" else rows)]
                whole.select_rows(chosen), divided.reorder_cache(torch.tensor(chosen))
            elif kind == "repeat" and rows < 4:
                whole.batch_repeat_interleave(2), divided.batch_repeat_interleave(2)
            elif kind == "pass":
                new = torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 1, 3]))]] * rows)
                with torch.no_grad():
                    expected, found = (model(new, **{CACHE: cache}).logits for cache in (whole, divided))
                torch.testing.assert_close(found, expected)
                compared += 1
            assert repr(divided.forest) == repr(whole.forest)
    fd.disable(model)
    return compared


for ranks in (2, 3, 4):
    add_scenario(f"random_operations_{ranks}", by_pytorch(random_operations), ranks)


@scenario
@by_pytorch
def caches_of_others(models: Models) -> Any:
    """Caches that hold nodes otherwise than the call would divide them."""
    model, other = tiny_model(), torch.distributed.new_group([0, 1])
    ways = {"alone": False, "divided": "auto", "divided by another group": other}
    caches, errors = {}, {}
    for name, way in ways.items():
        with fd.enabled(model, sequence_parallel=way):
            caches[name] = fd.prefill(model, TEXT)
    for name, held in (("divided", "alone"), ("alone", "divided"), ("divided", "divided by another group")):
        with fd.enabled(model, sequence_parallel=ways[name]):
            try:
                model.generate(**text(), **GREEDY, **{CACHE: caches[held]})
            except ValueError as error:
                errors[f"{held} in {name}"] = str(error)
    return errors


def test_kept_caches_serve_many_calls(seen):
    for rank, (found, unchanged, part, stored, tokens) in enumerate(values(seen, "kept_divided_caches")):
        assert found == [[True, 0], [True, 18], [True, 18]]
        assert unchanged
        assert stored == (tokens + 1 - rank) // 2
        assert part == pytest.approx(stored / tokens)


@pytest.mark.parametrize("ranks", exhaustive_but([2], [2, 3, 4]))
def test_any_operation_leaves_what_a_whole_cache_holds(ranks, request):
    seen = request.getfixturevalue("seen" if ranks == 2 else "seen_by_four")
    assert same_value(seen, f"random_operations_{ranks}") > 10


def test_caches_that_are_divided_otherwise_are_refused(seen):
    errors = same_value(seen, "caches_of_others")
    between, made = "the processes [0, 1] (sequence_parallel)", "the cache was made for "
    assert errors["alone in divided"].startswith(
        f"{made}this process alone (sequence_parallel), and this call divides"
    )
    assert errors["divided in alone"].startswith(made + between)
    assert errors["divided by another group in divided"].startswith(made + between)
    assert all("make it again with hf_fastdecode.prefill(model, ...)" in error for error in errors.values())


test_what_processes_see = sights(__name__)
