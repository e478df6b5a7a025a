"""From options to a run: tasks, prompts, model, settings."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...command_errors import CommandError
from ...command_options import check_device, check_dtype, check_model, check_options
from ...evals.generation.units import WHOLE, Shard
from ...evals.prompts import PromptFormat, prompt_format
from ...evals.tasks import TaskSet, load_tasks
from ...interrupts import exit_on_interrupt
from .options import check_drawing, parse_counts, parse_ids

if TYPE_CHECKING:
    from ...evals.generation.settings import RunSettings

SELECTION = "selection"


@dataclass(frozen=True)
class Selection:
    """Which tasks: options of `load_tasks`."""

    task: str
    data: str | None
    split: str | None
    limit: int | None
    task_ids: list[str] | None

    @classmethod
    def of(
        cls, task: str, data: Path | None, split: str | None = None, limit: int | None = None, ids: str | None = None
    ) -> Selection:
        """From options of a command."""
        return cls(task, None if data is None else str(data.resolve()), split, limit, parse_ids(ids))

    @classmethod
    def of_folder(cls, folder: Path) -> Selection:
        """That of a run, from its settings.

        Raises:
            CommandError: The folder has none.
        """
        return cls(**_settings_of(folder)["provenance"][SELECTION])

    def load(self) -> TaskSet:
        """The tasks that it selects."""
        data = None if self.data is None else Path(self.data)
        return load_tasks(self.task, data=data, split=self.split, limit=self.limit, task_ids=self.task_ids)


def samples_per_task(folder: Path) -> int:
    """How many samples of each task a run draws.

    Raises:
        CommandError: The folder is not that of a run.
    """
    return int(_settings_of(folder)["n"])


def _settings_of(folder: Path) -> dict[str, Any]:
    path = folder / "settings.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        Selection(**found["provenance"][SELECTION])
        int(found["n"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{folder} is not the folder of a run: {path.name} is missing or damaged; name another, or a file of "
            "samples with its --task"
        ) from error
    return found


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """Options of drawing, as a command line gives them."""

    model: str
    dtype: str
    device: str
    format: str | None
    shots: int
    chat: bool
    counts: str
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    rows: int
    mode: str
    sampler: str
    stock: bool

    def check(self) -> list[int]:
        """Refuse what cannot be before anything is loaded; returns the numbers of samples.

        Raises:
            CommandError: An option is out of its bounds.
        """
        counts = parse_counts(self.counts)
        check_drawing(
            counts=counts,
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens,
            rows=self.rows,
        )
        check_options(mode=self.mode, sampler=self.sampler)
        for name, value in (("mode", self.mode), ("sampler", self.sampler)):
            if self.stock and value != "auto":
                raise CommandError(f"--{name} {value} is for hf_fastdecode, --stock draws without it; leave one out")
        if not 0 <= self.seed < 2**63:
            raise CommandError(f"--seed must be at least 0 and below 2**63, got {self.seed}")
        check_dtype(self.dtype)
        check_device(self.device)
        check_model(self.model)
        return counts


@dataclass(frozen=True)
class Prepared:
    """All that a run is made of.

    Attributes:
        model: On its device.
        tokenizer: Its tokenizer, padding on the left.
        tasks: Of the run.
        form: Of the prompts.
        settings: Of the run.
        counts: Numbers of samples, rising.
        shard: The part that this process draws.
        provenance: For the folder's settings.
        device: In words.
    """

    model: Any
    tokenizer: Any
    tasks: TaskSet
    form: PromptFormat
    settings: RunSettings
    counts: list[int]
    shard: Shard
    provenance: dict[str, Any]
    device: str

    @property
    def is_first(self) -> bool:
        """Whether this process does what one of several must."""
        return self.shard.number == 1


def prepare(options: DrawOptions, selection: Selection, shard: str | None) -> Prepared:
    """Load tasks and model, and check that they go together.

    Raises:
        CommandError: They cannot be loaded, or a prompt leaves no room for a completion.
    """
    counts = options.check()
    part = Shard.parse(shard) if shard else WHOLE
    tasks = selection.load()
    if not options.chat:
        prompt_format(tasks, options.format, shots=options.shots)  # a format that does not suit says so before torch
    with exit_on_interrupt():
        from ...devices import pick_device
        from ...evals.generation.settings import RunSettings, prompts_digest, weights_digest
        from ...evals.provenance import versions
        from ..models import load_model, machine
    place = pick_device(options.device)
    if shard is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState()
        part = Shard(state.process_index + 1, state.num_processes)
        place = state.device if options.device == "auto" else place
    model, tokenizer = load_model(options.model, options.dtype, place)
    form = prompt_format(
        tasks, options.format, shots=options.shots, chat_tokenizer=tokenizer if options.chat else None
    )
    prompts = [form.prompt(task) for task in tasks.tasks]
    _check_room(model, tokenizer, form, tasks, prompts, options.max_new_tokens)
    settings = RunSettings(
        model=options.model,
        weights=weights_digest(model),
        task=tasks.name,
        prompts=prompts_digest([task.task_id for task in tasks.tasks], prompts),
        format=form.name,
        n=counts[-1],
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        rows=options.rows,
        way="stock" if options.stock else "shared",
        mode=options.mode,
        sampler=options.sampler,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
    )
    words = machine(model.device)
    provenance = {**versions(), "device": words, SELECTION: asdict(selection), "tasks": tasks.origin}
    return Prepared(model, tokenizer, tasks, form, settings, counts, part, provenance, words)


def _check_room(
    model: Any, tokenizer: Any, form: PromptFormat, tasks: TaskSet, prompts: list[str], max_new_tokens: int
) -> None:
    """Refuse prompts that are longer than the model's positions allow."""
    from ...configs import max_positions

    limit = max_positions(model.config)
    if limit is None:
        return
    for task, prompt in zip(tasks.tasks, prompts, strict=True):
        length = len(tokenizer(prompt, add_special_tokens=form.special_tokens, verbose=False).input_ids)
        if length + max_new_tokens > limit:
            raise CommandError(
                f"the prompt of task {task.task_id} has {length} tokens, and with {max_new_tokens} new ones that is "
                f"more than the {limit} positions of this model; lower --shots or --max-new-tokens"
            )
