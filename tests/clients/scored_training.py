"""TRL's trainers over tiny models, five steps in fp32: what they report, their weights, and how passes ran."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, set_seed
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import hf_fastdecode as fd
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt
from hf_fastdecode.generation.report import ForwardReport

from ..tiny_models import tiny_model
from .recording import recorded_passes
from .training import reward

ROWS, NEW_TOKENS, STEPS = 4, 8, 5
_ROLLOUTS = {"max_completion_length": NEW_TOKENS, "num_generations": 4, "per_device_train_batch_size": ROWS}
_PAIRS = {"per_device_train_batch_size": ROWS // 2, "max_length": None}
TRAINERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, _ROLLOUTS),
    "rloo": (RLOOTrainer, RLOOConfig, _ROLLOUTS),
    "dpo": (DPOTrainer, DPOConfig, _PAIRS),
    "kto": (KTOTrainer, KTOConfig, {"per_device_train_batch_size": ROWS, "train_sampling_strategy": "sequential"}),
    "orpo": (ORPOTrainer, ORPOConfig, _PAIRS),
    "reward": (RewardTrainer, RewardConfig, _PAIRS),
}
"""Trainer, its config's class, and sizes; batches of pairs have two rows for each."""


@dataclass
class Scored:
    """A finished training run.

    Attributes:
        start: All parameters of the model before, by name.
        parameters: The same after.
        metrics: What the trainer logged, a dictionary a step and one for all; without times.
        tokens: Ids of the completions, a list for each row.
        passes: How each forward pass without a cache ran; empty for stock.
    """

    start: dict[str, Tensor]
    parameters: dict[str, Tensor]
    metrics: list[dict[str, float]]
    tokens: list[list[int]]
    passes: list[ForwardReport]


def train_scored(
    name: str,
    folder: Path,
    *,
    enable: bool | dict[str, Any],
    model: str = "qwen3",
    peft_config: Any = None,
    rollout_func: Any = None,
    **options: Any,
) -> Scored:
    """Train a tiny model with a trainer's own code.

    Args:
        name: Of `TRAINERS`.
        folder: Where the first weights are, from which a trainer loads its reference, and where it writes.
        enable: Whether the trainer's model, and its reference, are enabled first; with which options.
        model: Of `tiny_models.ARCHITECTURES`.
        peft_config: Trains an adapter.
        rollout_func: Draws completions in the place of the trainer.
        options: Fields of the trainer's config.
    """
    tokens: list[list[int]] = []
    given = {"peft_config": peft_config} | ({} if rollout_func is None else {"rollout_func": rollout_func})
    trainer = _trainer(name, folder, model, given, options, tokens)
    for one in (trainer.model, getattr(trainer, "ref_model", None)) if enable else ():
        if one is not None:
            fd.enable(one, **{} if enable is True else enable)
    start = {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
    set_seed(0)
    with recorded_passes() as passes:
        trainer.train()
    metrics = [{key: value for key, value in row.items() if not _is_time(key)} for row in trainer.state.log_history]
    found = {key: value.detach() for key, value in trainer.model.named_parameters()}
    return Scored(start, found, metrics, tokens, passes)


def _trainer(
    name: str, folder: Path, model: str, given: dict[str, Any], options: dict[str, Any], tokens: list[list[int]]
) -> Trainer:
    kind, config, sizes = TRAINERS[name]
    _, tokenizer = fd.load_embedded()
    special = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    first = tiny_model(model, **special, max_position_embeddings=1024)
    for key, parameter in first.named_parameters():
        if key.endswith("bias"):  # 0 leaves nothing that rounding is relative to
            nn.init.normal_(parameter, std=0.15)
    first.save_pretrained(folder / "model")
    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    set_seed(0)  # weights of a head, of an adapter
    arguments = {"num_labels": 1} if name == "reward" else {}
    given = given | {
        "model": auto.from_pretrained(folder / "model", dtype=torch.float32, **arguments),
        "args": config(
            output_dir=str(folder),
            **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
            | {"max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "disable_tqdm": True}
            | {"adam_epsilon": 1e-4, "gradient_checkpointing": False}
            | sizes
            | options,
        ),
        "train_dataset": Dataset.from_list(_rows(name)),
        "processing_class": tokenizer,
    }
    if name in ("grpo", "rloo"):
        given["reward_funcs"] = _recording(tokens)
    return kind(**given)


def _rows(name: str) -> list[dict[str, Any]]:
    """A dataset of few-shot prompts; those of preferences have a right and a wrong answer."""
    tasks = embedded_tasks()[: 4 * STEPS]
    prompts = [few_shot_prompt(task, shots=0) for task in tasks]
    if name in ("grpo", "rloo"):
        return [{"prompt": prompt} for prompt in prompts]
    answers = [task["code"] for task in tasks]
    wrong = answers[1:] + answers[:1]
    if name == "kto":
        both = zip(prompts, answers, wrong, strict=True)
        return [
            {"prompt": prompt, "completion": answer, "label": right}
            for prompt, *of_prompt in both
            for answer, right in zip(of_prompt, (True, False), strict=True)
        ]
    columns = zip(prompts, answers, wrong, strict=True)
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in columns]


def _recording(tokens: list[list[int]]) -> Any:
    def recorded_reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.extend(completion_ids)
        return reward(completions)

    return recorded_reward


def _is_time(metric: str) -> bool:
    return any(word in metric for word in ("time", "per_second", "flos"))
