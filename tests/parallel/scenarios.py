"""What scenarios have in common: calls, and what all processes saw."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_fastdecode as fd
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.parallel import sequence

from .processes import Models, Seen, scenario

PROMPT = torch.arange(3, 90).remainder(61)[None] + 3
PROMPTS = PROMPT.expand(4, -1)
ENDS = list(range(5, 30))
"""End tokens that random models draw soon."""
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 8, "max_new_tokens": 60, "eos_token_id": ENDS}
GREEDY = {"do_sample": False, "max_new_tokens": 8}


def draw(model: PreTrainedModel, seed: int, ids: torch.Tensor = PROMPT, **arguments: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **arguments}).tolist()


def split_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model that both processes compute together, from what rank 0 saved: others save nothing in transformers."""
    config = DistributedConfig(tp_size=2, tp_plan=fd.sequence_parallel_plan(model.config))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = [folder]
        distributed.broadcast_object_list(saved, group_src=0)
        attention = model.config._attn_implementation
        load = AutoModelForCausalLM.from_pretrained
        split = load(saved[0], distributed_config=config, attn_implementation=attention).eval()
        distributed.barrier()
    split.generation_config = model.generation_config
    return split


def reason(model: PreTrainedModel) -> str:
    call = fd.explain(model).last_call
    return f"{call.path}: {call.reason}"


@contextmanager
def capturing() -> Iterator[None]:
    """Let captured modes run where kernels are interpreted, and pay for few steps."""
    with (
        mock.patch.object(modes, "capture_reason", return_value=None),
        mock.patch.object(modes, "_STEPS_OF_A_CAPTURE", 0),
    ):
        yield


def by_pytorch(run: Callable[[Models], Any]) -> Callable[[Models], Any]:
    """A scenario in which PyTorch's operators merge what processes found: interpreted kernels take time."""

    @functools.wraps(run)
    def patched(models: Models) -> Any:
        with mock.patch.object(sequence, "_by_kernel", return_value=False):
            return run(models)

    return patched


@contextmanager
def raising(rank: int, models: Models, owner: object, name: str, error: Exception) -> Iterator[None]:
    """Make a function raise once on one rank."""
    original, errors = getattr(owner, name), [error] if models.rank == rank else []

    def once(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(*arguments, **named)

    with mock.patch.object(owner, name, once):
        yield


_EXPECTED: dict[str, dict[str, tuple[Any, bool]]] = {}
"""By module and scenario, what all processes are to see, and whether kernels run."""


def sees(value: Any, *, kernels: bool = False) -> Callable[[Callable[[Models], Any]], Callable[[Models], Any]]:
    """Let a function run in two processes, which are both to see this value, as `sights` tests."""

    def mark(function: Callable[[Models], Any]) -> Callable[[Models], Any]:
        _EXPECTED.setdefault(function.__module__, {})[function.__name__] = json.loads(json.dumps(value)), kernels
        return scenario(function)

    return mark


def sights(module: str) -> Callable[..., None]:
    """A test of what scenarios of a module see."""

    @pytest.mark.parametrize("name", _EXPECTED[module])
    def test(seen: dict[str, tuple[Seen, ...]], name: str) -> None:
        expected, kernels = _EXPECTED[module][name]
        if kernels:
            pytest.importorskip("triton")
        assert same_value(seen, name) == expected

    return test


def values(seen: dict[str, tuple[Seen, ...]], name: str) -> tuple[Any, ...]:
    assert {one.error for one in seen[name]} == {""}, seen[name][0].trace
    return tuple(one.value for one in seen[name])


def same_value(seen: dict[str, tuple[Seen, ...]], name: str) -> Any:
    first, *others = values(seen, name)
    assert all(one == first for one in others)
    return first
