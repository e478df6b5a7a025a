"""Captured steps of a model that two GPUs compute together."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.steps import graph_capture

from .loops import clear_model, loops_on_gpu, require_captured_loops
from .processes import Models, Seen, run_scenarios, scenario
from .scenarios import same_value

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 16, "max_new_tokens": 64}


def prompt(models: Models, length: int = 300) -> torch.Tensor:
    device = models.split["llama"].device
    return torch.arange(length, device=device).remainder(61)[None] + 30


@scenario
def greedy(models: Models) -> Any:
    """A model whose every step has a clear winner, for its head is its embedding: tokens of all ways are the same."""
    found = {}
    ids = prompt(models).repeat(8, 1)
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 32}
    model = models.split["llama"]
    found["stock"] = model.generate(ids, **arguments).tolist()
    for mode in ("eager", "graph"):
        with fd.enabled(model, mode=mode):
            found[mode] = model.generate(ids, **arguments).tolist()
            again = model.generate(ids, **arguments).tolist()
            call = fd.explain(model).last_call
            found[f"{mode} report"] = (again == found[mode], call.path, call.mode, call.mode_reason, call.captures)
    return found


@scenario
def other_seeds_on_gpus(models: Models) -> Any:
    """Compaction, and captured steps of fewer rows."""
    ids = prompt(models)
    found = []
    for sampler in ("hf", "fast"):
        with fd.enabled(models.split["llama"], mode="graph", sampler=sampler) as model:
            torch.manual_seed(models.rank)
            arguments = SAMPLING | {"num_return_sequences": 64, "max_new_tokens": 400, "temperature": 100.0}
            arguments |= {"eos_token_id": list(range(0, 512, 16))}
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
            call = fd.explain(model).last_call
            found.append((tokens.tolist(), call.mode, call.sampler, call.compactions > 0))
    return found


@scenario
def fused(models: Models) -> Any:
    ids = prompt(models)
    with fd.enabled(models.split["llama"], fuse_projections=True) as model:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **SAMPLING).tolist()


@scenario
def failed_capture(models: Models) -> Any:
    """One rank cannot capture: all run eagerly."""
    from hf_fastdecode.generation.steps import captures

    original = captures.CapturedStep.__init__

    def fail(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        if models.rank:
            raise RuntimeError("cannot")

    ids = prompt(models).repeat(32, 1)
    captures.CapturedStep.__init__ = fail
    try:
        with fd.enabled(models.split["llama"]) as model:
            arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 100}
            tokens = model.generate(ids, **arguments).tolist()
            call = fd.explain(model).last_call
            return tokens, call.mode, call.mode_reason
    finally:
        captures.CapturedStep.__init__ = original


@scenario
def captured_loops(models: Models) -> Any:
    """Loops of transformers' own and of the user's replay captured passes, which communicate."""
    return loops_on_gpu(models.split["llama"], models.alone["llama"])


@scenario
def failed_capture_of_passes(models: Models) -> Any:
    """One rank cannot record a pass: all run eagerly, then, and once it alone knows so."""
    model, found = models.split["llama"], []
    given = {"input_ids": prompt(models).repeat(2, 1), "num_beams": 4, "do_sample": False, "max_new_tokens": 20}
    with fd.enabled(model, mode="eager"):
        eager = model.generate(**given)
    with fd.enabled(model):
        captures = vars(model)["_hf_fastdecode"].captures
        captures.steps_asked = 10_000
        record = mock.Mock(side_effect=RuntimeError("cannot")) if models.rank else graph_capture.reserve
        with mock.patch.object(graph_capture, "reserve", record):
            for _ in range(2):
                same, call = torch.equal(model.generate(**given), eager), fd.explain(model).last_call
                found.append((same, call.path, call.mode, call.mode_reason))
                if models.rank == 0:
                    captures.retry()
        captures.retry()
        same, call = model.generate(**given).shape == eager.shape, fd.explain(model).last_call
        found.append((same, call.path, call.mode, call.captures))
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, ...]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    folder = tmp_path_factory.mktemp("llama")
    clear_model().save_pretrained(folder)
    return run_scenarios(
        ["test_tensor_parallel_on_gpu"], {"llama": folder}, tmp_path_factory.mktemp("seen"), backend="nccl"
    )


@pytest.mark.gpu
def test_captured_steps_give_the_tokens_of_eager_ones(seen):
    found = same_value(seen, "greedy")
    assert found["stock"] == found["eager"] == found["graph"]
    assert found["eager report"][:3] == [True, "shared", "eager"]
    assert found["graph report"] == [True, "shared", "graph", "mode='graph' was requested", 0]


@pytest.mark.gpu
def test_rank_0_draws_for_all(seen):
    for _, mode, _, compacted in same_value(seen, "other_seeds_on_gpus"):
        assert mode == "graph"
        assert compacted
    assert [sampler for _, _, sampler, _ in same_value(seen, "other_seeds_on_gpus")] == ["hf", "fast"]


@pytest.mark.gpu
def test_projections_that_communicate_are_not_fused(seen):
    first, second = seen["fused"]
    assert first == second
    assert first.error == (
        "ValueError: fuse_projections=True cannot run: LlamaForCausalLM has no projections of one input side by side "
        "that are plain linear layers; use fuse_projections='auto'"
    )


@pytest.mark.gpu
def test_where_one_rank_cannot_capture_all_run_eagerly(seen):
    first, second = seen["failed_capture"]
    assert (first.error, second.error) == ("", "")
    assert first.value[0] == second.value[0]
    assert first.value[1:] == [
        "eager",
        "rank 1, with which this process computes the model, failed: RuntimeError: cannot",
    ]
    assert second.value[1:] == ["eager", "cannot"]


@pytest.mark.gpu
def test_other_loops_replay_captured_passes(seen):
    require_captured_loops(same_value(seen, "captured_loops"))


@pytest.mark.gpu
def test_where_one_rank_cannot_capture_passes_all_run_eagerly(seen):
    first, second = seen["failed_capture_of_passes"]
    assert (first.error, second.error) == ("", ""), first.trace + second.trace
    failed = "rank 1, with which this process computes the model, failed: RuntimeError: cannot"
    for one, reasons in ((first, [failed, "on rank 1, cannot"]), (second, ["cannot", "cannot"])):
        eagerly = [[True, "shared", "eager", reason] for reason in reasons]
        assert one.value == [*eagerly, [True, "shared", "graph", 1]]
