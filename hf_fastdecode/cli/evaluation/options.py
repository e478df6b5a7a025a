"""Groups of options that commands share, and their checks. Without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import typer

from ...command_options import SHAPE, check_device, check_dtype, check_model, check_options
from ...errors import CommandError
from ...evals.prompts import FORMAT_NAMES, SHOTS, PromptFormat, prompt_format
from ...evals.records import Task
from ...evals.sandbox import BACKENDS, Limits, Sandbox, SandboxError, choose
from ...evals.tasks import SPLITS, TASK_NAMES, TaskSet, load_tasks
from ...option_values import parse_counts
from ..console import note

Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the run.", show_default="eval-runs/TASK-MODEL", file_okay=False),
]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Which tasks."""

    task: Annotated[str, typer.Option(help=f"{', '.join(name for name in TASK_NAMES if name != 'apps')}.")] = (
        "embedded"
    )
    data: Annotated[
        Path | None,
        typer.Option(
            help="Tasks from a .jsonl, .jsonl.gz or .json file in their published form, in place of the hub.",
            dir_okay=False,
        ),
    ] = None
    split: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(SPLITS)} or all.", show_default="test for mbpp, all for the others"),
    ] = None
    limit: Annotated[int | None, typer.Option(help="Only the first so many tasks.", show_default="all")] = None
    task_ids: Annotated[
        str | None, typer.Option(help="Only these tasks: ids with commas between.", show_default="all")
    ] = None

    def load(self, *, silent: bool = False) -> TaskSet:
        """Load these tasks, and say so where they are not the published ones, unless `silent`.

        Raises:
            CommandError: An option is wrong, or the tasks cannot be read, or have no tests.
        """
        if self.task == "apps":
            raise CommandError("APPS' tests cannot be run here; choose another --task, or `eval workloads hier`")
        ids = None if self.task_ids is None else [part.strip() for part in self.task_ids.split(",") if part.strip()]
        found = load_tasks(self.task, data=self.data, split=self.split, limit=self.limit, task_ids=ids)
        if found.note and not silent and os.environ.get("RANK", "0") == "0":  # of one process of a launch
            note(found.note)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes the same options in any working directory."""
        return asdict(self) | {"data": None if self.data is None else str(self.data.resolve())}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Options from `to_json`.

        Raises:
            TypeError: The content is something else.
        """
        return cls(**content | {"data": None if content["data"] is None else Path(content["data"])})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, where."""

    model: Annotated[
        str,
        typer.Option(
            help=f"`embedded`, a folder, an id on the Hugging Face Hub, or `{SHAPE}` and a named shape with random "
            f"weights, which is as fast as a trained model, such as `{SHAPE}7b-mha` or `{SHAPE}8b-gqa`."
        ),
    ] = "embedded"
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16, float16, or `auto`: float32 for the embedded model, the checkpoint's own for "
            "others, for a shape bfloat16 on a GPU."
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="`auto` (the first GPU, else the CPU), cpu, cuda, cuda:1, ...")] = "auto"

    def check(self) -> None:
        """Check the options before torch is imported.

        Raises:
            CommandError: There is no such model, dtype or device.
        """
        check_dtype(self.dtype)
        check_device(self.device)
        check_model(self.model)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How tasks are put to the model."""

    format: Annotated[
        str | None,
        typer.Option(
            help=f"Of the prompts: {', '.join(FORMAT_NAMES)}.",
            show_default="mbxp where tasks give a signature, else austin",
        ),
    ] = None
    shots: Annotated[int, typer.Option(help="Solved examples in prompts of the format austin.")] = SHOTS
    chat: Annotated[
        bool, typer.Option("--chat", help="Put tasks to a chat model, by its tokenizer's chat template.")
    ] = False

    def make(self, tasks: TaskSet, tokenizer: Any = None) -> PromptFormat:
        """The prompt format.

        Args:
            tasks: Of the run.
            tokenizer: The model's, for a chat template.
        """
        return prompt_format(tasks, self.format, shots=self.shots, chat_tokenizer=tokenizer if self.chat else None)


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """How samples are drawn."""

    n: Annotated[
        str,
        typer.Option(
            help="Numbers of samples, commas between: each task gets the largest, from which results for all n up to "
            "it follow exactly; each is timed."
        ),
    ] = "1,2,4,8,16,32"
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 is greedy, for --n 1.")] = 0.8
    top_p: Annotated[
        float, typer.Option(help="Draw from the smallest set of tokens of this probability; 1 is off. top_k is off.")
    ] = 0.95
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a sample.", min=1)] = 128
    seed: Annotated[int, typer.Option(help="The same seed draws the same samples.")] = 0

    def check(self) -> list[int]:
        """Check the options before torch is imported.

        Returns:
            The numbers of samples, rising.

        Raises:
            CommandError: An option is out of its bounds.
        """
        counts = parse_counts("n", self.n)
        if not (self.temperature == 0 or (self.temperature >= 1e-6 and math.isfinite(self.temperature))):
            raise CommandError(
                f"--temperature must be 0 (greedy) or at least 1e-6 and finite, got {self.temperature:g}"
            )
        if self.temperature == 0 and counts != [1]:
            raise CommandError(
                f"greedy samples of a task are all equal, got --n up to {counts[-1]}; pass --n 1 or sample"
            )
        if not 0 < self.top_p <= 1:
            raise CommandError(f"--top-p must be above 0 and at most 1, got {self.top_p:g}; 1 turns it off")
        if not 0 <= self.seed < 2**63:
            raise CommandError(f"--seed must be at least 0 and below 2**63, got {self.seed}")
        return counts


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How tokens are decoded, and how many rows at once."""

    mode: Annotated[str, typer.Option(help="How decode steps run: auto, eager, graph or compile.")] = "auto"
    sampler: Annotated[str, typer.Option(help="Who draws tokens: auto, hf or fast.")] = "auto"
    stock: Annotated[bool, typer.Option("--stock", help="Draw with transformers as it is, without hf_fastdecode.")] = (
        False
    )
    processed: Annotated[
        bool,
        typer.Option(
            "--processed", help="Keep log-probabilities after temperature and top-p too, in `sum_processed_logp`."
        ),
    ] = False
    rows: Annotated[
        int,
        typer.Option(
            help="Most rows of a `generate` call: tasks share a call until their samples are so many, and samples of "
            "a task come in chunks of so many. Part of what decides the samples.",
            min=1,
        ),
    ] = 128

    def check(self) -> None:
        """Check the options before torch is imported.

        Raises:
            CommandError: There is no such mode or sampler, or options exclude each other.
        """
        check_options(mode=self.mode, sampler=self.sampler)
        for name, value in (("mode", self.mode), ("sampler", self.sampler)):
            if self.stock and value != "auto":
                raise CommandError(f"--{name} {value} is for hf_fastdecode, --stock draws without it; leave one out")
        if self.processed and self.sampler == "fast":
            raise CommandError("--processed reads transformers' own sampler; leave out --sampler fast")


@dataclass(frozen=True, kw_only=True)
class SandboxOptions:
    """Where generated programs run."""

    sandbox: Annotated[
        str,
        typer.Option(
            help=f"Where generated programs run: {', '.join(('auto', *BACKENDS))}. `auto` takes the first that proves "
            "to isolate, and never `none`."
        ),
    ] = "auto"
    allow_unsafe_code: Annotated[
        bool, typer.Option("--allow-unsafe-code", help="Permit `--sandbox none`: programs run with all your rights.")
    ] = False
    workers: Annotated[
        int | None, typer.Option(help="Programs that run at once.", show_default="one per CPU", min=1)
    ] = None

    cpu_seconds: Annotated[
        float | None,
        typer.Option(
            help="CPU time of a program, over which it fails as a timeout, however busy the machine is.",
            show_default="10",
            min=0.1,
            max=3600,
        ),
    ] = None
    wall_seconds: Annotated[
        float | None,
        typer.Option(
            help="Time of the clock of a program, over which it fails as a timeout. Where other programs kept the CPU "
            "from it, it runs again alone, with 4 times as much.",
            show_default="3 times the CPU time, at least 30 for Python, else 60",
            min=0.1,
            max=3600,
        ),
    ] = None

    def limits(self, tasks: Sequence[Task]) -> Limits | None:
        """The limits of each program of these tasks, which are of one language; None for that language's own."""
        from ...evals.scoring import LANGUAGES

        if (self.cpu_seconds, self.wall_seconds) == (None, None):
            return None
        return LANGUAGES[tasks[0].language].limits_of(self.cpu_seconds, self.wall_seconds)

    def make(self, tasks: Sequence[Task]) -> Sandbox:
        """A sandbox for these tasks' languages.

        Raises:
            CommandError: There is none, a language's tools are missing, or a task's tests cannot be run.
        """
        from ...evals.scoring import LANGUAGES

        try:
            for language in sorted({task.language for task in tasks}):
                if missing := LANGUAGES[language].missing():
                    raise SandboxError(missing)
            found = choose(self.sandbox, allow_unsafe=self.allow_unsafe_code)
        except (SandboxError, ValueError) as error:
            raise CommandError(str(error)) from error
        for task in tasks:
            try:
                LANGUAGES[task.language].check_task(task)
            except ValueError as error:
                raise CommandError(f"{error}; mend the data, or leave the task out with --task-ids") from error
        return found


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What a report ranks by."""

    top_m: Annotated[int, typer.Option(help="Candidates that a ranking by mean log-probability may run.", min=1)] = 3
    deduplicate: Annotated[str, typer.Option(help="What makes samples duplicates: text or ast.")] = "text"

    def check(self) -> Literal["text", "ast"]:
        """What makes samples duplicates.

        Raises:
            CommandError: It is something else.
        """
        if self.deduplicate not in ("text", "ast"):
            raise CommandError(f"--deduplicate must be text or ast, got {self.deduplicate!r}")
        return cast(Literal["text", "ast"], self.deduplicate)


def run_folder(out: Path | None, task: str, model: str) -> Path:
    """The folder of a run."""
    return out or Path("eval-runs") / f"{task}-{Path(model).name or model}"
