"""Decode steps over divided contexts: one collective a layer, eager and captured alike."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.kernels.failures import KernelFailedError
from hf_fastdecode.parallel import shards

from .processes import Models, add_scenario, scenario
from .scenarios import capturing, same_value, sees, sights, values
from .sequence_calls import GREEDY, SAMPLING, Call, levels, text

KERNELS = {"backend": "triton"}
GRAPH = KERNELS | {"mode": "graph"}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}  # for interpreted kernels
ONE_LAYER = SMALL | {"sliding_window": 300, "layer_types": ["sliding_attention"]}
FEW = GREEDY | {"max_new_tokens": 4}
SAMPLES = SAMPLING | {"num_return_sequences": 2, "max_new_tokens": 4}
BEAMS = {"num_beams": 2, "do_sample": False}

STEPS: dict[str, Call] = {
    "eager": Call(text(), GREEDY),
    "samples": Call(levels(), SAMPLES),
    "by-kernels": Call(text(), FEW, config=SMALL, options=KERNELS),
    "beams-by-kernels": Call(text(20), BEAMS | {"max_new_tokens": 6}, config=SMALL, options=KERNELS),
    "sinks-by-kernels": Call(text(20), FEW, model="gpt_oss", config=ONE_LAYER, options=KERNELS),
    "captured": Call(levels(), SAMPLES, config=SMALL, options=GRAPH),
    "captured-soft-cap": Call(text(20), FEW, model="gemma2", config=ONE_LAYER, options=GRAPH),
    "captured-slim": Call(text(20), SAMPLES, model="slim", options=GRAPH),
    "captured-one-token": Call(text(1), FEW, config=SMALL, options=GRAPH),
}


def counted(name: str, models: Models) -> Any:
    """Whether tokens are stock's, the mode, and collectives by passes that attend to nodes in each layer."""
    call = STEPS[name]
    model = call.make_model()
    torch.manual_seed(0)
    expected = model.generate(**call.prompts, **call.arguments)
    with (
        capturing(),
        mock.patch.object(shards, "all_gather_vectors", side_effect=shards.all_gather_vectors) as gathers,
        fd.enabled(model, sequence_parallel="auto", **call.options),
    ):
        torch.manual_seed(models.rank)
        found = model.generate(**call.prompts, **call.arguments)
        passes = gathers.call_count / model.config.num_hidden_layers
        return torch.equal(found, expected), fd.explain(model).last_call.mode, passes


for name in STEPS:
    add_scenario(f"steps {name}", partial(counted, name))


@sees([[True, "graph", True], [True, "graph", False], [True, "graph", True]], kernels=True)
def captures_between_others(models: Models) -> Any:
    """Captured steps serve later calls that divide contexts between the same processes, and no other ones."""
    call = Call(text(9), SAMPLES, config=SMALL)
    model, found = call.make_model(), []
    torch.manual_seed(0)
    expected = model.generate(**call.prompts, **call.arguments)
    with capturing():
        for way in ("auto", "auto", False):
            fd.enable(model, sequence_parallel=way, **GRAPH)
            torch.manual_seed(models.rank if way else 0)
            same = torch.equal(model.generate(**call.prompts, **call.arguments), expected)
            report = fd.explain(model).last_call
            found.append((same, report.mode, report.captures > 0))
    return found


@scenario
def collectives_of_a_step(models: Models) -> Any:
    """Reported and counted collectives of a step, with nodes, and without where a cache held the whole prompt."""
    found = {}
    for name in ("llama-gqa", "slim"):
        model = Call({}, {}, model=name).make_model()
        with fd.enabled(model, sequence_parallel="auto"):
            for tokens in (1, 9):
                given, counts = text(tokens), []
                for steps in (2, 5):
                    cache = fd.prefill(model, given["input_ids"])
                    with mock.patch.object(
                        shards, "all_gather_vectors", side_effect=shards.all_gather_vectors
                    ) as gathers:
                        arguments = GREEDY | {"max_new_tokens": steps, "eos_token_id": None, CACHE: cache}
                        model.generate(**given, **arguments)
                    counts.append(gathers.call_count)
                report = fd.explain(model).last_call
                found[f"{name} {tokens}"] = report.parallel.collectives, (counts[1] - counts[0]) / 3, report.forest
    return found


@scenario
def merge_without_its_kernel_on_one_rank(models: Models) -> Any:
    """PyTorch's operators merge there, of as many collectives, so that no rank waits."""
    ranks = pytest.importorskip("hf_fastdecode.kernels.forest_decode.merge")
    call, fails = STEPS["by-kernels"], mock.Mock(side_effect=KernelFailedError("no compiler"))
    model, kernel = call.make_model(), fails if models.rank else ranks.merge_ranks
    expected = model.generate(**call.prompts, **call.arguments)
    with (
        mock.patch.object(ranks, "merge_ranks", kernel),
        mock.patch.object(shards, "all_gather_vectors", side_effect=shards.all_gather_vectors) as gathers,
        fd.enabled(model, sequence_parallel="auto", **call.options),
    ):
        same = torch.equal(model.generate(**call.prompts, **call.arguments), expected)
    return same, gathers.call_count, models.rank == 0 or fails.call_count


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_collective_a_layer(seen, name):
    call = STEPS[name]
    if call.options:
        pytest.importorskip("triton")
    same, mode, passes = same_value(seen, f"steps {name}")
    assert same
    assert mode == call.options.get("mode", "eager")
    steps = call.arguments["max_new_tokens"] - 1
    prefill = len(call.prompts["input_ids"]) > 1  # whose second pass gathers the system prompt
    assert passes == steps + prefill


def test_where_the_merge_kernel_fails_on_one_rank_pytorch_merges_there(seen):
    pytest.importorskip("triton")
    first, second = values(seen, "merge_without_its_kernel_on_one_rank")
    assert first == [True, 3, True]
    assert second == [True, 3, 3]


def test_reports_count_the_collectives_of_a_step(seen):
    found = same_value(seen, "collectives_of_a_step")
    assert list(found) == ["llama-gqa 1", "llama-gqa 9", "slim 1", "slim 9"]
    for name, (reported, counted, forest) in found.items():
        assert reported == counted == 2, name
        assert ("node" in forest) == name.endswith("9")


test_what_processes_see = sights(__name__)
