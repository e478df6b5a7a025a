"""Processes that hold parts of a model's parameters, and gather them in passes or before a call (FSDP)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from transformers import PreTrainedModel

import hf_fastdecode as fd

from .processes import Models, scenario
from .scenarios import GREEDY, PROMPT, PROMPTS, draw, reason, same_value, sees, sights


def prompts_of(models: Models) -> torch.Tensor:
    """Prompts of other lengths, and another number of passes, on each rank."""
    return PROMPTS[:, models.rank :].contiguous()


def fully_sharded_layers(models: Models) -> PreTrainedModel:
    model = copy.deepcopy(models.alone["llama"])
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def set_gathered(model: PreTrainedModel, gathered: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(not gathered, recurse=False)
            module.unshard() if gathered else module.reshard()


@scenario
def gathered_by_fsdp_2(models: Models) -> Any:
    """As transformers' trainers mark it, whose calls then keep step by default."""
    ids, model = prompts_of(models), fully_sharded_layers(models)
    expected = draw(models.alone["llama"], 0, ids, **GREEDY)
    model._is_fsdp_managed_module = True
    with fd.enabled(model, min_saved_tokens=PROMPT.shape[1] * 4 if models.rank else 1):  # one of them runs stock
        set_gathered(model, True)
        gathered = draw(model, 0, ids, **GREEDY), reason(model)[:6]
        set_gathered(model, False)
        divided = draw(model, 0, ids, **GREEDY), reason(model)
    return [gathered[0] == expected, divided[0] == expected, divided[1]], gathered[1]


@sees("stock: FSDP 2")
def unsharded_once(models: Models) -> Any:
    """Layers gather their parameters again after the first pass."""
    model = fully_sharded_layers(models)
    with fd.enabled(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        draw(model, 0, prompts_of(models), **GREEDY)
        return reason(model)[:13]


@scenario
def prefill_of_fsdp_2(models: Models) -> Any:
    count = 1 if models.rank == 0 else 4  # one pass, and several
    model = fully_sharded_layers(models)
    with fd.enabled(model), pytest.raises(ValueError, match="cannot share context") as raised:
        fd.prefill(model, [PROMPT[0, row:] for row in range(count)])
    return str(raised.value)


@sees([[True, "stock: FS"], [True, "shared: 2"]])
def layers_of_fsdp_1(models: Models) -> Any:
    ids, seen = prompts_of(models), []
    expected = draw(models.alone["llama"], 0, ids, **GREEDY)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = copy.deepcopy(models.alone["llama"])
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = FullyShardedDataParallel(layer, sharding_strategy=strategy, device_id="cpu")
        with fd.enabled(model):
            seen.append((draw(model, 0, ids, **GREEDY) == expected, reason(model)[:9]))
    return seen


def test_gathered_parameters_are_as_those_of_one_process(seen):
    found = [one.value for one in seen["gathered_by_fsdp_2"]]
    assert [one.error for one in seen["gathered_by_fsdp_2"]] == ["", ""], seen["gathered_by_fsdp_2"][0].trace
    divided = (
        "stock: FSDP 2 divides its parameters between processes, and each pass gathers them; gather them for the "
        "call: set_reshard_after_forward(False) and unshard() of every FSDPModule, reshard() after it"
    )
    assert found == [[[True, True, divided], "shared"], [[True, True, divided], "stock:"]]


def test_prefill_is_refused_on_all_ranks(seen):
    assert same_value(seen, "prefill_of_fsdp_2").startswith(
        "FSDPLlamaForCausalLM cannot share context: FSDP 2 divides its parameters between processes"
    )


test_what_processes_see = sights(__name__)
