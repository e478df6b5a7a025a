"""From options to what a command works with: tasks, prompts, model, how to draw."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CommandError
from ...evals.prompts import PromptFormat
from ...evals.settings import Drawing
from ...evals.tasks import TaskSet
from ...model_names import max_positions
from ..checks import pick_device
from ..interrupts import exit_on_interrupt
from .options import DecodingOptions, DrawOptions, ModelOptions, PromptOptions, TaskOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Options:
    """The groups of options that decide what is drawn."""

    tasks: TaskOptions
    model: ModelOptions
    prompts: PromptOptions
    draw: DrawOptions
    decoding: DecodingOptions

    def check(self) -> None:
        """Check what can be checked without the tasks and without torch.

        Raises:
            CommandError: An option is out of its bounds.
        """
        self.draw.check()
        self.decoding.check()
        self.model.check()


@dataclass(frozen=True)
class Prepared:
    """A loaded model with tasks and prompts that suit it.

    Attributes:
        options: That asked for it.
        model: On its device.
        tokenizer: Its tokenizer, padding on the left.
        tasks: The tasks.
        form: Format of the prompts.
        prompts: Tokens of the prompt of each task.
        drawing: How to draw.
        counts: Numbers of samples, rising.
    """

    options: Options
    model: Any
    tokenizer: Any
    tasks: TaskSet
    form: PromptFormat
    prompts: list[list[int]]
    drawing: Drawing
    counts: list[int]


def load_suitable_tasks(options: Options) -> TaskSet:
    """Check options, load the tasks, and check that the prompt format suits them, without torch.

    Raises:
        CommandError: An option is out of its bounds, or the tasks cannot be loaded.
    """
    options.check()
    chosen = options.tasks.load()
    if not options.prompts.chat:  # a template is the tokenizer's
        options.prompts.make(chosen)
    return chosen


def prepare(options: Options, chosen: TaskSet) -> Prepared:
    """Load the model, and check that it has room for the tasks' prompts.

    Args:
        options: The command's options.
        chosen: From `load_suitable_tasks`.

    Raises:
        CommandError: It cannot be loaded, or a prompt leaves no room for a completion.
    """
    with exit_on_interrupt():
        from ..models import load_model
    model, draw, decoding = options.model, options.draw, options.decoding
    loaded, tokenizer = load_model(model.model, model.dtype, _device(model.device))
    form = options.prompts.make(chosen, tokenizer)
    texts = [form.prompt(task) for task in chosen.tasks]
    ids = tokenizer(texts, add_special_tokens=form.special_tokens, verbose=False).input_ids
    prepared = Prepared(
        options=options,
        model=loaded,
        tokenizer=tokenizer,
        tasks=chosen,
        form=form,
        prompts=ids,
        drawing=Drawing(
            draw.temperature,
            draw.top_p,
            draw.max_new_tokens,
            way="stock" if decoding.stock else "shared",
            mode=decoding.mode,
            sampler=decoding.sampler,
            processed=decoding.processed,
        ),
        counts=draw.check(),
    )
    _check_room(prepared)
    return prepared


def _device(name: str) -> torch.device:
    """The device of this name; of a process of `accelerate launch`, its own."""
    if name == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        return PartialState().device
    return pick_device(name)


def _check_room(prepared: Prepared) -> None:
    """Refuse prompts that are longer than the model's positions allow."""
    limit, new_tokens = max_positions(prepared.model.config), prepared.drawing.max_new_tokens
    for task, prompt in zip(prepared.tasks.tasks, prepared.prompts, strict=True):
        if limit is not None and len(prompt) + new_tokens > limit:
            raise CommandError(
                f"the prompt of task {task.task_id} has {len(prompt)} tokens, and with {new_tokens} new ones that is "
                f"more than the {limit} positions of this model; lower --shots or --max-new-tokens"
            )
