"""``eval generate``: from options to tasks, prompts and a model, and its samples."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import InputError
from ...evals.prompts import PromptFormat
from ...evals.records import read_samples, thoughts_line
from ...evals.run_folder import Drawing, RunSettings, prompts_digest, sample_files
from ...evals.tasks import TaskSet
from ...model_names import max_positions
from ..checks import pick_device
from ..console import forced_options, note, quiet_libraries, resumed_by_same_command
from ..interrupts import exit_on_interrupt
from ..options import expand_option_groups
from .options import (
    NEW_TOKENS,
    NEW_TOKENS_OF_THINKERS,
    DecodingOptions,
    DrawOptions,
    ModelOptions,
    Out,
    PromptOptions,
    Shard,
    TaskOptions,
    run_folder,
)
from .stored import PROMPTS, TASKS, TASKS_DIGEST

if TYPE_CHECKING:
    import torch

_WAITING: Final = timedelta(weeks=1)
"""How long processes of a launch wait for the slowest; torch's own limit is ten minutes."""


@dataclass(frozen=True)
class Options:
    """The groups of options that decide what is drawn."""

    tasks: TaskOptions
    model: ModelOptions
    prompts: PromptOptions
    draw: DrawOptions
    decoding: DecodingOptions

    def check(self) -> None:
        """Refuse values out of their bounds, before torch is imported."""
        self.draw.check()
        self.decoding.check()
        self.model.check()
        self.prompts.check()


@dataclass(frozen=True)
class Prepared:
    """A loaded model with tasks and prompts that suit it."""

    options: Options
    model: Any
    tokenizer: Any  # pads on the left
    tasks: TaskSet
    form: PromptFormat  # of the prompts
    prompts: list[list[int]]  # tokens of that of each task
    drawing: Drawing
    counts: list[int]  # numbers of samples, rising


@expand_option_groups
def generate(
    options: Options,
    shard: Shard = False,
    out: Out = None,
) -> None:
    """Draw samples of every task into a run's folder, each with the model's raw log-probabilities.

    Processes of a launcher share the work. Behind `torchrun ... -m hf_fastdecode` a `--` comes before the command, or
    torchrun takes `--n` for an option of its own.

    A row leaves the batch once its completion is over. Each `generate` call is on the disk before the next begins: run
    the same command again after an interruption, and it draws what is missing, the same as without one.

    Examples:

        hf-fastdecode eval generate --limit 20 --n 8
        hf-fastdecode eval generate --model MODEL --task prompts.jsonl --n 16
        hf-fastdecode eval generate --model MODEL --task mbpp --n 64 --out runs/mbpp
        accelerate launch -m hf_fastdecode eval generate --model MODEL \\
            --task humaneval
        torchrun --nproc-per-node 2 -m hf_fastdecode -- eval generate \\
            --model MODEL --n 64
        CUDA_VISIBLE_DEVICES=1 hf-fastdecode eval generate --shard --model MODEL \\
            --task humaneval
    """
    _, processes = launched(options.model.device)
    folder = run_folder(out, options.tasks.task, options.model.model)
    chosen = load_suitable_tasks(options)
    with quiet_libraries(warnings=True):
        draw_samples(prepare(options, chosen), folder, shared=shard or processes > 1)


def launched(device: str) -> tuple[int, int]:
    """This process's number among those of a launcher, from 0, and how many there are; accelerate needs the device
    where there is no GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), timeout=_WAITING)
    return state.process_index, state.num_processes


def draw_samples(prepared: Prepared, folder: Path, *, shared: bool) -> None:
    """Draw what the folder lacks, with a bar, and say what was done."""
    from ...evals.generation import generate_samples, model_digest
    from ...measurement.rows import provenance

    tasks, model, options = prepared.tasks, prepared.model, prepared.options
    settings = RunSettings(
        model=options.model.model,
        weights=model_digest(model, prepared.tokenizer),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        task=tasks.name,
        prompts=prompts_digest([task.task_id for task in tasks.tasks], prepared.prompts),
        format=prepared.form.name,
        n=prepared.counts[-1],
        seed=options.draw.seed,
        rows=options.decoding.rows,
        drawing=prepared.drawing,
    )
    with forced_options(), resumed_by_same_command(folder):
        drawn = generate_samples(
            model,
            prepared.tokenizer,
            tasks.tasks,
            prepared.form,
            settings,
            folder,
            shared=shared,
            provenance=provenance(model.device)
            | {TASKS: options.tasks.to_json(), TASKS_DIGEST: tasks.digest, PROMPTS: asdict(options.prompts)},
        )
    note(f"{drawn:,} samples drawn into {folder}")
    if prepared.form.thinks:
        note(thoughts_line([sample for path in sample_files(folder) for sample in read_samples(path)]))


def load_suitable_tasks(options: Options) -> TaskSet:
    """Check options, load the tasks, and check that the prompt format suits them, without torch."""
    options.check()
    chosen = options.tasks.load()
    if not options.prompts.chat:  # a template is the tokenizer's
        options.prompts.make(chosen)
    return chosen


def prepare(options: Options, chosen: TaskSet) -> Prepared:
    """Load the model, and check that it has room for the tasks' prompts."""
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
            draw.max_new_tokens or (NEW_TOKENS_OF_THINKERS if form.thinks else NEW_TOKENS),
            way="stock" if decoding.stock else "shared",
            mode=decoding.mode,
            sampler=decoding.sampler,
            processed=decoding.processed,
        ),
        counts=draw.check(),
    )
    _check_room(prepared)
    if form.thinks:
        note(
            f"the chat template has the model think first; samples have up to {prepared.drawing.max_new_tokens:,} "
            "tokens with their thoughts (--max-new-tokens), which are cut"
        )
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
            raise InputError(
                f"the prompt of task {task.task_id} has {len(prompt)} tokens, and with {new_tokens} new ones that is "
                f"more than the {limit} positions of this model; lower --shots or --max-new-tokens"
            )
