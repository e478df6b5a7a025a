"""Who holds the captures of a model: a call, until it ends or is interrupted, at whatever line of taking them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from hf_fastdecode.generation.steps.captures import CallLock, Captures, LockHolder
from hf_fastdecode.generation.steps.modes import holding_captures
from hf_fastdecode.parallel.ranks import ALONE

TAKING = {"holding_captures", "begin_prefill", "acquire"}


def interrupted(run: Callable[[], object], line: int) -> bool:
    """Run, and interrupt before the given line of those that take the captures; whether there are so many."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_name not in TAKING:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("forced", [None, "mode='graph'"])
def test_an_interruption_leaves_the_captures_free(forced: str | None) -> None:
    captures = Captures()
    call = SimpleNamespace(
        state=SimpleNamespace(captures=captures),
        options=SimpleNamespace(needs_capture=forced),
        mode="graph",
        scope=None,
        ranks=ALONE,
        report=SimpleNamespace(),
    )

    def take() -> None:
        with holding_captures(call) as held:
            assert held
            sys.settrace(None)  # the call itself, and its end

    line = 0
    while interrupted(take, line):
        assert captures.lock.holder is None, line
        line += 1
    assert line > 5


def test_an_interruption_of_a_prefill_that_begins_ahead_leaves_them_free_at_the_calls_end() -> None:
    captures = Captures()
    captures.prefills.again = (SimpleNamespace(_replace=lambda **_: None), None)
    captures.prefills.find = lambda *_: None
    captures._may_replay = lambda _: True
    model, ids, line = SimpleNamespace(device=torch.device("cpu")), torch.zeros(1, 64, dtype=torch.long), 0

    def begin() -> None:
        ends: list[Callable[[], object]] = []
        scope = SimpleNamespace(callback=lambda end, *arguments: ends.append(lambda: end(*arguments)))
        try:
            captures.begin_prefill(model, ids, scope)
            assert captures.scope is scope
        finally:
            for end in ends:
                end()

    while interrupted(begin, line):
        assert captures.lock.holder is None, line
        line += 1
    assert line > 5
    assert captures.lock.holder is None


def test_one_holder_at_a_time() -> None:
    lock, first, second = CallLock(), LockHolder(), LockHolder()
    assert lock.acquire(first, wait=True)
    assert not lock.acquire(second, wait=False)
    lock.release(second)
    assert lock.holder is first
    waiting = threading.Thread(target=lock.acquire, args=(second,), kwargs={"wait": True})
    waiting.start()
    lock.release(first)
    waiting.join(60)
    assert lock.holder is second
