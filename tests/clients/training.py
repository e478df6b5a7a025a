"""TRL's trainers over the embedded model: three steps on few-shot prompts, with a reward that needs no model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, Trainer, set_seed
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

import hf_fastdecode as fd
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt

from .images import model_with_images, processor, prompts_with_images, tokenizer_with_images
from .recording import Calls, recorded

TRAINERS: dict[str, tuple[type, type]] = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "online-dpo": (OnlineDPOTrainer, OnlineDPOConfig),
}
SAMPLES, NEW_TOKENS = 4, 16


@dataclass
class Run:
    """A finished training run.

    Attributes:
        trainer: The trainer, its model trained.
        start: All parameters of its model before, by name.
        parameters: The same after.
        calls: The rollouts.
    """

    trainer: Trainer
    start: dict[str, Tensor]
    parameters: dict[str, Tensor]
    calls: Calls


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Share of distinct characters: differs between completions, the same for the same text."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [len(set(text)) / max(1, len(text)) for text in texts]


def rollout_of_page(*, steps: bool = False) -> Any:
    """The rollout function of docs/rl.md; with `steps`, it returns the log-probabilities that `TokenLogProbs` gets."""
    page = (Path(__file__).parents[2] / "docs/rl.md").read_text()
    block = next(one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def rollout" in one)
    if steps:
        block = block.replace("=config)", "=config, logits_processor=[recorder := fd.TokenLogProbs()])")
        block = block.replace("output.processed_logprobs", "recorder.of(tokens)")
    names: dict[str, Any] = {}
    exec(block, names)
    return names["rollout"]


def base_of(model: Any) -> PreTrainedModel:
    """The transformers model in a model that may be PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def make_trainer(
    name: str,
    folder: Path,
    *,
    shots: int = 0,
    images: bool = False,
    peft_config: Any = None,
    model: PreTrainedModel | None = None,
    **options: Any,
) -> Trainer:
    """A trainer with TRL's defaults but for sizes, a learning rate that changes the samples, and `options`.

    Args:
        name: Of `TRAINERS`.
        folder: Where it writes.
        shots: Solved examples in front of each prompt.
        images: Whether a model with images is trained, on prompts that have some.
        peft_config: Trains an adapter.
        model: The model to train; None means the embedded one, in fp32.
        options: Fields of the trainer's config.
    """
    kind, config = TRAINERS[name]
    embedded, tokenizer = fd.load_embedded()
    if name == "online-dpo":  # draws two completions of each prompt
        sizes = {"max_new_tokens": NEW_TOKENS, "per_device_train_batch_size": SAMPLES // 2}
    else:
        sizes = {"max_completion_length": NEW_TOKENS, "per_device_train_batch_size": SAMPLES}
        sizes |= {"num_generations": SAMPLES}
    arguments = config(
        output_dir=str(folder),
        **{"use_cpu": True, "report_to": "none", "max_steps": 3, "save_strategy": "no", "logging_steps": 1}
        | {"learning_rate": 1e-3, "disable_tqdm": True}
        | sizes
        | options,
    )
    prompts = [few_shot_prompt(task, shots=shots) for task in embedded_tasks()[:24]]
    dataset, processing = Dataset.from_dict({"prompt": prompts}), tokenizer
    if images:
        tokenizer = tokenizer_with_images()
        model, dataset, processing = model_with_images(tokenizer), prompts_with_images(), processor(tokenizer)
    set_seed(0)  # an adapter's first weights
    return kind(
        model=model or embedded,
        args=arguments,
        reward_funcs=reward,
        train_dataset=dataset,
        processing_class=processing,
        peft_config=peft_config,
    )


def train(name: str, folder: Path, *, enable: bool, resume: Path | None = None, **options: Any) -> Run:
    """Train for three steps with a trainer's own code.

    Args:
        name: Of `TRAINERS`.
        folder: Where it writes.
        enable: Whether the trainer's model is enabled first.
        resume: A checkpoint of an earlier run to go on from.
        options: As for `make_trainer`.
    """
    trainer = make_trainer(name, folder, **options)
    if enable:
        fd.enable(trainer.model, share_forward=False)  # whose weights round otherwise; see test_shared_forward.py
    start = {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
    torch.manual_seed(0)
    with recorded(base_of(trainer.model)) as calls:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return Run(trainer, start, {key: value.detach() for key, value in trainer.model.named_parameters()}, calls)
