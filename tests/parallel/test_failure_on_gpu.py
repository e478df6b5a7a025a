"""Two GPUs that compute one model by captured steps, and one of whose processes fails between replays."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_fastdecode as fd
from hf_fastdecode.generation.decoding.stopping import Decisions

from .failing import Calls, Ended, at_nth, run_all, scenario, send_itself

TIMEOUT = 5
STEPS = 100
"""Steps until the failure."""


def generate(calls: Calls) -> Any:
    ids = torch.arange(300, device=calls.model.device).remainder(61)[None] + 30
    arguments = {"do_sample": True, "top_k": 0, "num_return_sequences": 16, "max_new_tokens": 2 * STEPS}
    tokens = calls.model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=511, **arguments)
    return list(tokens.shape), fd.explain(calls.model).last_call.mode


def closing() -> bool:
    """Whether the thread that closes communication is still at it, as it is while a graph holds the communicator."""
    end = time.monotonic() + 20
    while any(one.name == "hf_fastdecode-watchdog" for one in threading.enumerate()) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.1)
    return time.monotonic() >= end


def fail_and_call_again(calls: Calls, action: Any) -> None:
    fd.enable(calls.model, mode="graph", peer_timeout=TIMEOUT)
    calls.make(lambda: generate(calls))
    before = torch.cuda.memory_allocated()
    with at_nth(STEPS, Decisions, "step", action if calls.rank else os.getpid):
        calls.make(lambda: generate(calls))
    calls.make(lambda: generate(calls))
    calls.note([closing(), torch.cuda.memory_allocated() <= before])


def fail() -> None:
    raise KeyError("no tokens")


@scenario()
def raises(calls: Calls) -> None:
    fail_and_call_again(calls, fail)


@scenario(victim=1)
def is_killed(calls: Calls) -> None:
    fail_and_call_again(calls, send_itself(signal.SIGKILL))


@scenario(victim=1)
def is_stopped(calls: Calls) -> None:
    fail_and_call_again(calls, send_itself(signal.SIGSTOP))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[Ended]]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, pad_token_id=0))
    folder = tmp_path_factory.mktemp("llama")
    model.to(torch.bfloat16).save_pretrained(folder)
    return run_all("test_failure_on_gpu", folder, tmp_path_factory.mktemp("seen"), backend="nccl")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "cause", "seconds"),
    [
        ("raises", "KeyError: 'no tokens'", TIMEOUT),
        ("is_killed", f"it is silent for more than {TIMEOUT} s (last known to be in ", TIMEOUT + 3),
        ("is_stopped", f"it is silent for more than {TIMEOUT} s (last known to be in ", TIMEOUT + 3),
    ],
)
def test_a_failure_between_replays_ends_the_call_of_the_other(seen, name, cause, seconds):
    first, waited, again, after = seen[name][0]
    assert first.error == ""
    assert first.value == [[16, 300 + 2 * STEPS], "graph"]
    for ended in (waited, again):
        assert ended.error.startswith("PeerFailedError: ")
        assert ended.rank == 1
        assert cause in ended.error
    assert waited.seconds < seconds + first.seconds
    assert again.seconds < 1.0
    assert after.value == [False, True]


@pytest.mark.gpu
def test_the_process_that_failed_is_refused_too(seen):
    _, own, next_call, after = seen["raises"][1]
    assert own.error == "KeyError: 'no tokens'"
    assert next_call.rank == 1
    assert "(in an earlier call" in next_call.error
    assert after.value == [False, True]
