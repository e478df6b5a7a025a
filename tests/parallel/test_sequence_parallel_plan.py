"""Contexts and weights divided between the same processes: heads whole, other layers split."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.parallel import shards

from ..tiny_models import ARCHITECTURES, tiny_model
from .processes import Models, add_scenario, scenario
from .scenarios import by_pytorch, capturing, sees, sights, split_model
from .sequence_calls import GREEDY, SAMPLING, levels, text

EVEN = {"vocab_size": 98}  # which transformers 5.17 splits in two
SAMPLES = SAMPLING | {"num_return_sequences": 2}
WIDE = {"sliding_window": 300}
SPLIT = {"llama-mqa": {}, "gemma2": WIDE, "mimo_v2_flash": WIDE}
"""Models to be split, with overrides of their configs; two have fewer KV heads than there are processes."""


@scenario
@by_pytorch
def helix(models: Models) -> Any:
    found = {}
    for name, overrides in SPLIT.items():
        alone = tiny_model(name, **EVEN, **overrides)
        model = split_model(alone)
        parts = {one.rpartition(".")[0] for one, tensor in model.named_parameters() if isinstance(tensor, DTensor)}
        torch.manual_seed(0)
        expected = alone.generate(**levels(), **SAMPLES)
        found[name] = [sorted({part.rpartition(".")[2] for part in parts})]
        for fewest in (2, 10**9):  # a prefill pass of which processes computed other tokens would mix them
            with mock.patch.object(shards, "FEWEST_TOKENS", fewest), fd.enabled(model, sequence_parallel="auto"):
                torch.manual_seed(models.rank)
                tokens = model.generate(**levels(), **SAMPLES)
                kept = fd.prefill(model, text()["input_ids"])
                again = model.generate(**text(), **GREEDY, **{CACHE: kept})
            same = torch.equal(tokens, expected) and torch.equal(again, alone.generate(**text(), **GREEDY))
            found[name].append((same, kept.stored_node_tokens))
    return found


@sees([True, "graph", "shared"], kernels=True)
@by_pytorch
def captured_helix(models: Models) -> Any:
    alone = tiny_model("llama-mqa", num_hidden_layers=1, num_attention_heads=2, **EVEN)
    model, few = split_model(alone), SAMPLES | {"max_new_tokens": 4}
    torch.manual_seed(0)
    expected = alone.generate(**text(20), **few)
    with capturing(), fd.enabled(model, sequence_parallel="auto", mode="graph", backend="triton"):
        torch.manual_seed(models.rank)
        same, call = torch.equal(model.generate(**text(20), **few), expected), fd.explain(model).last_call
        return same, call.mode, call.path


def mesh_of_two_dimensions(models: Models) -> Any:
    """Pairs of processes split the heads and weights of a model, and pairs across them divide contexts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    alone, model, found = tiny_model("llama-gqa"), tiny_model("llama-gqa"), []
    apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))
    torch.manual_seed(0)
    expected = alone.generate(**levels(), **SAMPLES)
    for fewest in (2, 10**9):
        with mock.patch.object(shards, "FEWEST_TOKENS", fewest), fd.enabled(model, sequence_parallel=mesh["sp"]):
            torch.manual_seed(models.rank)
            same = torch.equal(model.generate(**levels(), **SAMPLES), expected)
            kept = fd.prefill(model, text()["input_ids"])
            keys = kept.attention_layers[0].storage.segments[0].keys
            call = fd.explain(model).last_call
            found.append((same, call.ranks, call.parallel.ranks, list(keys.shape[:2])))
    return found


if hasattr(PreTrainedModel, "_expand_parallel_plan"):  # not in transformers 5.17
    add_scenario("mesh_of_two_dimensions", by_pytorch(mesh_of_two_dimensions), 4)


def test_split_models_divide_their_contexts(seen):
    for rank in (0, 1):
        assert seen["helix"][rank].error == "", seen["helix"][rank].trace
        for name, (parts, *found) in seen["helix"][rank].value.items():
            assert found == [[True, 44 - rank]] * 2, name
            assert not {"q_proj", "k_proj", "v_proj"} & set(parts)
            assert {"down_proj", "o_proj"} <= set(parts)


@pytest.mark.exhaustive
def test_meshes_of_two_dimensions(seen_by_four):
    if "mesh_of_two_dimensions" not in seen_by_four:
        pytest.skip("needs a newer transformers, to split a model over a part of the processes")
    for rank, one in enumerate(seen_by_four["mesh_of_two_dimensions"]):
        assert one.error == "", one.trace
        assert one.value == [[True, 4, 2, [1, 44 - rank // 2]]] * 2  # one of two heads, every other token


def test_plans_are_made_of_configs():
    with pytest.raises(TypeError, match=r"takes a model's config, got str; give it AutoConfig"):
        fd.sequence_parallel_plan("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("name", ["llama-gqa", "olmo3", "gemma4_text", "laguna", "gpt_oss"])
def test_plans_leave_heads_whole(name):
    """Every entry of the model's plan has one, so that one that is merged with it leaves no part of it."""
    kind, sizes = ARCHITECTURES[name]
    config = AutoConfig.for_model(kind, vocab_size=97, pad_token_id=0, **sizes)
    plan, usual = fd.sequence_parallel_plan(config), tiny_model(name).tp_plan
    attention = {name: style for name, style in plan.items() if ".self_attn" in name}
    assert set(attention.values()) <= {"replicate", "rowwise_split_input"}
    assert {name: style for name, style in usual.items() if ".self_attn" not in name}.items() <= plan.items()
    if "replicate" in attention.values():
        assert plan.keys() == usual.keys()


def test_models_without_a_plan():
    with pytest.raises(ValueError, match="no tensor-parallel plan for GPT2LMHeadModel; load it in every process"):
        fd.sequence_parallel_plan(tiny_model("gpt2").config)


test_what_processes_see = sights(__name__)
