"""Two processes that compute one model, of which one fails: neither waits for the other."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import hf_fastdecode as fd
from hf_fastdecode.generation.decoding.stopping import Decisions
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.parallel import watchdog
from hf_fastdecode.parallel.gathering import parameters
from hf_fastdecode.parallel.watchdog import Event, Heartbeat, difference

from ..workers import made_once
from .failing import Calls, Ended, at_nth, run_all, scenario, send_itself
from .scenarios import PROMPT, PROMPTS

TIMEOUT = 4
PATIENCE = 30
"""Seconds of a call that ends by itself, however busy the machine is."""
TOKENS = 24
PASSES = 2 * 6
"""Uses of the activation, of which each of two layers has one a pass, until the failure."""


def generate(calls: Calls, **arguments: Any) -> int:
    ids = arguments.pop("ids", PROMPTS)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": 97}
    return int(calls.model.generate(ids, **given | arguments).numel())


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("hf_fastdecode")]


class Graph:
    """Stands for a captured graph to which the frames of a call refer."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def clear(self) -> None:
        self.freed.set()


@scenario()
def raises_in_a_pass(calls: Calls) -> None:
    """Calls that go on, errors that both raise, a slow pass, then an error of rank 1.

    Communication closes once no graph holds it, as NCCL's does, and the last call of rank 0 waits for that.
    """
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    call_in_threads(calls)
    calls.make(lambda: generate(calls, ids=(PROMPTS + calls.rank).contiguous()))
    calls.make(lambda: generate(calls, max_new_tokens=-1))
    with at_nth(PASSES, functional, "silu", lambda: time.sleep(calls.rank * (TIMEOUT + 1))):
        calls.make(lambda: generate(calls))
    graph, close = Graph(), watchdog.abort
    state_of(calls.model).structure_of(calls.model).ranks.watchdog.frees(graph)
    watchdog.abort = lambda group: close(group) if graph.freed.wait(3 * TIMEOUT) else None

    def fail() -> None:
        if calls.rank:
            raise KeyError("no layer")

    with at_nth(PASSES, functional, "silu", fail):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))
    calls.make(lambda: fd.prefill(calls.model, PROMPT).rows)
    end = time.monotonic() + PATIENCE
    while threads() and time.monotonic() < end:
        time.sleep(0.02)
    calls.note(threads())


def call_in_threads(calls: Calls) -> None:
    """On rank 0 the next call begins in another thread once tokens end, before the call has."""
    later = threading.Thread(target=calls.make, args=[lambda: generate(calls)])

    def begin_later() -> None:
        later.start()
        time.sleep(0.5)

    streamer = None if calls.rank else mock.Mock(BaseStreamer, end=begin_later)
    calls.make(lambda: generate(calls, streamer=streamer))
    if calls.rank:
        later.start()
    later.join()


@scenario()
def raises_before_the_call(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    calls.make(lambda: generate(calls, max_new_tokens=TOKENS if calls.rank == 0 else -1))
    calls.make(lambda: generate(calls))


@scenario()
def makes_another_call(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    calls.make(lambda: generate(calls) if calls.rank else fd.prefill(calls.model, PROMPT).rows)
    calls.make(lambda: generate(calls))


@scenario(victim=1)
def is_killed(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    with at_nth(PASSES, functional, "silu", send_itself(signal.SIGKILL) if calls.rank else os.getpid):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))


@scenario(victim=1)
def is_killed_before_a_gather(calls: Calls) -> None:
    """Between calls that gather the model's parameters."""
    calls.model = fully_shard(LlamaForCausalLM(copy.deepcopy(calls.model.config)).eval())
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    generate(calls)
    if calls.rank:
        send_itself(signal.SIGKILL)()
    for _ in range(2):
        calls.make(lambda: generate(calls))


@scenario()
def raises_in_a_gather(calls: Calls) -> None:
    """Rank 1 raises where the first parameters are sent, and the other has begun to wait for them."""
    calls.model = fully_shard(LlamaForCausalLM(copy.deepcopy(calls.model.config)).eval())
    fd.enable(calls.model, peer_timeout=TIMEOUT)

    def fail() -> None:
        if calls.rank:
            raise KeyError("no part")

    with at_nth(1, parameters, "all_gather_vectors", fail):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))


@scenario(victim=0)
def first_is_killed(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    with at_nth(6, Decisions, "step", os.getpid if calls.rank else send_itself(signal.SIGKILL)):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))


@scenario(victim=1)
def is_stopped(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    with at_nth(6, Decisions, "step", send_itself(signal.SIGSTOP) if calls.rank else os.getpid):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))


@scenario(victim=0)
def first_is_stopped(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    with at_nth(6, Decisions, "step", os.getpid if calls.rank else send_itself(signal.SIGSTOP)):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[Ended]]]:
    return made_once(tmp_path_factory, "failures", lambda: _run_all(tmp_path_factory))


def _run_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[Ended]]]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, pad_token_id=0)).save_pretrained(folder)
    return run_all("test_watchdog", folder, tmp_path_factory.mktemp("seen"))


def failed(ended: Ended, rank: int, cause: str) -> None:
    """Assert that a call ended by the error of a peer."""
    assert ended.error.startswith("PeerFailedError: ")
    assert ended.rank == rank
    assert cause in ended.error
    assert ended.error.endswith("end them and start them again")
    assert ended.seconds < PATIENCE


def refused(ended: Ended, rank: int, cause: str) -> None:
    """Assert that a later call was not begun."""
    failed(ended, rank, cause)
    assert "(in an earlier call)" in ended.error


GENERATED = ("", len(PROMPTS) * (PROMPTS.shape[1] + TOKENS))


@pytest.mark.parametrize("rank", [0, 1])
def test_calls_go_on_after_errors_that_all_raise_and_wait_for_a_slow_process(seen, rank):
    first, in_thread, differing, invalid, slow, *_ = seen["raises_in_a_pass"][rank]
    assert differing.error.startswith("ValueError: generate was called differently")
    assert invalid.error.startswith("ValueError: ")
    assert "max_new_tokens" in invalid.error
    assert [(one.error, one.value) for one in (first, in_thread, slow)] == [GENERATED] * 3
    assert slow.seconds > TIMEOUT


def test_an_error_within_a_pass_ends_the_call_of_the_others(seen):
    (*_, raised, again, _, _), (*_, own, next_call, prefill, _) = (seen["raises_in_a_pass"][rank] for rank in (0, 1))
    assert own.error == "KeyError: 'no layer'"
    failed(raised, 1, "KeyError: 'no layer'")
    refused(again, 1, "KeyError: 'no layer'")
    failed(next_call, 1, "KeyError: 'no layer'")  # waits for the other's heartbeat
    refused(prefill, 1, "KeyError: 'no layer'")
    assert seen["raises_in_a_pass"][0][-1].value == seen["raises_in_a_pass"][1][-1].value == []


def test_an_error_within_a_gather_ends_the_call_of_the_others(seen):
    (waited, again), (own, next_call) = (seen["raises_in_a_gather"][rank] for rank in (0, 1))
    assert own.error == "KeyError: 'no part'"
    failed(waited, 1, "KeyError: 'no part'")
    refused(again, 1, "KeyError: 'no part'")
    failed(next_call, 1, "KeyError: 'no part'")


def test_an_error_of_one_process_before_they_compare_their_calls(seen):
    (waited, again), (own, next_call) = (seen["raises_before_the_call"][rank] for rank in (0, 1))
    assert own.error.startswith("ValueError: ")
    failed(waited, 1, "ValueError: `max_new_tokens`")
    refused(again, 1, "ValueError: `max_new_tokens`")
    failed(next_call, 1, "ValueError: `max_new_tokens`")


def test_processes_that_call_different_functions(seen):
    for first, again in seen["makes_another_call"].values():
        assert first.error.startswith("PeerFailedError: ")
        assert "a call of generate where another process reached a call of prefill" in first.error or (
            "a call of prefill where another process reached a call of generate" in first.error
        )
        assert first.seconds < PATIENCE
        refused(again, first.rank, "where another process reached")


@pytest.mark.parametrize(
    ("name", "victim", "cause"),
    [
        ("is_killed", 1, "its connections were closed, and it is silent for more than 2 s (last known to be in "),
        (
            "is_killed_before_a_gather",
            1,
            "its connections were closed, and it is silent for more than 2 s (last known to ",
        ),
        ("first_is_killed", 0, "the store of the process group, which this rank or torchrun holds, is gone ("),
        ("is_stopped", 1, f"it is silent for more than {TIMEOUT} s (last known to be in "),
        ("first_is_stopped", 0, "the store of the process group, which this rank or torchrun holds, has not answered"),
    ],
)
def test_a_process_that_is_gone_ends_the_call_of_the_other(seen, name, victim, cause):
    ((waited, again),) = seen[name].values()
    failed(waited, victim, cause)
    refused(again, victim, cause)


def beat(count: int, *events: tuple[Any, ...], in_call: bool = True) -> Heartbeat:
    """A heartbeat whose last event has this number."""
    return Heartbeat(1, in_call, count + 1, tuple(Event(*one) for one in events))


PASS, COMPARISON = ("a pass", True), ("a comparison of 2",)


def end(error: str | None = None, *, communicates: bool = False) -> tuple[Any, ...]:
    return "the end of the call", communicates, error


def test_heartbeats_survive_the_store():
    for failed in (None, (1, "no")):
        sent = beat(8, PASS, end("KeyError: 'x'"))._replace(failed=failed)
        assert Heartbeat.of_text(json.dumps(sent).encode()) == sent


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        pytest.param(beat(8, PASS), beat(8, PASS), None, id="same"),
        pytest.param(beat(8, PASS), beat(9, PASS, COMPARISON), None, id="slower"),
        pytest.param(beat(6, PASS), beat(8, PASS, end("E")), None, id="error-not-reached"),
        pytest.param(beat(9, PASS, COMPARISON), beat(9, PASS, end("E")), (1, "E"), id="went-on"),
        pytest.param(beat(9, PASS, end("E")), beat(9, PASS, COMPARISON), (0, "E"), id="the-other-went-on"),
        pytest.param(beat(9, PASS, end("E")), beat(9, PASS, end("F")), None, id="different-errors-between-passes"),
        pytest.param(beat(9, PASS, end()), beat(9, PASS, end("E")), None, id="error-after-the-last-pass"),
        pytest.param(
            beat(9, PASS, end("E", communicates=True)), beat(9, end("E", communicates=True)), None, id="same-in-a-pass"
        ),
        pytest.param(
            beat(9, PASS, end("F", communicates=True)),
            beat(9, end("E", communicates=True)),
            (1, "E"),
            id="different-errors-in-a-pass",
        ),
        pytest.param(beat(90, PASS), beat(8, end("E")), None, id="forgotten"),
        pytest.param(
            beat(9, PASS, COMPARISON),
            beat(10, PASS, PASS, PASS),
            (1, "it reached a pass where another process reached a comparison of 2"),
            id="other-events",
        ),
        pytest.param(
            beat(8, PASS, PASS),
            beat(10, end(), PASS, PASS),
            (1, "it reached the end of the call where another process reached a pass"),
            id="ended-the-call",
        ),
    ],
)
def test_processes_whose_events_differ_have_failed(mine, theirs, found):
    assert difference(0, mine, 1, theirs) == found


class Watched:
    """A watchdog without threads, in a call, at times that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2):
        self.seconds = 0.0
        monkeypatch.setattr(watchdog, "monotonic", lambda: self.seconds)
        self.dog = watchdog.Watchdog([mock.Mock(rank=lambda: 0, size=lambda: size)], mock.Mock())
        self.dog._in_call, self.dog._timeout, self.dog._entered = True, 4.0, 0.0

    def until_failed(self, first: float, seconds: float) -> float:
        """When the watchdog has given up a group at which it looks from then on; `inf` if not within so long."""
        for look in range(int(seconds / 0.2)):
            self.seconds = first + 0.2 * look
            for rank in self.dog._peers:
                self.dog._heard[rank] = self.dog._now()
            with self.dog._news:
                self.dog._look()
            if self.dog.failed is not None:
                return self.seconds - first
        return float("inf")


@pytest.mark.parametrize(
    ("communicates", "seconds"), [pytest.param(True, 1.0, id="in-a-pass"), pytest.param(False, 4.0, id="between")]
)
def test_a_process_gets_time_to_raise_an_error_that_a_peer_raised(monkeypatch, communicates, seconds):
    """Within a pass it waits for that peer; between collectives it may be slow."""
    watched = Watched(monkeypatch)
    watched.dog._advance("a pass", communicates=communicates)
    watched.dog._peers = {1: beat(2, ("a pass", communicates), end("E"), in_call=False)}
    assert watched.until_failed(0.0, 0.6) == float("inf")
    # Stopped for a while, it has as much time left as before.
    assert seconds - 1.0 < watched.until_failed(1000.0, 9.0) <= seconds
    assert watched.dog.failed == (1, "E")


def test_a_call_tells_for_whom_it_waits(monkeypatch, caplog):
    """After an error too, whose peers must have been in that call."""
    watched = Watched(monkeypatch, 3)
    watched.dog._in_call = False
    watched.dog._advance("the end of the call", error="E")
    watched.dog._peers = {1: beat(0, ("no call",)), 2: beat(0, ("no call",), in_call=False)}
    assert watched.until_failed(0.0, 9.0) == float("inf")
    (told,) = caplog.messages
    assert "has waited 4 s for rank 2, which does not take part" in told
    assert not watched.dog._is_settled()
    watched.dog._peers = dict.fromkeys((2, 1), beat(1, end("E"), in_call=False))
    assert watched.dog._is_settled()


def test_events_are_read_while_a_call_goes_on(monkeypatch):
    """Another thread sends them; its error would end the heartbeat, and the process pass for a failed one."""
    dog = Watched(monkeypatch).dog
    for _ in range(100):
        told = iter(dog._heartbeat().events)
        next(told)
        dog._advance("a pass")
        assert len(list(told)) <= 64
    assert (len(dog._heartbeat().events), dog._heartbeat().total) == (64, 101)
