"""Captured passes of other decoding loops over a model, or contexts, that two processes compute together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.errors import PassFailedError
from hf_fastdecode.generation.steps import loop_passes
from hf_fastdecode.generation.steps.captured_step import CapturedPass, CaptureOptions
from hf_fastdecode.generation.steps.loop_passes import PassAgreement, Way
from hf_fastdecode.kernels.forest_decode.limits import MAX_QUERIES
from hf_fastdecode.parallel import sequence
from hf_fastdecode.parallel.ranks import NoRoomError, Ranks, Together

from .loops import close, logits_of_loop, reorder
from .processes import Models, scenario
from .scenarios import capturing, draw, raising, same_value, sees, sights, values
from .sequence_calls import Call, text

PROMPT = text(30)["input_ids"]
ROWS = PROMPT.expand(2, -1)
TWICE = PROMPT.repeat(1, 2)
BEAMS = {"num_beams": 2, "max_new_tokens": 4}
LOOKUP = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 6}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}  # for interpreted kernels


@contextmanager
def captured_passes() -> Iterator[None]:
    """Let captured passes run where kernels are interpreted."""
    with capturing(), mock.patch.object(loop_passes, "capture_reason", return_value=None):
        yield


def enabled(model: PreTrainedModel, **options: Any) -> Any:
    return fd.enabled(model, **{"mode": "graph", "backend": "triton", "min_saved_tokens": 1, **options})


def ways(model: PreTrainedModel, alone: PreTrainedModel, **options: Any) -> Any:
    """For each loop, whether its results are stock's of one process, twice; modes, and captures then."""
    found = {}
    for name, ids, arguments in (("beams", PROMPT, BEAMS | {"do_sample": True}), ("lookup", TWICE, LOOKUP)):
        expected = draw(alone, 0, ids, **arguments)
        with captured_passes(), enabled(model, **options):
            same = [draw(model, 0, ids, **arguments) == expected]
            first = fd.explain(model).last_call
            same.append(draw(model, 0, ids, **arguments) == expected)
            call = fd.explain(model).last_call
            found[name] = same, call.path, call.mode, call.mode_reason, first.captures > 0, call.captures
    with captured_passes(), fd.enabled(alone, mode="eager"), enabled(model, **options):
        actions = (1, 3, 20, reorder, 2)
        same = [close(logits_of_loop(model, ROWS, *actions), logits_of_loop(alone, ROWS, *actions))]
        call = fd.explain(model).last_call
        found["the user's"] = same, call.path, call.mode, call.mode_reason, call.captures > 0, 0
    return found


@scenario
def captured_loops_of_split_weights(models: Models) -> Any:
    return ways(models.split["small"], models.alone["small"])


@scenario
def captured_loops_of_divided_contexts(models: Models) -> Any:
    call = Call({}, {}, config=SMALL)
    with mock.patch.object(sequence, "SUFFIX_BLOCK", MAX_QUERIES):  # the fewest tokens that kernels can follow
        return ways(call.make_model(), call.make_model(), sequence_parallel="auto")


@contextmanager
def counting() -> Iterator[mock.Mock]:
    """Count what ranks agree on."""
    with mock.patch.object(Together, "smallest", autospec=True, side_effect=Together.smallest) as smallest:
        yield smallest


@sees(0)
def asked_in_a_loop_of_transformers(models: Models) -> Any:
    """What ranks agree on in a call, less that in a call of half as many passes; the captures are known."""
    counts = []
    with captured_passes(), enabled(models.split["small"]) as model:
        for tokens in (4, 4, 7):
            with counting() as smallest:
                draw(model, 0, PROMPT, **BEAMS | {"max_new_tokens": tokens, "eos_token_id": None})
            counts.append(smallest.call_count)
    return counts[2] - counts[1]


@sees(2 * 2)
def asked_in_a_users_loop(models: Models) -> Any:
    """Of each of two further passes the tokens are compared, then it is agreed on how it runs."""
    counts = []
    with captured_passes(), enabled(models.split["small"]) as model:
        for passes in (2, 2, 4):
            with counting() as smallest:
                logits_of_loop(model, ROWS, *[1] * passes)
            counts.append(smallest.call_count)
    return counts[2] - counts[1]


@scenario
def passes_captured_on_one_rank(models: Models) -> Any:
    """One rank cannot capture, for lack of memory or for another reason; afterwards only it knows so."""
    found = []
    for error in (RuntimeError("not permitted when capturing"), torch.OutOfMemoryError("no memory")):
        with captured_passes(), fd.enabled(models.split["small"], backend="triton", min_saved_tokens=1) as model:
            state = vars(model)["_hf_fastdecode"]
            state.captures.steps_asked = 10_000
            with raising(1, models, CapturedPass, "_prepare", error):
                tokens = draw(model, 0, PROMPT, **BEAMS)
            first = fd.explain(model).last_call
            if models.rank == 0:
                state.captures.retry()
            again, call = draw(model, 0, PROMPT, **BEAMS), fd.explain(model).last_call
            same = tokens == again == draw(models.alone["small"], 0, PROMPT, **BEAMS)
            found.append((same, (first.mode, first.mode_reason), (call.mode, call.mode_reason)))
    return found


@sees([[True, "mode='graph' was requested", captures] for captures in (1, 0)])
def passes_that_fit_on_one_rank(models: Models) -> Any:
    """The captured pass of one rank does not fit the batch: of an earlier call, and of the pass before."""
    original, found = CapturedPass.fits, []
    expected = draw(models.alone["small"], 0, PROMPT, **BEAMS)
    with captured_passes(), enabled(models.split["small"]) as model:
        draw(model, 0, PROMPT, **BEAMS)
        for which in (0, 1):
            asked = itertools.count()

            def fits(step: CapturedPass, cache: SharedContextCache) -> bool:
                return original(step, cache) and not (next(asked) == which and models.rank)  # noqa: B023

            with mock.patch.object(CapturedPass, "fits", fits):
                tokens, call = draw(model, 0, PROMPT, **BEAMS), fd.explain(model).last_call
            found.append((tokens == expected, call.mode_reason, call.captures))
    return found


@scenario
def passes_without_room(models: Models) -> Any:
    error = torch.OutOfMemoryError("no memory")
    raises = raising(1, models, SharedContextCache, "reserve", error)
    with captured_passes(), raises, enabled(models.split["small"]) as model:
        return draw(model, 0, PROMPT, **BEAMS)


@sees(True)
def after_passes_without_room(models: Models) -> Any:
    with captured_passes(), enabled(models.split["small"]) as model:
        return draw(model, 0, PROMPT, **BEAMS) == draw(models.alone["small"], 0, PROMPT, **BEAMS)


@scenario
def passes_that_one_rank_refuses(models: Models) -> Any:
    """Code of the user's does something on one rank: for one pass, and to the model for good."""
    alone, found = models.alone["small"], []

    def with_gradients(model: PreTrainedModel, cache: SharedContextCache) -> None:
        with torch.set_grad_enabled(models.rank == 1 and model is not alone):
            model(torch.full((2, 1), 5), **{CACHE: cache})

    def moved(model: PreTrainedModel, cache: SharedContextCache) -> None:
        norm = model.model.norm
        if models.rank and model is not alone:
            norm.weight.data = norm.weight.data.clone()

    for change in (with_gradients, moved):
        actions = (1, change, 1, 2)
        split = enabled(models.split["small"], backend="auto")  # whose eager passes take gradients
        with captured_passes(), fd.enabled(alone, mode="eager"), split as model:
            same = close(logits_of_loop(model, ROWS, *actions), logits_of_loop(alone, ROWS, *actions))
            found.append((same, fd.explain(model).last_call.mode_reason))
    return found


@scenario
def failing_capture_of_a_pass(models: Models) -> Any:
    """A pass before the capture that fails ends the call, and is not taken for one that cannot be captured."""
    failed = PassFailedError("a forward pass failed")
    with (
        captured_passes(),
        mock.patch.object(CapturedPass, "capture", side_effect=failed),
        fd.enabled(models.split["small"], backend="triton", min_saved_tokens=1) as model,
    ):
        vars(model)["_hf_fastdecode"].captures.steps_asked = 10_000
        return draw(model, 0, PROMPT, **BEAMS)


class _Ranks(Ranks):
    """This process, and another one that answers for itself."""

    count, alone = 2, False

    def __init__(self, *other: int):
        self.other, self.asked = other, 0

    def smallest(self, *numbers: int) -> list[int]:
        self.asked += 1
        return list(map(min, numbers, self.other))


def test_passes_are_replayed_unasked_as_far_as_the_captures_of_all_ranks_serve() -> None:
    ranks = _Ranks(Way.REPLAYING, -Way.REPLAYING, 100, 20)
    options = CaptureOptions(0, ())
    step = mock.Mock(longest_row=None, longest_suffix=30)
    lengths = {"row": 99, "suffix": 19}
    cache = mock.Mock(longest_row=lambda _: lengths["row"])
    type(cache).suffix_length = mock.PropertyMock(side_effect=lambda: lengths["suffix"])
    agreement = PassAgreement(ranks, asks_always=False)
    agreement.keep(options, step)
    assert agreement.replayed(cache, options) is None  # which the other may not have
    assert agreement.ask(cache, options, None, has_room=True) == (step, None)
    for row, suffix, serves in ((99, 19, True), (100, 20, True), (101, 20, False), (100, 21, False)):
        lengths |= {"row": row, "suffix": suffix}
        assert (agreement.replayed(cache, options) is step) == serves
    lengths |= {"row": 99, "suffix": 19}
    step.reads.return_value = False
    assert agreement.replayed(cache, options) is None
    step.reads.return_value, cache.forest = True, mock.Mock()
    assert agreement.replayed(cache, options) is None
    assert ranks.asked == 1
    ranks.other = Way.CAPTURING, -Way.CAPTURING, 100, 20
    assert agreement.ask(cache, options, None, has_room=True) == (None, None)
    ranks.other = Way.NOT_AT_ALL, -Way.NOT_AT_ALL, 100, 20
    with pytest.raises(NoRoomError):
        agreement.ask(cache, options, None, has_room=True)


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    pytest.importorskip("triton")


@pytest.mark.parametrize("of", ["split_weights", "divided_contexts"])
def test_loops_replay_captured_passes(seen, of):
    for name, (same, path, mode, reason, captures, later) in same_value(seen, f"captured_loops_of_{of}").items():
        assert all(same), name
        assert (path, mode, reason) == ("shared", "graph", "mode='graph' was requested"), name
        assert captures, name
        assert not later, name


def test_what_one_rank_cannot_capture_all_run_eagerly(seen):
    first, second = values(seen, "passes_captured_on_one_rank")
    for one in (*first, *second):
        assert one[0]
    failure = "not permitted when capturing"
    assert second[0][1:] == [["eager", failure]] * 2
    assert first[0][1] == [
        "eager",
        f"rank 1, with which this process computes the model, failed: RuntimeError: {failure}",
    ]
    assert first[0][2] == ["eager", f"on rank 1, {failure}"]
    for one in (first[1], second[1]):
        assert one[1] == [
            "eager",
            "out of memory (the memory of rank 1 of the model's processes does not suffice: "
            "OutOfMemoryError: no memory)",
        ]
        assert one[2][0] == "graph"


def test_lack_of_room_on_one_rank_ends_the_call_on_all(seen):
    for one in seen["passes_without_room"]:
        assert one.error == (
            "NoRoomError: the memory of a process of the model does not suffice for the tokens of a pass"
        )


def test_what_one_rank_refuses_in_a_users_loop_all_run_eagerly(seen):
    first, second = values(seen, "passes_that_one_rank_refuses")
    gradients = "gradients are enabled in the loop"
    changed = "the model's weights or modules changed between passes"
    for found, rank in ((first, "on rank 1, "), (second, "")):
        assert [same for same, _ in found] == [True, True]
        assert found[0][1].endswith(f"1 of 4 passes ran eagerly: {rank}{gradients}")
        assert found[1][1].endswith(f"2 of 3 passes ran eagerly: {rank}{changed}")


def test_a_pass_that_fails_before_its_capture_ends_the_call(seen):
    assert [one.error for one in seen["failing_capture_of_a_pass"]] == ["PassFailedError: a forward pass failed"] * 2


test_what_processes_see = sights(__name__)
