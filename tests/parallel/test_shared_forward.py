"""Training steps of two processes whose rows share other numbers of tokens: DDP, and layers divided by FSDP 2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import hf_fastdecode as fd

from .processes import Models, Seen, scenario
from .scenarios import values
from .shared_rows import SHARED, STEPS, batch


def fsdp_2(model: PreTrainedModel) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[PreTrainedModel], nn.Module]] = {"ddp": DistributedDataParallel, "fsdp_2": fsdp_2}


def train(models: Models, wrap: Callable[[PreTrainedModel], nn.Module], enable: bool, checkpointing: bool) -> Any:
    """Losses and parameters after some steps, and how the passes ran: path, computed and given tokens."""
    model = copy.deepcopy(models.alone["llama"]).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = wrap(model)
    if enable:
        fd.enable(wrapped, min_saved_tokens=8)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.3)
    losses, passes = [], []
    for step in range(STEPS):
        given = {name: part.to(model.device) for name, part in batch(models.rank, step).items()}
        loss = wrapped(**given, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if enable:
            ran = fd.explain(model).last_forward
            passes.append((ran.path, ran.computed, ran.tokens))
    named = ((name, value.detach()) for name, value in model.named_parameters())
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named}
    return torch.tensor(losses), whole, passes


def compared(models: Models, name: str, checkpointing: bool) -> Any:
    losses, parameters, _ = train(models, WRAPPERS[name], False, checkpointing)
    found_losses, found, passes = train(models, WRAPPERS[name], True, checkpointing)
    moved = max(_apart(models.alone["llama"].get_parameter(name), value) for name, value in parameters.items())
    apart = max(_apart(value, found[name]) for name, value in parameters.items())
    return {"losses": _apart(losses, found_losses), "parameters": apart, "moved": moved, "passes": passes}


def _apart(expected: Tensor, found: Tensor) -> float:
    """The largest difference over the largest magnitude."""
    return ((expected - found).abs().max() / expected.abs().max()).item()


@scenario
def steps_of_ddp(models: Models) -> Any:
    return compared(models, "ddp", False)


@scenario
def steps_of_fsdp_2(models: Models) -> Any:
    return compared(models, "fsdp_2", False)


@scenario
def checkpointed_steps_of_fsdp_2(models: Models) -> Any:
    return compared(models, "fsdp_2", True)


@pytest.mark.parametrize("name", ["steps_of_ddp", "steps_of_fsdp_2", "checkpointed_steps_of_fsdp_2"])
def test_steps_are_those_of_stock(seen: dict[str, tuple[Seen, ...]], name: str) -> None:
    check_steps(seen, name)


def check_steps(seen: dict[str, tuple[Seen, ...]], name: str) -> None:
    for rank, found in enumerate(values(seen, name)):
        assert found["losses"] <= 1e-5
        assert found["parameters"] <= 1e-5 < 1e-2 < found["moved"]
        paths, computed, given = zip(*found["passes"], strict=True)
        assert paths == ("shared", "shared", "stock" if rank == 0 else "shared")
        shared, rows = SHARED[rank]
        saved = [one - other for one, other in zip(given, computed, strict=True)]
        assert saved[:2] == [shared * (rows - 1)] * 2
