"""Two processes that compute one model, of which one fails: neither waits for the other."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.streamers import BaseStreamer

import hf_fastdecode as fd
from hf_fastdecode.generation.decoding.decisions import Decisions
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.parallel import watchdog

from ..workers import made_once
from .failing import Calls, Ended, at_nth, run_all, scenario, send_itself
from .scenarios import PROMPT, PROMPTS

TIMEOUT = 4
TOKENS = 24
PASSES = 2 * 6
"""Uses of the activation, of which each of two layers has one a pass, until the failure."""


def generate(calls: Calls, **arguments: Any) -> int:
    ids = arguments.pop("ids", PROMPTS)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": 97}
    return int(calls.model.generate(ids, **given | arguments).numel())


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("hf_fastdecode")]


@scenario()
def raises_in_a_pass(calls: Calls) -> None:
    """Errors that both raise first, a slow pass, then an error of rank 1."""
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    calls.make(lambda: generate(calls, ids=(PROMPTS + calls.rank).contiguous()))
    calls.make(lambda: generate(calls, max_new_tokens=-1))
    with at_nth(PASSES, functional, "silu", lambda: time.sleep(calls.rank * (TIMEOUT + 1))):
        calls.make(lambda: generate(calls))

    def fail() -> None:
        if calls.rank:
            raise KeyError("no layer")

    with at_nth(PASSES, functional, "silu", fail):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))
    calls.make(lambda: fd.prefill(calls.model, PROMPT).rows)
    time.sleep(1.5)
    calls.note(threads())


class Graph:
    """Stands for a captured graph to which the frames of a call refer."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def clear(self) -> None:
        self.freed.set()


@scenario()
def raises_beside_graphs(calls: Calls) -> None:
    """Communication closes once no graph holds it, as NCCL's does, and the call of rank 0 waits for that."""
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    calls.make(lambda: generate(calls))
    graph, close = Graph(), watchdog.abort
    state_of(calls.model).structure_of(calls.model).ranks.watchdog.frees(graph)
    watchdog.abort = lambda group: close(group) if calls.rank == 0 and graph.freed.wait(3 * TIMEOUT) else None

    def fail() -> None:
        if calls.rank:
            raise KeyError("no layer")

    with at_nth(PASSES, functional, "silu", fail):
        calls.make(lambda: generate(calls))


@scenario()
def calls_in_threads(calls: Calls) -> None:
    """On rank 0 the next call begins in another thread once tokens end, before the call has."""
    fd.enable(calls.model, peer_timeout=TIMEOUT)
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


@scenario(victim=0)
def first_is_killed(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    with at_nth(6, Decisions, "drawn", os.getpid if calls.rank else send_itself(signal.SIGKILL)):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))


@scenario(victim=1)
def is_stopped(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    with at_nth(6, Decisions, "drawn", send_itself(signal.SIGSTOP) if calls.rank else os.getpid):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))


@scenario(victim=0)
def first_is_stopped(calls: Calls) -> None:
    fd.enable(calls.model, peer_timeout=TIMEOUT)
    with at_nth(6, Decisions, "drawn", os.getpid if calls.rank else send_itself(signal.SIGSTOP)):
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
    return run_all("test_failure", folder, tmp_path_factory.mktemp("seen"))


def failed(ended: Ended, rank: int, cause: str, seconds: float) -> None:
    """Assert that a call ended in time by the error of a peer."""
    assert ended.error.startswith("PeerFailedError: ")
    assert ended.rank == rank
    assert cause in ended.error
    assert ended.error.endswith("end them and start them again")
    assert ended.seconds < seconds


def refused(ended: Ended, rank: int, cause: str) -> None:
    """Assert that a later call was not begun."""
    failed(ended, rank, cause, 1.0)
    assert "(in an earlier call)" in ended.error


def test_calls_go_on_after_errors_that_all_raise(seen):
    for rank in (0, 1):
        differing, invalid, _, *_ = seen["raises_in_a_pass"][rank]
        assert differing.error.startswith("ValueError: generate was called differently")
        assert invalid.error.startswith("ValueError: ")
        assert "max_new_tokens" in invalid.error


def test_graphs_are_freed_while_their_call_waits(seen):
    _, ended = seen["raises_beside_graphs"][0]
    failed(ended, 1, "KeyError: 'no layer'", 2 * TIMEOUT)


def test_a_slow_process_is_not_a_failed_one(seen):
    for rank in (0, 1):
        slow = seen["raises_in_a_pass"][rank][2]
        assert slow.error == ""
        assert slow.value == len(PROMPTS) * (PROMPTS.shape[1] + TOKENS)
        assert slow.seconds > TIMEOUT


def test_an_error_within_a_pass_ends_the_call_of_the_others(seen):
    (*_, raised, again, _, _), (*_, own, next_call, prefill, _) = (seen["raises_in_a_pass"][rank] for rank in (0, 1))
    assert own.error == "KeyError: 'no layer'"
    failed(raised, 1, "KeyError: 'no layer'", TIMEOUT)
    refused(again, 1, "KeyError: 'no layer'")
    failed(next_call, 1, "KeyError: 'no layer'", TIMEOUT)  # waits for the other's judgement
    refused(prefill, 1, "KeyError: 'no layer'")
    assert seen["raises_in_a_pass"][0][-1].value == seen["raises_in_a_pass"][1][-1].value == []


def test_calls_of_other_threads_wait(seen):
    for rank in (0, 1):
        assert [(one.error, one.value) for one in seen["calls_in_threads"][rank]] == [
            ("", len(PROMPTS) * (PROMPTS.shape[1] + TOKENS))
        ] * 2


def test_an_error_of_one_process_before_they_compare_their_calls(seen):
    (waited, again), (own, next_call) = (seen["raises_before_the_call"][rank] for rank in (0, 1))
    assert own.error.startswith("ValueError: ")
    failed(waited, 1, "ValueError: `max_new_tokens`", TIMEOUT)
    refused(again, 1, "ValueError: `max_new_tokens`")
    failed(next_call, 1, "ValueError: `max_new_tokens`", TIMEOUT)


def test_processes_that_call_different_functions(seen):
    for first, again in seen["makes_another_call"].values():
        assert first.error.startswith("PeerFailedError: ")
        assert "a call of generate where another process reached a call of prefill" in first.error or (
            "a call of prefill where another process reached a call of generate" in first.error
        )
        assert first.seconds < TIMEOUT
        refused(again, first.rank, "where another process reached")


@pytest.mark.parametrize(
    ("name", "victim", "cause"),
    [
        ("is_killed", 1, "its connections were closed, and it is silent for more than 2 s (last seen in "),
        ("first_is_killed", 0, "the store of the process group, which this rank or torchrun holds, is gone ("),
        ("is_stopped", 1, f"it is silent for more than {TIMEOUT} s (last seen in "),
        ("first_is_stopped", 0, "the store of the process group, which this rank or torchrun holds, has not answered"),
    ],
)
def test_a_process_that_is_gone_ends_the_call_of_the_other(seen, name, victim, cause):
    ((waited, again),) = seen[name].values()
    failed(waited, victim, cause, TIMEOUT + 3)
    refused(again, victim, cause)
