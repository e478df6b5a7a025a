"""``eval generate`` and ``eval latency``: tasks, prompts and a model from options; samples, and times of drawing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from ...errors import InputError
from ...evals.prompts import PromptFormat
from ...evals.records import read_samples, thoughts_line
from ...evals.run_folder import LATENCY, SETTINGS, Drawing, RunSettings, prompts_digest, read_settings, sample_files
from ...evals.tasks import TaskSet
from ...files import read_rows
from ...measurement.rows import Case, provenance, run
from ...model_names import max_positions
from ..console import forced_options, note, quiet_libraries, resumed_by_same_command
from ..interrupts import exit_on_interrupt
from ..options import Sampler, check_enable_options, expand_option_groups, pick_device, split_values
from .options import (
    NEW_TOKENS,
    NEW_TOKENS_OF_THINKERS,
    PROMPTS,
    TASKS,
    TASKS_DIGEST,
    DecodingOptions,
    DrawOptions,
    ModelOptions,
    Out,
    PromptOptions,
    Shard,
    TaskOptions,
    run_folder,
)

if TYPE_CHECKING:
    import torch


_WAITING: Final = timedelta(weeks=1)
"""How long processes of a launch wait for the slowest; torch's default is ten minutes."""


@dataclass(frozen=True)
class Options:
    tasks: TaskOptions
    model: ModelOptions
    prompts: PromptOptions
    draw: DrawOptions
    decoding: DecodingOptions


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
def generate(options: Options, shard: Shard = False, out: Out = None) -> None:
    """Draw samples of every task into a run's folder, each with the model's raw log-probabilities.

    Processes of a launcher share the work. After `torchrun ... -m hf_fastdecode` a `--` comes before the command, or
    torchrun takes `--n` for one of its options.

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
    """Draw the samples that the folder lacks, with a progress bar, and report the number."""
    from ...evals.generation import generate_samples, model_digest

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
    """Load the tasks, and check that the prompt format suits them, without torch."""
    chosen = options.tasks.load()
    if not options.prompts.chat:  # a template is the tokenizer's
        options.prompts.make(chosen)
    return chosen


def prepare(options: Options, chosen: TaskSet) -> Prepared:
    """Load the model, and check that the tasks' prompts fit into its context."""
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
        counts=draw.counts,
    )
    _check_positions(prepared)
    if form.thinks:
        note(
            f"the chat template has the model think first; samples have up to {prepared.drawing.max_new_tokens:,} "
            "tokens with their thoughts (--max-new-tokens), which are cut"
        )
    return prepared


def _device(name: str) -> torch.device:
    if name == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        return PartialState().device
    return pick_device(name)


def _check_positions(prepared: Prepared) -> None:
    limit, new_tokens = max_positions(prepared.model.config), prepared.drawing.max_new_tokens
    for task, prompt in zip(prepared.tasks.tasks, prepared.prompts, strict=True):
        if limit is not None and len(prompt) + new_tokens > limit:
            raise InputError(
                f"the prompt of task {task.task_id} has {len(prompt)} tokens, and with {new_tokens} new ones that is "
                f"more than the {limit} positions of this model; lower --shots or --max-new-tokens"
            )


@expand_option_groups
def latency(
    tasks: TaskOptions,
    model: ModelOptions,
    prompts: PromptOptions,
    draw: DrawOptions,
    mode: str = typer.Option("auto", help="How shared decode steps run: auto, eager, graph; several with commas."),
    sampler: Sampler = "auto",
    calls: int = typer.Option(3, "--prompts", help="Prompts that are timed for each n: the first ones.", min=1),
    out: Out = None,
) -> None:
    """Time drawing n samples of one prompt, with hf_fastdecode and without, into latency.csv of a run's folder.

    Rows end by their stop rules, as when samples are scored. Rows have the device, versions, commit (`$COMMIT` when it
    is set) and command. Run the same command again after an interruption, and it goes on.

    Examples:

        hf-fastdecode eval latency --n 1,8,32
        hf-fastdecode eval latency --model shape:7b-mha --task mbpp --n 1,16,256 \\
            --mode eager,graph --out runs/7b
    """
    modes = split_values(mode)
    for one in modes:
        check_enable_options(mode=one)
    folder = run_folder(out, tasks.task, model.model)
    options = Options(tasks, model, prompts, draw, DecodingOptions(sampler=sampler))
    chosen = load_suitable_tasks(options)
    with quiet_libraries(warnings=True):
        time_samples(prepare(options, chosen), folder, calls, modes)


@dataclass(frozen=True)
class _Timed(Case):
    """Drawing n samples of the first prompts of a run; `about` are columns that say what is drawn."""

    n: int
    about: Mapping[str, Any]

    def columns(self) -> dict[str, Any]:
        return {**self.about, "n": self.n}


def time_samples(prepared: Prepared, folder: Path, prompts: int, modes: list[str]) -> None:
    """Measure the rows that the folder's latency.csv lacks; raises if it has rows of another model or task."""
    from ...evals.generation import measure_latency

    options = prepared.options
    about = {
        "model": options.model.model,
        "dtype": str(prepared.model.dtype).removeprefix("torch."),
        "task": prepared.tasks.name,
        "format": prepared.form.name,
        "temperature": prepared.drawing.temperature,
        "top_p": prepared.drawing.top_p,
        "prompt_tokens": max(map(len, prepared.prompts[:prompts])),
        "new_tokens": prepared.drawing.max_new_tokens,
    }
    path, where = folder / LATENCY, provenance(prepared.model.device)
    for row in read_rows(path) if path.exists() else []:
        _refuse_others(f"{path} has rows of", row, about, "delete the file")
    _check_run(folder, about)
    shared = {"shared" if mode == "auto" else f"shared:{mode}": mode for mode in modes}

    def measure(case: _Timed, way: str) -> dict[str, Any]:
        drawing = replace(prepared.drawing, way="stock", mode="auto", sampler="auto", processed=False)
        if way in shared:
            drawing = replace(drawing, way="shared", mode=shared[way], sampler=prepared.drawing.sampler)
        with forced_options():
            row = measure_latency(
                prepared.model,
                prepared.tokenizer,
                prepared.form,
                prepared.tasks.tasks[:prompts],
                case.n,
                drawing,
                device=where["device"],
                seed=options.draw.seed,
            )
        measured = {name: value for name, value in asdict(row).items() if name not in ("way", "n", "device")}
        return {name: None if value != value else value for name, value in measured.items()}  # NaN: unknown

    rows = run([_Timed(n, about) for n in prepared.counts], [*shared, "stock"], measure, provenance=where, out=path)
    note(f"{len(rows)} rows in {path}")


def _check_run(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse the folder of a run that draws something else: its report would set this latency against its accuracy."""
    kept = read_settings(folder) if (folder / SETTINGS).exists() else {}
    if kept:
        kept = {"new_tokens": kept.get("max_new_tokens")} | {name: kept.get(name) for name in _OF_A_RUN}
    _refuse_others(f"{folder} holds a run with", kept, about, "time with the run's options")


_OF_A_RUN: Final = ("model", "task", "format", "temperature", "top_p")


def _refuse_others(what: str, kept: Mapping[str, Any], about: Mapping[str, Any], remedy: str) -> None:
    for name, before in kept.items():
        if name in about and str(before) != str(about[name]):
            words = f"another {name.replace('_', ' ')} ({before}, now {about[name]})"
            raise InputError(f"{what} {words}; name another --out, or {remedy}")
