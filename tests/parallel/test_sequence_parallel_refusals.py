"""Calls whose contexts cannot be divided between processes: they run stock and say why, or raise on all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.errors import Unsupported

from ..tiny_models import ragged_prompts, tiny_model
from .processes import Models, add_scenario, scenario
from .scenarios import by_pytorch, raising, reason, same_value, sees, sights
from .sequence_calls import GREEDY, TEXT, ones, text


def compared(model: Any, **options: Any) -> tuple[bool, str]:
    """Whether tokens are stock's, and the path with its reason."""
    expected = model.generate(**text(), **GREEDY)
    with fd.enabled(model, **{"sequence_parallel": "auto", **options}):
        return torch.equal(model.generate(**text(), **GREEDY), expected), reason(model)


@scenario
@by_pytorch
def several_devices(models: Models) -> Any:
    model = tiny_model()
    model.model.unused = torch.nn.Parameter(torch.empty(1, device="meta"))
    return compared(model)


@scenario
@by_pytorch
def gathered_parameters(models: Models) -> Any:
    model = tiny_model()
    for part in (*model.model.layers, model):  # layers are divided again after each pass
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    return compared(model)


@scenario
@by_pytorch
def split_heads(models: Models) -> Any:
    return compared(models.split["llama"])


@scenario
@by_pytorch
def windows_in_prefill(models: Models) -> Any:
    with fd.enabled(tiny_model("gpt_oss"), sequence_parallel="auto") as model:
        short = fd.prefill(model, TEXT[:, :30])
        texts = []
        for call in (
            lambda: fd.prefill(model, TEXT),
            lambda: model.generate(**text(), **GREEDY, **{CACHE: short}),
            lambda: [model(TEXT[:, 30 + step : 31 + step], **{CACHE: short}) for step in range(20)],
        ):
            with pytest.raises((ValueError, Unsupported)) as raised, torch.no_grad():
                call()
            texts.append(f"{raised.type.__name__}: {raised.value}")
        return texts


@sees([True, 2])
@by_pytorch
def waves_without_memory(models: Models) -> Any:
    """Memory for suffixes is short on one process: all split the rows."""
    model, prompts = tiny_model(), ragged_prompts(70, 63, 50, 41, shared=40)
    expected = model.generate(**prompts, **GREEDY)
    with (
        raising(1, models, SharedContextCache, "reserve", torch.OutOfMemoryError("no memory")),
        fd.enabled(model, sequence_parallel="auto"),
    ):
        found = model.generate(**prompts, **GREEDY)
        return torch.equal(found, expected), fd.explain(model).last_call.waves


DIFFERING: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "prompts": (
        lambda model, rank: model.generate(**ones(TEXT + rank), **GREEDY),
        "input_ids is int64 [1, 87] with content",
    ),
    "lengths": (
        lambda model, rank: model.generate(**text(), max_new_tokens=8 + rank),
        "max_new_tokens is 8 on rank 0 and 9 on rank 1",
    ),
    "end tokens": (
        lambda model, rank: model.generate(**text(), **GREEDY, eos_token_id=[5, 6 + rank]),
        "eos_token_id is [5, 6] on rank 0 and [5, 7] on rank 1",
    ),
    "prefill": (
        lambda model, rank: fd.prefill(model, TEXT[:, : 80 + rank]),
        "the prompts' tokens is int64 [80] with content",
    ),
    "caches": (
        lambda model, rank: model.generate(
            **text(), **GREEDY, **{CACHE: [fd.prefill(model, TEXT[:, :length]) for length in (70, 80)][rank]}
        ),
        "is 'SharedContextCache(Forest(",
    ),
    "direct tokens": (
        lambda model, rank: continued(model, text(20)["input_ids"][:, rank : rank + 1]),
        "a forward pass was called differently on the 2 processes",
    ),
    "direct lengths": (
        lambda model, rank: continued(model, text(20)["input_ids"][:, : 1 + rank]),
        "number of tokens of a row is 1 on rank 0 and 2 on rank 1",
    ),
    "tokens of a loop": (
        lambda model, rank: model.generate(**text(), custom_generate=partial(appending, token=5 + rank)),
        "a forward pass was called differently",
    ),
    "beam draws": (
        lambda model, rank: model.generate(**text(), max_new_tokens=4, num_beams=2, do_sample=True),
        "the random generators (cpu) of the 2 processes",
    ),
    "stock draws": (
        lambda model, rank: model.generate(**text(), max_new_tokens=4, do_sample=True, use_cache=False),
        "transformers.set_seed(0)",
    ),
}


@torch.no_grad()
def continued(model: Any, tokens: torch.Tensor) -> None:
    """A pass of the caller's own over a kept cache."""
    model(tokens, **{CACHE: fd.prefill(model, text()["input_ids"])})


def appending(model: Any, input_ids: torch.Tensor, token: int, **kwargs: Any) -> torch.Tensor:
    """A loop of the caller's that appends a token which it has from elsewhere, and computes it."""
    for name in ("logits_processor", "stopping_criteria", "generation_config"):
        kwargs.pop(name)
    for _ in range(2):
        output = model(**model.prepare_inputs_for_generation(input_ids, **kwargs), return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(output, kwargs)
        input_ids = torch.nn.functional.pad(input_ids, (0, 1), value=token)
    return input_ids


def differing_call(name: str, models: Models) -> Any:
    with fd.enabled(tiny_model(), sequence_parallel="auto") as model:
        torch.manual_seed(models.rank)
        DIFFERING[name][0](model, models.rank)


def differing_options(models: Models) -> Any:
    with fd.enabled(tiny_model(), sequence_parallel="auto", max_prefill_tokens=50 + models.rank) as model:
        model.generate(**text(), **GREEDY)


for name in DIFFERING:
    add_scenario(f"differing {name}", lambda models, name=name: differing_call(name, models))
add_scenario("differing options", differing_options)


@scenario
@by_pytorch
def with_gradients(models: Models) -> Any:
    with fd.enabled(tiny_model(), sequence_parallel="auto") as model:
        kept = fd.prefill(model, text()["input_ids"])
        model(text(20)["input_ids"][:, :1], **{CACHE: kept})


@sees([True, "shared"])
@by_pytorch
def after_refusals(models: Models) -> Any:
    model = tiny_model()
    expected = model.generate(**text(), **GREEDY)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    with fd.enabled(model, sequence_parallel=mesh):
        return torch.equal(model.generate(**text(), **GREEDY), expected), reason(model)[:6]


@scenario
@by_pytorch
def meshes_of_two_dimensions(models: Models) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("sp", "tp"))
    model = tiny_model()
    try:
        fd.enable(model, sequence_parallel=mesh)
    except ValueError as error:
        return str(error), compared(model, sequence_parallel=mesh["sp"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("several_devices", "it is on several devices (cpu, meta), and each process divides contexts on one"),
        ("split_heads", "its attention heads are split between the 2 processes that would divide contexts"),
    ],
)
def test_models_that_run_stock(seen, name, why):
    same, path = same_value(seen, name)
    assert same
    assert path.startswith(f"stock: {why}")


def test_contexts_are_divided_beside_parameters_that_are_gathered(seen):
    same, path = same_value(seen, "gathered_parameters")
    assert same
    assert path.startswith("shared: ")


def test_windows_that_hide_tokens_are_refused(seen):
    texts = same_value(seen, "windows_in_prefill")
    what = "a window of 40 tokens hides some of a row, whose context is divided between processes"
    assert all(what in text for text in texts)
    assert texts[0].startswith("ValueError: GptOssForCausalLM cannot divide these contexts between processes: ")


@pytest.mark.parametrize("name", [*DIFFERING, "options"])
def test_calls_that_differ_name_the_field_on_all(seen, name):
    field = DIFFERING[name][1] if name in DIFFERING else "max_prefill_tokens=) is 50 on rank 0 and 51 on rank 1"
    first, second = seen[f"differing {name}"]
    assert first.error == second.error
    assert first.error.startswith("ValueError: ")
    assert field in first.error


def test_gradients_are_refused(seen):
    for one in seen["with_gradients"]:
        assert one.error.startswith("ValueError: no gradients pass between the 2 processes that divide a context; run")


def test_meshes_are_of_one_dimension(seen):
    error, (same, path) = same_value(seen, "meshes_of_two_dimensions")
    assert error.startswith("sequence_parallel takes a device mesh of one dimension, got one of 2; give one of its ")
    assert error.endswith("such as mesh['sp']")
    assert same
    assert path.startswith("shared: ")


@pytest.mark.parametrize("option", [True, "yes", 2, None])
def test_what_names_no_processes_is_refused(option, model):
    with pytest.raises(ValueError, match="sequence_parallel must be a group of processes"):
        fd.enable(model, sequence_parallel=option)


def test_processes_outside_a_group_are_told(model):
    with (
        mock.patch.object(torch.distributed, "get_rank", return_value=2),
        pytest.raises(ValueError, match="processes that are not in the group, such as this one, rank 2; enable"),
    ):
        fd.enable(model, sequence_parallel=torch.distributed.GroupMember.NON_GROUP_MEMBER)


def test_processes_without_a_group_divide_nothing_unnoticed(model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        fd.enabled(model, sequence_parallel="auto"),
        pytest.raises(ValueError, match=r"the 3 processes that were started \(WORLD_SIZE\), which have no "),
    ):
        model.generate(**text(), **GREEDY)


def test_one_process_divides_nothing(model):
    expected = model.generate(**text(), **GREEDY)
    with fd.enabled(model, sequence_parallel="auto"):
        assert torch.equal(model.generate(**text(), **GREEDY), expected)
        assert fd.explain(model).last_call.path == "stock"  # for nothing is saved


test_what_processes_see = sights(__name__)
