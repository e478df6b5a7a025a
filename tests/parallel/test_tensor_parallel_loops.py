"""What two processes that compute a model together decide in a decoding loop, and of its captures."""

from __future__ import annotations

import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria
from transformers.generation.streamers import BaseStreamer

import hf_fastdecode as fd
from hf_fastdecode.cache import captured
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.cache.storage import TokenStorage
from hf_fastdecode.generation.decoding import stopping
from hf_fastdecode.generation.report import ParallelReport
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.steps.captured_step import CapturedStep
from hf_fastdecode.generation.steps.captures import LONG_COMPLETIONS, LockHolder
from hf_fastdecode.generation.steps.modes import CapturedSteps
from hf_fastdecode.parallel.ranks import Together

from .processes import Models, scenario
from .scenarios import ENDS, GREEDY, PROMPT, PROMPTS, SAMPLING, capturing, draw, raising, reason, sees, sights, values


@sees([True, "shared", True])
def other_seeds(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model, fd.enabled(models.alone["llama"]) as alone:
        tokens, call = draw(model, models.rank, **SAMPLING), fd.explain(model).last_call
        assert "weights are split between 2 processes" in str(fd.explain(model).last_call.lines())
        assert call.sampler_reason.endswith(", on rank 0 for all processes")
        assert call.parallel == ParallelReport("tensor", 2, PROMPT.shape[1], PROMPT.shape[1], 0)
        return tokens == draw(alone, 0, **SAMPLING), call.path, call.compactions > 1


@sees([1, 8])
def time_limits(models: Models) -> Any:
    found = []
    with fd.enabled(models.split["llama"]) as model:
        for late in (0, 1):
            clock = mock.Mock(time=lambda late=late: time.time() + 1e6 * (models.rank == late))
            with mock.patch.object(stopping, "time", clock):
                found.append(len(draw(model, 0, PROMPTS, **GREEDY, max_time=1000.0)[0]) - PROMPT.shape[1])
    return found


@sees(True)
def time_limits_of_drafts(models: Models) -> Any:
    """By the clock of rank 1 every draft takes too long, which the one of rank 0 does not say."""
    alone, clock = models.alone["llama"], itertools.count(step=10**6 * models.rank)
    given = {"assistant_model": alone, "max_time": 1000.0}
    expected = draw(alone, 0, **GREEDY)
    timed = mock.patch.object(stopping_criteria, "time", mock.Mock(time=lambda: next(clock)))
    surely = mock.patch.object(alone.generation_config, "assistant_confidence_threshold", 0)
    with timed, surely, fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, **GREEDY, **given) == expected


class _Steps(StoppingCriteria):
    def __init__(self, steps: int):
        self.said: list[torch.Tensor] = []
        self.steps = steps

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.said.append(torch.full((len(input_ids),), len(self.said) + 1 >= self.steps))
        return self.said[-1]


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.numel())

    def end(self) -> None:
        self.pieces.append(0)


@sees([[3, "shared", True], [3, "shared", True], [3, "stock", True]])
def criteria_of_rank_0(models: Models) -> Any:
    """In this package's loop, another one, and a call that runs stock; each rank would end at another step."""
    found = []
    with fd.enabled(models.split["llama"]) as model:
        for loop in ({}, {"num_beams": 2}, {"use_cache": False}):
            steps = _Steps(3 + 2 * models.rank)
            criteria = {"stopping_criteria": StoppingCriteriaList([steps]), "eos_token_id": None}
            tokens, path = draw(model, 0, PROMPTS, **GREEDY, **loop, **criteria), fd.explain(model).last_call.path
            as_said = bool(steps.said[2].any()) == (models.rank == 0)
            found.append((len(tokens[0]) - PROMPT.shape[1], path, as_said))
    return found


@scenario
def streams_on_rank_0(models: Models) -> Any:
    recorder = _Recorder()
    with fd.enabled(models.split["llama"], min_saved_tokens=0, reuse_prefix=True) as model:
        tokens = draw(model, 0, PROMPT, **GREEDY, streamer=None if models.rank else recorder)
        return len(tokens[0]) - PROMPT.shape[1], recorder.pieces, reason(model)


@sees([True, 2])
def waves(models: Models) -> Any:
    """All split where one lacks memory."""
    with fd.enabled(models.split["llama"]) as model, fd.enabled(models.alone["llama"]) as alone:
        with raising(1, models, SharedContextCache, "reserve", torch.OutOfMemoryError("no memory")):
            tokens = draw(model, models.rank, PROMPTS, **GREEDY)
        return tokens == draw(alone, 0, PROMPTS, **GREEDY), fd.explain(model).last_call.waves


CAPTURED = SAMPLING | {"num_return_sequences": 4, "max_new_tokens": 12}
FEW = GREEDY | {"max_new_tokens": 4}
"""Of steps by interpreted kernels."""


@sees([[True, "eager", 2], [True, "graph", 2]], kernels=True)
def compacting_without_memory(models: Models) -> Any:
    """Memory for the suffixes of active rows is short on one rank, for eager steps and captured ones."""
    found = []
    ends = GREEDY | {"eos_token_id": ENDS, "max_new_tokens": 12}
    ids = torch.cat([PROMPT.expand(4, -1), torch.arange(3, 7)[:, None]], 1)
    for options in ({}, {"mode": "graph", "backend": "triton"}):
        with (
            capturing(),
            raising(1, models, TokenStorage, "select_rows", torch.OutOfMemoryError("no memory")),
            fd.enabled(models.split["small"], **options) as model,
        ):
            tokens, call = draw(model, 0, ids, **ends), fd.explain(model).last_call
        with fd.enabled(models.alone["small"]) as alone:
            found.append((tokens == draw(alone, 0, ids, **ends), call.mode, call.waves))
    return found


@sees([True, False])
def forgotten_failures(models: Models) -> Any:
    """One rank has forgotten that a capture for long completions failed: none captures again."""
    with fd.enabled(models.split["small"]) as model:
        state = vars(model)["_hf_fastdecode"]
        steps = object.__new__(CapturedSteps)
        steps._oversized, steps._structure = False, state.structure_of(model)
        steps._step = mock.Mock(suits=lambda cache: False)
        steps.cache = mock.Mock(suffix_length=0)
        steps.cache.state.max_suffix = 4096
        found = []
        for failures in ({}, {LONG_COMPLETIONS: "no memory"} if models.rank else {}):
            steps._captures = mock.Mock(failures=failures)
            found.append(steps._should_recapture())
    return found


@scenario
def captures_in_use_on_one_rank(models: Models) -> Any:
    with (
        capturing(),
        mock.patch.object(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0),
        fd.enabled(models.split["small"], backend="triton") as model,
    ):
        lock, other = vars(model)["_hf_fastdecode"].captures.lock, LockHolder()
        other.thread = 0  # none of this process
        if models.rank:
            lock.acquire(other, wait=False)
        tokens, call = draw(model, 0, PROMPTS, **FEW), fd.explain(model).last_call
        free = lock.holder is None
        lock.release(other)
        return len(tokens), call.mode, call.mode_reason, free


@sees([True, "graph", True, 0], kernels=True)
def captured_steps(models: Models) -> Any:
    with capturing(), fd.enabled(models.split["small"], mode="graph", backend="triton") as model:
        tokens, call = draw(model, models.rank, **CAPTURED), fd.explain(model).last_call
        again, known = draw(model, models.rank, **CAPTURED), fd.explain(model).last_call
    with fd.enabled(models.alone["small"]) as alone:
        expected = draw(alone, 0, **CAPTURED)
    return tokens == again == expected, call.mode, call.captures == call.compactions + 1 > 1, known.captures


@sees([[True, "graph", 2], [True, "eager", 2]], kernels=True)
def captured_on_one_rank(models: Models) -> Any:
    """The first capture succeeds on both, the second, of fewer rows, on one: the first goes on if it fits on both."""
    original, original_fits, found = CapturedStep.__init__, CapturedStep.fits, []
    with fd.enabled(models.alone["small"]) as alone:
        expected = draw(alone, 0, **CAPTURED)
    for fits_on in ((0, 1), (0,)):
        made = itertools.count()

        def make(*arguments: Any, made: itertools.count[int] = made, **named: Any) -> None:
            original(*arguments, **named)
            if next(made) and models.rank:
                raise RuntimeError("not permitted when capturing")

        def fits(step: CapturedStep, cache: SharedContextCache, fits_on: tuple[int, ...] = fits_on) -> bool:
            return original_fits(step, cache) and models.rank in fits_on

        with (
            capturing(),
            mock.patch.object(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0),
            mock.patch.multiple(CapturedStep, __init__=make, fits=fits),
            fd.enabled(models.split["small"], backend="triton") as model,
        ):
            tokens, call = draw(model, models.rank, **CAPTURED), fd.explain(model).last_call
        found.append((tokens == expected, call.mode, next(made)))
    return found


@sees("eager", kernels=True)
def captured_on_no_rank(models: Models) -> Any:
    """A failure of one rank's first capture makes all run eagerly, if the mode is not forced."""
    original = CapturedStep.__init__

    def make(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        if models.rank:
            raise RuntimeError("not permitted when capturing")

    with (
        capturing(),
        mock.patch.object(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0),
        mock.patch.object(CapturedStep, "__init__", make),
        fd.enabled(models.split["small"], backend="triton") as model,
    ):
        draw(model, models.rank, **CAPTURED)
        return fd.explain(model).last_call.mode


@sees([True, "graph", 2, True], kernels=True)
def captured_without_memory(models: Models) -> Any:
    """Memory for the first capture's tables is short on one rank, which both know before they run a pass."""
    passes, original = itertools.count(), CapturedStep.capture

    def counted(step: CapturedStep) -> None:
        next(passes)
        original(step)

    with capturing(), fd.enabled(models.split["small"], mode="graph", backend="triton") as model:
        no_memory = torch.OutOfMemoryError("no memory")
        with (
            raising(1, models, captured, "TablesByShape", no_memory),
            mock.patch.object(CapturedStep, "capture", counted),
        ):
            tokens, call = draw(model, 0, PROMPTS, **FEW), fd.explain(model).last_call
    with fd.enabled(models.alone["small"]) as alone:
        return (tokens == draw(alone, 0, PROMPTS, **FEW), call.mode, call.waves, next(passes) == call.captures)


@scenario
def failing_pass_of_a_capture(models: Models) -> Any:
    """A pass that fails ends the call in its process, which does not go on eagerly."""

    def fail(step: CapturedStep) -> None:
        with Together(models.group, torch.device("cpu")).pass_before_capture():
            raise torch.OutOfMemoryError("no memory")

    with (
        capturing(),
        mock.patch.object(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0),
        mock.patch.object(CapturedStep, "capture", fail),
        fd.enabled(models.split["small"], backend="triton") as model,
    ):
        return draw(model, models.rank, **CAPTURED)


@sees([[True, "shared"], [True, "stock:"], [True, "shared"], [True, "stock:"]])
def same_draws(models: Models) -> Any:
    """Loops of transformers draw what one process draws."""
    found = []
    with fd.enabled(models.split["llama"]) as model:
        for seed, arguments in (
            (3, {"num_beams": 3, "num_return_sequences": 3, "do_sample": True}),
            (3, {"do_sample": True}),
            (models.rank, {"num_beams": 3, "num_return_sequences": 3, "do_sample": False}),
            (models.rank, {"do_sample": False}),
        ):
            tokens = draw(model, seed, max_new_tokens=8, **arguments)
            same = tokens == draw(models.alone["llama"], seed, max_new_tokens=8, **arguments)
            found.append((same, reason(model)[:6]))
    return found


def test_one_rank_may_stream(seen):
    first, second = values(seen, "streams_on_rank_0")
    assert first[0] == second[0] == 8
    assert first[1] == [87, *[1] * 8, 0]
    assert first[2] == second[2] != ""
    assert first[2].startswith("shared")


def test_ranks_hold_their_captures_together(seen):
    pytest.importorskip("triton")
    first, second = values(seen, "captures_in_use_on_one_rank")
    assert first == [4, "eager", "another process of the model cannot use its captured steps now", True]
    assert second == [4, "eager", "another thread is using this model's captured steps", False]


def test_a_pass_that_fails_before_its_capture_ends_the_call(seen):
    pytest.importorskip("triton")
    for one in seen["failing_pass_of_a_capture"]:
        assert one.error.startswith("PassFailedError: a forward pass failed before its capture")
        assert "(OutOfMemoryError: no memory)" in one.error


test_what_processes_see = sights(__name__)
