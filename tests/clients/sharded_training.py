"""TRL's trainers in processes that divide a model between them, as `accelerate launch` starts them.

`run` forks the processes of each case from one that has imported TRL, and ends all of them in time.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, set_seed
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import hf_fastdecode as fd
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt

from ..interpreter import make_faster
from ..parallel.scenarios import capturing
from ..ports import place_of
from ..tiny_models import ARCHITECTURES, tiny_model_of_type

_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
_FSDP_2 = {**_FSDP, "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
_FSDP_1 = {**_FSDP, "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD", "FSDP_USE_ORIG_PARAMS": "true"}
_FSDP_1["FSDP_CPU_RAM_EFFICIENT_LOADING"] = _FSDP_1["FSDP_SYNC_MODULE_STATES"] = "false"  # by way of a GPU


def _zero(stage: int, **options: Any) -> dict[str, Any]:
    """The configuration of DeepSpeed; parameters of any size are divided, and none is fetched ahead."""
    if stage == 3:
        options |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    settings = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {"deepspeed": {**settings, "zero_optimization": {"stage": stage, **options}}}


LAUNCHES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "ddp": ({}, {}),
    "fsdp2": (_FSDP_2, {}),
    "fsdp2-offload": ({**_FSDP_2, "FSDP_OFFLOAD_PARAMS": "true"}, {}),
    "fsdp1": (_FSDP_1, {}),
    "zero2": ({}, _zero(2)),
    "zero3": ({}, _zero(3)),
    "zero3-divided": ({}, {**_zero(3), "ds3_gather_for_generation": False}),
    "zero3-offload": ({}, {**_zero(3, offload_param={"device": "cpu"}), "ds3_gather_for_generation": False}),
}
"""Name -> what `accelerate launch` sets in the environment, and fields of the trainer's config."""

TRAINERS: dict[str, tuple[type[Trainer], type]] = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}
_QWEN_3_5 = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
MODELS = {name: ARCHITECTURES[name] for name in ("qwen3", "gpt_oss")} | {"qwen3_5": ("qwen3_5_text", _QWEN_3_5)}
LORA = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
ROWS, NEW_TOKENS, STEPS, SECONDS, PEER_TIMEOUT = 4, 16, 4, 200, 20


@dataclass(frozen=True)
class Case:
    """A training script in several processes.

    Attributes:
        launch: Of `LAUNCHES`.
        trainer: Of `TRAINERS`.
        model: Of `MODELS`.
        lora: Whether an adapter is trained, or all weights.
        processes: How many.
    """

    launch: str
    trainer: str = "grpo"
    model: str = "qwen3"
    lora: bool = False
    processes: int = 2


@dataclass
class Trained:
    """Results of one process: completions of each step, metrics, enabled calls, whole parameters before and after."""

    completions: list[list[list[int]]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    stages: list[dict[str, Tensor]] = field(default_factory=list)


def make_model(name: str) -> PreTrainedModel:
    """A tiny model of `MODELS`, whose rows end at any of many tokens, each at another step."""
    _, tokenizer = fd.load_embedded()
    kind, sizes = MODELS[name]
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    special |= {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    model = tiny_model_of_type(kind, **{**sizes, **special})
    model.generation_config.eos_token_id = list(range(len(tokenizer) // 2, len(tokenizer) * 5 // 8))
    return model


def make_trainer(case: Case, model: PreTrainedModel, folder: str, reward: Callable[..., list[float]]) -> Trainer:
    trainer, config = TRAINERS[case.trainer]
    tokenizer = fd.load_embedded()[1]
    arguments = config(
        output_dir=folder,
        **{"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"},
        **{
            "max_steps": STEPS,
            "logging_steps": 1,
            "learning_rate": 1.0 if case.lora else 1e-2,
            "optim": "sgd",
            "beta": 0.0,
        },
        gradient_checkpointing=case.model == "qwen3",  # the default
        **{"per_device_train_batch_size": ROWS, "num_generations": ROWS, "max_completion_length": NEW_TOKENS},
        **LAUNCHES[case.launch][1],
        # A trainer turns the cache of a model off; a generation config that was never saved follows it.
        generation_kwargs={"use_cache": True},
    )
    assert arguments.device.type == "cpu"
    if case.launch.startswith("fsdp"):  # which accelerate takes on accelerators alone
        PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = type(model.model.layers[0]).__name__
    prompts = [few_shot_prompt(task, shots=0) for task in embedded_tasks()[:24]]
    set_seed(0)
    made = trainer(
        model=model,
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=LORA if case.lora else None,
    )
    if case.launch == "fsdp2-offload":
        made.accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # as there is no GPU
    return made


def score(completion_ids: list[list[int]]) -> list[float]:
    """Share of distinct tokens, of which short completions have more."""
    return [len(set(ids)) / NEW_TOKENS for ids in completion_ids]


def train(
    case: Case, model: PreTrainedModel, *, enable: bool, reward: Callable[[list[list[int]]], list[float]] = score
) -> Trained:
    """Train a copy of a model for some steps in this process, which is one of several.

    Args:
        enable: Whether the trainer's model is enabled first.
        reward: Scores of completions.
    """
    seen = Trained()

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.completions.append(completion_ids)
        if enable:
            call = fd.explain(trainer.model).last_call
            seen.calls.append(f"{call.path}: {call.reason}")
        return reward(completion_ids)

    with TemporaryDirectory() as folder:
        trainer = make_trainer(case, copy.deepcopy(model), folder, rewards)
        seen.stages.append(whole_parameters(trainer.model))
        if enable:
            fd.enable(trainer.model, min_saved_tokens=1, peer_timeout=PEER_TIMEOUT)
        trainer.train()
    kept = ("loss", "grad_norm", "reward")
    seen.metrics = [{name: float(step[name]) for name in kept} for step in trainer.state.log_history[:STEPS]]
    seen.stages.append(whole_parameters(trainer.model))
    return seen


def whole_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """All parameters in full, in copies; collective."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            named = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
            return {name: value.detach().clone() for name, value in named.items()}
    found = {}
    for name, value in model.named_parameters():
        if hasattr(value, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([value]):
                found[name] = value.detach().clone()
        else:
            found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def sampling_model(case: Case, model: PreTrainedModel, whole: dict[str, Tensor], *, merged: bool) -> torch.nn.Module:
    """A copy of a model for one process, with parameters that a trainer hands on, by their names in its model."""
    made: Any = copy.deepcopy(model)
    if case.lora:
        made = get_peft_model(made, LORA)
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.copy_(whole[name])
    return made.merge_and_unload() if merged else made


def check_sampling_model(
    case: Case, model: PreTrainedModel, stages: list[dict[str, Tensor]], *, merged: bool, captured: bool = False
) -> None:
    """Raise AssertionError if an enabled model of one process does not follow weights that are copied to its own.

    Args:
        stages: Whole parameters before and after training.
        merged: Whether adapters are merged into the weights.
        captured: Whether steps are captured, once for all weights.
    """
    tokenizer, seen = fd.load_embedded()[1], []
    prompt = tokenizer(few_shot_prompt(embedded_tasks()[0], shots=0), return_tensors="pt").input_ids
    rows, tokens = (2, 3) if captured else (8, 16)  # interpreted kernels take time
    prompt = prompt[:, :48] if captured else prompt
    given = {"do_sample": True, "num_return_sequences": rows, "min_new_tokens": tokens, "max_new_tokens": tokens}
    options = {"mode": "graph", "backend": "triton"} if captured else {}

    def draw(one: Any) -> list[list[int]]:
        torch.manual_seed(0)
        tokens: list[list[int]] = one.generate(prompt, **given, use_cache=True).tolist()
        return tokens

    one = sampling_model(case, model, stages[0], merged=merged)
    with (
        capturing() if captured else nullcontext(),
        fd.enabled(one, min_saved_tokens=1, reuse_prefix=True, **options),
        torch.no_grad(),
    ):
        for whole in stages:
            stock = sampling_model(case, model, whole, merged=merged)
            for mine, theirs in zip(one.parameters(), stock.parameters(), strict=True):
                mine.copy_(theirs)
            seen.append(draw(stock))
            known = []
            for _ in range(2):
                assert draw(one) == seen[-1]
                known.append(sum(fd.explain(one).last_call.known_tokens or ()))
            assert known[0] == 0 < known[1] + (case.model == "qwen3_5"), known  # of whose layers some have states
        if captured:
            assert vars(one if merged else one.get_base_model())["_hf_fastdecode"].captures.count == 1
    assert seen[0] != seen[1]


def compare(case: Case) -> None:
    """Raise AssertionError if training an enabled model differs from training a stock one."""
    model = make_model(case.model)  # before ZeRO-3 begins, which divides models as they are made from then on
    stock, enabled = (train(case, model, enable=enable) for enable in (False, True))
    assert stock.completions == enabled.completions
    every = [None] * case.processes
    torch.distributed.all_gather_object(every, stock.completions)
    longest = {str([max(map(len, step)) for step in of_rank]) for of_rank in every}
    assert len(longest) == case.processes, longest  # so that ranks decode other numbers of steps
    for expected, found in zip(stock.metrics, enabled.metrics, strict=True):
        assert abs(expected["loss"] - found["loss"]) <= 1e-5, (expected, found)
        assert expected["reward"] == found["reward"], (expected, found)
    expected, found = stock.stages[-1], enabled.stages[-1]
    assert expected.keys() == found.keys() == stock.stages[0].keys()
    apart = {name: (value - found[name]).abs().max().item() for name, value in expected.items()}
    assert max(apart.values()) <= 1e-5, max(apart.items(), key=lambda item: item[1])
    assert any(step["grad_norm"] > 1e-3 for step in stock.metrics), stock.metrics
    assert all(one.startswith("shared: ") for one in enabled.calls), enabled.calls
    for merged in {False, case.lora}:
        check_sampling_model(case, model, enabled.stages, merged=merged)


def captures_follow(case: Case) -> None:
    """Raise AssertionError if captured steps of a sampling model do not follow weights that are copied to its own."""
    make_faster()
    model = make_model(case.model)
    stages = train(case, model, enable=False).stages
    for merged in {False, case.lora} if torch.distributed.get_rank() == 0 else ():
        check_sampling_model(case, model, stages, merged=merged, captured=True)


def reward_fails(case: Case) -> None:
    """A reward function raises an error in the third step of rank 1."""

    def reward(completion_ids: list[list[int]]) -> list[float]:
        steps.append(None)
        if len(steps) == 3 and torch.distributed.get_rank() == 1:
            raise ValueError("no reward")
        return score(completion_ids)

    steps: list[None] = []
    train(case, make_model(case.model), enable=True, reward=reward)


def rank_dies(case: Case) -> None:
    """Rank 1 is killed in its second rollout."""
    draw, draws = torch.multinomial, []

    def multinomial(*args: Any, **kwargs: Any) -> Tensor:
        draws.append(None)
        if len(draws) == NEW_TOKENS + 4 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(*args, **kwargs)

    with mock.patch.object(torch, "multinomial", multinomial):
        train(case, make_model(case.model), enable=True)


def run(cases: Iterable[tuple[Callable[[Case], None], Case, list[int]]]) -> None:
    """Run each case in processes of its own, one case after the other.

    Args:
        cases: What each process runs, of what, and their exit codes: negative numbers are signals.

    Raises:
        AssertionError: Some ended otherwise; those that hang are ended.
    """
    for body, case, expected in cases:
        began = time.monotonic()
        codes = _end(_start(body, case))
        print(f"{body.__name__} {case}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        assert codes == expected, f"{body.__name__} {case} ended with {codes}"


def _start(body: Callable[[Case], None], case: Case) -> list[int]:
    settings = place_of(case.processes) | {"LOCAL_WORLD_SIZE": str(case.processes), "DS_ACCELERATOR": "cpu"}
    settings |= LAUNCHES[case.launch][0]
    processes = []
    for rank in range(case.processes):
        if (process := os.fork()) == 0:
            code = 1
            try:
                os.environ.update(settings, RANK=str(rank), LOCAL_RANK=str(rank))
                torch.set_num_threads(1)
                if case.launch.startswith("zero"):
                    _begin_deepspeed()
                body(case)
                torch.distributed.barrier()
                code = 0
            except BaseException:
                print(f"rank {rank} of {case}:", file=sys.stderr)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        processes.append(process)
    return processes


def _begin_deepspeed() -> None:
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which it would compile
    deepspeed.init_distributed(dist_backend="gloo")


def _end(processes: list[int]) -> list[int]:
    """Wait for processes, and end those that hang; returns their exit codes, negative of signals."""
    codes, waiting, deadline = dict[int, int](), set(processes), time.monotonic() + SECONDS
    while waiting:
        for process in sorted(waiting):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                waiting.discard(process)
                if codes[process] == -signal.SIGKILL:
                    deadline = min(deadline, time.monotonic() + PEER_TIMEOUT + 40)  # not a group's 30 minutes
        if waiting and time.monotonic() > deadline:
            for process in waiting:
                os.kill(process, signal.SIGABRT)
            deadline = float("inf")
        time.sleep(0.05)
    return [codes[process] for process in processes]
