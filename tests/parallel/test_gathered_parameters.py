"""Processes that divide a model's parameters (FSDP), which are gathered for each call that decodes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, StoppingCriteria

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.parallel.gathering import memory, parameters

from ..tiny_models import tiny_model, tiny_model_of_type
from .processes import Models, add_scenario, scenario
from .scenarios import GREEDY, PROMPT, PROMPTS, SAMPLING, capturing, draw, reason, same_value, sees, sights, values

SAMPLES = SAMPLING | {"max_new_tokens": 20, "pad_token_id": 0, "num_return_sequences": 4}
HALF = torch.bfloat16


def prompt_of(models: Models) -> Tensor:
    """A prompt of another length on each rank, whose samples end at other steps."""
    return PROMPT[:, 7 * models.rank :].contiguous()


def fsdp_2(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """As accelerate divides it: each layer, the ends together, and what is left."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    ends = [model.model.norm, model.get_input_embeddings(), model.get_output_embeddings()]
    fully_shard(ends, reshard_after_forward=False, **options)
    return fully_shard(model, **options)


def fsdp_1(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    model = copy.deepcopy(model)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FullyShardedDataParallel(layer, device_id="cpu", **options)
    return model


def hybrid() -> PreTrainedModel:
    """Layers with states beside one of attention."""
    sizes: dict[str, Any] = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 16)
    sizes |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_attention_heads"), 2)
    sizes |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 1}
    return tiny_model_of_type("qwen3_5_text", layer_types=["linear_attention", "full_attention"], **sizes)


def place(model: PreTrainedModel) -> Any:
    """What a trainer relies on: objects on modules in order, their memory, and gradients."""
    return [
        (name, kind, key, id(value), getattr(value, "data_ptr", int)() if kind == "_parameters" else 0)
        for name, module in model.named_modules()
        for kind in ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        for key, value in getattr(module, kind).items()
    ], [None if one.grad is None else id(one.grad) for one in model.parameters()]


def whole(model: PreTrainedModel, alone: PreTrainedModel) -> PreTrainedModel:
    """The model as one process would have it."""
    twin = copy.deepcopy(alone)
    gathers = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    with torch.no_grad(), gathers if FullyShardedDataParallel.fsdp_modules(model) else nullcontext():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
    return twin


def allocated(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of PyTorch's allocator in a run, the most and the last, less those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
        gc.collect()
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = list(accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())))
    return max(held), held[-1]


def step(model: PreTrainedModel, models: Models) -> list[Any]:
    """Whole parameters after a training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=prompt_of(models), labels=prompt_of(models), use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [one.full_tensor() if isinstance(one, DTensor) else one.detach().clone() for one in model.parameters()]


class Raising(StoppingCriteria):
    """Raises at the third step."""

    def __init__(self, error: BaseException):
        self._error, self._steps = error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._steps += 1
        if self._steps == 3:
            raise self._error
        return torch.zeros(len(args[0]), dtype=torch.bool)


@scenario
def rollouts(models: Models) -> Any:
    """Prompts of other lengths, rows that end at other steps, and one rank that runs stock, by kinds of layers."""
    seen = {}
    for name, alone in {"qwen3": tiny_model("qwen3"), "gpt_oss": tiny_model("gpt_oss"), "hybrid": hybrid()}.items():
        model = fsdp_2(alone)
        ids = prompt_of(models).remainder(alone.config.vocab_size)
        expected = draw(alone, models.rank, ids, **SAMPLES)
        model._is_fsdp_managed_module = True  # by which transformers lets calls keep step
        with fd.enabled(model, min_saved_tokens=1 if models.rank else 10_000):
            before = place(model)
            for synced in (None, True):
                same = draw(model, models.rank, ids, synced_gpus=synced, **SAMPLES) == expected
                call = fd.explain(model).last_call
                nbytes = sum(one.nbytes for one in {id(one): one for one in alone.parameters()}.values())
                told = f"parameters gathered: {call.gathered.nbytes:,} bytes in " in str(fd.explain(model))
                seen[name, synced] = same, call.path, place(model) == before, told and call.gathered.nbytes >= nbytes
    return sorted(set(seen.values())), [name for name, found in seen.items() if not found[0]]


@sees([True, True, True, True])
def a_call_that_fails_on_one_rank(models: Models) -> Any:
    """It ends there alone, and all is as it was, for the next call and for training."""
    alone = models.alone["llama"]
    model, twin = fsdp_2(alone), fsdp_2(alone)
    ids = prompt_of(models)
    with fd.enabled(model):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        twin(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        before, seen = place(model), []
        for error in (RuntimeError("in a reward"), KeyboardInterrupt()):
            if models.rank:
                with pytest.raises(type(error)):
                    draw(model, 0, ids, stopping_criteria=[Raising(error)], **SAMPLES)
            else:
                draw(model, 0, ids, **SAMPLES)
            seen.append(place(model) == before)
        seen.append(draw(model, 1, ids, **SAMPLES) == draw(alone, 1, ids, **SAMPLES))
        seen.append(all(map(torch.equal, step(model, models), step(twin, models))))
    return seen


@sees([[True, True, True]] * 2)
def memory_of_a_call(models: Models) -> Any:
    """Whole parameters, keys, values and 5 %; all is freed at its end, also where Ctrl-C ends it."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    model, ids, seen = fsdp_2(tiny_model("qwen3", **sizes)), prompt_of(models)[:, :40].remainder(90), []
    arguments = SAMPLES | {"max_new_tokens": 6, "eos_token_id": None}
    of_token = sum(layer.self_attn.k_proj.out_features for layer in model.model.layers) * 2 * 4
    weights = sum(one.numel() * 4 for one in model.parameters())
    most = 1.05 * (weights + of_token * (ids.shape[1] + 4 * 6))

    def call(criteria: list[StoppingCriteria]) -> None:
        with suppress(KeyboardInterrupt):
            draw(model, 0, ids, stopping_criteria=criteria, **arguments)
        criteria.clear()  # whose error has a traceback

    def stored() -> list[tuple[int, int]]:
        parts = [one.to_local().untyped_storage() for one in model.parameters()]
        return [(one.data_ptr(), one.nbytes()) for one in parts]

    # Pages of the host are not the allocator's.
    with fd.enabled(model, min_saved_tokens=1), mock.patch.object(memory, "_PAGES", False):
        before = place(model), stored()
        for criteria in ([], [Raising(KeyboardInterrupt())]):
            peak, left = allocated(partial(call, criteria))
            same = (place(model), stored()) == before
            seen.append([weights < peak <= most or (peak, weights, most), left < 2**12 or left, same])
    return seen


@sees([True, True, True, True, True])
def kept_prompts(models: Models) -> Any:
    """Of other numbers on each rank: `prefill`, its cache in calls, and `reuse_prefix`, until weights change."""
    alone, ids = models.alone["llama"], prompt_of(models)
    model = fsdp_2(alone)
    expected = draw(alone, 0, ids, **GREEDY)
    with fd.enabled(model, reuse_prefix=True):
        cache = fd.prefill(model, [ids[0, row:-1] for row in range(1 + 3 * models.rank)])
        seen = [draw(model, 0, ids, **GREEDY, **{CACHE: cache}) == expected]
        seen.append(fd.explain(model).last_call.known_tokens == (ids.shape[1] - 1,))
        draw(model, 0, ids, **SAMPLES)
        draw(model, 0, ids, **SAMPLES)
        seen.append(fd.explain(model).last_call.known_tokens == (ids.shape[1],))
        step(model, models)
        with pytest.raises(ValueError, match="weights"):
            draw(model, 0, ids, **GREEDY, **{CACHE: cache})
        draw(model, 0, ids, **SAMPLES)
        seen.append(fd.explain(model).last_call.known_tokens in (None, (0,)))
        seen.append(draw(model, 0, ids, **GREEDY) == draw(whole(model, alone), 0, ids, **GREEDY))
    return seen


def four_processes(models: Models) -> Any:
    """All parts of one model, and halves of two replicas (HSDP), in calls and in training; one that cannot gather."""
    alone, ids, seen = tiny_model(), prompt_of(models), []
    expected = draw(alone, models.rank, ids, **SAMPLES)
    for shape in ((4,), (2, 2)):
        mesh = mesh_of(shape)
        model, twin = fsdp_2(alone, mesh=mesh), fsdp_2(alone, mesh=mesh)
        with fd.enabled(model, min_saved_tokens=1):
            before = place(model)
            seen.append([draw(model, models.rank, ids, **SAMPLES) == expected, reason(model)[:6]])
            seen.append([place(model) == before, all(map(torch.equal, step(model, models), step(twin, models)))])
            trained = draw(whole(model, alone), models.rank, ids, **SAMPLES)
            with patched_room(mock.Mock(side_effect=Unsupported("no") if models.rank == 3 else None)):
                same = draw(model, models.rank, ids, **SAMPLES) == trained
            seen.append([same, reason(model).partition("gathers them: ")[2][:12]])
    return seen


def sampling_processes_apart(models: Models) -> Any:
    """Two processes train and sample, two others sample alone, with whole weights that they are sent."""
    alone, ids, seen = tiny_model(), prompt_of(models), []
    mesh, twin, trains = DeviceMesh("cpu", [0, 1]), copy.deepcopy(alone), models.rank < 2
    model = fsdp_2(alone, mesh=mesh) if trains else copy.deepcopy(alone)
    with fd.enabled(model, min_saved_tokens=1, reuse_prefix=True):
        for _ in range(2):
            if trains:
                step(model, models)
            with torch.no_grad():
                for mine, known in zip(model.parameters(), twin.parameters(), strict=True):
                    sent = mine.full_tensor() if trains else torch.empty_like(mine)
                    torch.distributed.broadcast(sent, src=0)
                    known.copy_(sent)
                    if not trains:
                        mine.copy_(sent)
            for before in (0, ids.shape[1]):
                same = draw(model, models.rank, ids, **SAMPLES) == draw(twin, models.rank, ids, **SAMPLES)
                seen.append(same and (fd.explain(model).last_call.known_tokens or (0,)) == (before,))
    return seen


for one in (four_processes, sampling_processes_apart):
    add_scenario(one.__name__, one, 4)


@scenario
def refused_on_one_rank(models: Models) -> Any:
    """All run stock, in step though their prompts are of other lengths; `prefill` raises. Replicas (HSDP) do too."""
    alone, ids, seen = models.alone["llama"], prompt_of(models), []
    expected = draw(alone, models.rank, ids, **SAMPLES)
    given = Unsupported("it cannot"), torch.OutOfMemoryError("4 GiB are not free")
    for error, shape in zip(given, ((2,), (2, 1)), strict=True):
        mesh = mesh_of(shape)
        with fd.enabled(model := fsdp_2(alone, mesh=mesh)):
            with patched_room(mock.Mock(side_effect=error if models.rank else None)):
                seen.append([draw(model, models.rank, ids, **SAMPLES) == expected, reason(model)])
                with pytest.raises(ValueError, match="FSDP 2 divides its parameters"):
                    fd.prefill(model, [PROMPT[0, row:] for row in range(1 + 3 * models.rank)])
            seen[-1].append(draw(model, models.rank, ids, **SAMPLES) == expected and reason(model)[:6])
    return seen


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "parts")[-len(shape) :])


def patched_room(check: mock.Mock) -> Any:
    return mock.patch.object(parameters, "_check_room", check)


@sees([[True, True, True]] * 3, kernels=True)
def captured_steps_of_divided_models(models: Models) -> Any:
    """They stay valid while weights are trained: parameters lie where they were, and memory is free between calls."""
    alone, ids, seen = models.alone["small"], prompt_of(models), []
    arguments = SAMPLES | {"max_new_tokens": 4, "eos_token_id": 2}
    offloaded = partial(fsdp_2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for divided in (fsdp_2, offloaded, partial(fsdp_1, use_orig_params=True)):
        model = divided(alone)
        with capturing(), fd.enabled(model, mode="graph", backend="triton"):
            seen.append([])
            for trained in (False, True):
                if trained:
                    step(model, models)
                expected = draw(whole(model, alone), 0, ids, **arguments)
                if trained:
                    with torch.no_grad():
                        model(input_ids=ids, use_cache=False)  # which leaves some parameters gathered
                seen[-1].append(draw(model, 0, ids, **arguments) == expected)
            seen[-1].append(vars(model)["_hf_fastdecode"].captures.count == 1)
    return seen


@sees([True, True, True])
def settings_of_fsdp_2(models: Models) -> Any:
    """Mixed precision, whose passes are those of a model in half precision; parameters on the CPU; a head in fp32."""
    alone, ids = models.alone["llama"], prompt_of(models)
    half, mixed = copy.deepcopy(alone).to(HALF), MixedPrecisionPolicy(param_dtype=HALF)
    given = ((half, {"mp_policy": mixed}), (alone, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}))
    seen = []
    for same, options in given:
        model = fsdp_2(alone, **options)
        with fd.enabled(same), fd.enabled(model):
            seen.append(draw(model, 0, ids, **GREEDY) == draw(same, 0, ids, **GREEDY))
    model = copy.deepcopy(alone)
    fully_shard(model.lm_head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    fully_shard(model, mp_policy=mixed)
    expected = draw(model, 0, ids, synced_gpus=True, **GREEDY)
    with fd.enabled(model):
        seen.append(draw(model, 0, ids, synced_gpus=True, **GREEDY) == expected and "several dtypes" in reason(model))
    return seen


@sees([[True, "shared", True, True]] * 4)
def fsdp_1_around_layers(models: Models) -> Any:
    """Flat parameters with and without the original ones, and those that a user gathers; kept prompts."""
    alone, ids, seen = models.alone["llama"], prompt_of(models), []
    given: list[dict[str, Any]] = [{"use_orig_params": one} for one in (True, False)]
    expected = draw(alone, 0, ids, **SAMPLES)
    for options in (*given, {"sharding_strategy": ShardingStrategy.NO_SHARD}):
        model, twin = fsdp_1(alone, **options), fsdp_1(alone, **options)
        with fd.enabled(model):
            before = place(model)
            cache = fd.prefill(model, [ids[0, row:-1] for row in range(1 + 3 * models.rank)])
            same = draw(model, 0, ids, **SAMPLES, **{CACHE: cache}) == draw(model, 0, ids, **SAMPLES) == expected
            seen.append([same, fd.explain(model).last_call.path, place(model) == before])
        seen[-1].append(all(map(torch.equal, step(model, models), step(twin, models))))
    with fd.enabled(model := fsdp_1(alone)), FullyShardedDataParallel.summon_full_params(model, writeback=False):
        found = draw(model, 0, ids, **SAMPLES)
        seen.append([found == expected, fd.explain(model).last_call.path, True, True])
    return seen


@sees([True, "shared", True])
def fsdp_1_as_in_trl(models: Models) -> Any:
    """Around layers and the model, whose parameters are gathered before the call; mixed precision, and tied ones."""
    alone, ids = tiny_model("qwen3", tie_word_embeddings=True), prompt_of(models).remainder(90)
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(alone.model.layers[0])})
    options = {"auto_wrap_policy": policy, "mixed_precision": MixedPrecision(HALF), "use_orig_params": True}
    outer, twin = (FullyShardedDataParallel(copy.deepcopy(alone), device_id="cpu", **options) for _ in range(2))
    step(outer, models), step(twin, models)
    with FullyShardedDataParallel.summon_full_params(twin, writeback=False):
        for mine, theirs in zip(alone.parameters(), twin.parameters(), strict=True):
            mine.data.copy_(theirs)
    with fd.enabled(alone.to(HALF)), fd.enabled(inner := outer.module):
        expected = draw(alone, 0, ids, **GREEDY, num_return_sequences=1)
        with FullyShardedDataParallel.summon_full_params(outer, recurse=False):
            same = draw(inner, 0, ids, **GREEDY, num_return_sequences=1) == expected
            draw(inner, 0, PROMPTS.remainder(90), **GREEDY)
        path = fd.explain(inner).last_call.path
    return [same, path, all(map(torch.equal, step(outer, models), step(twin, models)))]


@sees([[True, "shared"], [True, "shared"]])
def gathered_by_the_user(models: Models) -> Any:
    """Parameters that stay gathered are left as they are; those that the first pass divides again are not."""
    alone, ids, seen = models.alone["llama"], prompt_of(models), []
    expected = draw(alone, 0, ids, **SAMPLES)
    for stays in (True, False):
        model = fsdp_2(alone)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(not stays, recurse=False)
                module.unshard()
        with fd.enabled(model):
            same = draw(model, 0, ids, **SAMPLES) == expected
            call = fd.explain(model).last_call
            seen.append([same, call.path] if stays == (call.gathered is None) else str(call))
    return seen


@sees([[True, "shared"]] * 2)
def generate_as_a_forward_pass_of_fsdp_2(models: Models) -> Any:
    """As transformers' Trainer registers it: the root's parameters are gathered by the call itself."""
    alone, ids, seen = models.alone["llama"], prompt_of(models), []
    model = copy.deepcopy(alone)
    for layer in model.model.layers:
        fully_shard(layer)
    fd.enable(fully_shard(model))
    register_fsdp_forward_method(model, "generate")
    for _ in range(2):
        expected = draw(whole(model, alone), 0, ids, **SAMPLES)
        seen.append([draw(model, 0, ids, **SAMPLES) == expected, fd.explain(model).last_call.path])
        step(model, models)
    return seen


def test_rollouts_are_those_of_one_process(seen):
    values_of = [one.value for one in seen["rollouts"]]
    assert [one.error for one in seen["rollouts"]] == ["", ""], seen["rollouts"][0].trace
    assert values_of == [[[[True, path, True, True]], []] for path in ("stock", "shared")]


def test_all_run_stock_where_one_cannot_gather(seen):
    for where, (cannot, no_room) in zip(("on rank 1, ", ""), values(seen, "refused_on_one_rank"), strict=True):
        assert cannot[::2] == no_room[::2] == [True, "shared"]
        assert f"each pass gathers them: {where}it cannot; gather them for the call" in cannot[1]
        assert f"{where}all of its parameters take 0.0 GiB, and memory ran out (4 GiB are not free); f" in no_room[1]


@pytest.mark.exhaustive
def test_four_processes(seen_by_four):
    assert same_value(seen_by_four, "sampling_processes_apart") == [True] * 4
    for rank, found in enumerate(values(seen_by_four, "four_processes")):
        assert found == [[True, "shared"], [True, True], [True, "no; gather t" if rank == 3 else "on rank 3, n"]] * 2


def test_memory_that_does_not_hold_whole_parameters():
    device, gib = torch.device("cuda", 1), 2**30
    found = {"memory_reserved": 3 * gib, "memory_allocated": gib, "mem_get_info": (8 * gib,)}
    with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=one) for name, one in found.items()}):
        parameters._check_room(8 * gib, device)
        with pytest.raises(Unsupported, match=r"take 8\.1 GiB, more than 80% of the 10\.0 GiB .* cuda:1; free some"):
            parameters._check_room(8 * gib + gib // 10, device)


test_what_processes_see = sights(__name__)
