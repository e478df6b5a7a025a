"""Options that the commands share, and their checks, without torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final

import typer

from ...command_errors import CommandError
from ...evals.prompts import FORMAT_NAMES, SHOTS
from ...evals.sandbox import BACKENDS
from ...evals.tasks import SPLITS, TASK_NAMES

DEFAULT_COUNTS: Final = "1,2,4,8,16,32"

Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the run.", show_default="eval-runs/TASK-MODEL", file_okay=False),
]
TaskName = Annotated[str, typer.Option("--task", help=f"{', '.join(TASK_NAMES)}.")]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Tasks from a .jsonl, .jsonl.gz or .json file in their published form, in place of the hub.",
        dir_okay=False,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(SPLITS)} or all.", show_default="test for mbpp, all for the others"),
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many tasks.", show_default="all")]
TaskIds = Annotated[str | None, typer.Option(help="Only these tasks: ids with commas between.", show_default="all")]
Model = Annotated[str, typer.Option(help="`embedded`, a folder, or an id on the Hugging Face Hub.")]
Dtype = Annotated[str, typer.Option(help="Of the parameters: float32, bfloat16, float16, or `auto`.")]
Device = Annotated[str, typer.Option(help="`auto` (the first GPU, else the CPU), cpu, cuda, cuda:1, ...")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=f"Of the prompts: {', '.join(FORMAT_NAMES)}.",
        show_default="mbxp where tasks give a signature, else austin",
    ),
]
Shots = Annotated[int, typer.Option(help="Solved examples in prompts of the format austin.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put tasks to a chat model, by its tokenizer's chat template.")]
Counts = Annotated[
    str,
    typer.Option(
        "--n",
        help="Numbers of samples, commas between: each task gets the largest, from which results for all n up to it "
        "follow exactly; each is timed.",
    ),
]
Temperature = Annotated[float, typer.Option(help="Divides the logits; 0 is greedy, for --n 1.")]
TopP = Annotated[
    float,
    typer.Option(help="Draw from the smallest set of tokens of this probability; 1 is off. top_k is off."),
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Most tokens of a sample.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same samples.")]
Rows = Annotated[
    int,
    typer.Option(
        "--rows",
        help="Most rows of a `generate` call: tasks share a call until their samples are so many, and samples of a "
        "task come in chunks of so many. Part of what decides the samples.",
    ),
]
Mode = Annotated[str, typer.Option(help="How decode steps run: auto, eager, graph or compile.")]
SamplerName = Annotated[str, typer.Option("--sampler", help="Who draws tokens: auto, hf or fast.")]
Stock = Annotated[bool, typer.Option("--stock", help="Draw with transformers as it is, without hf_fastdecode.")]
ShardText = Annotated[
    str | None,
    typer.Option(
        "--shard",
        help="i/N: draw the i-th of N parts only. `accelerate launch` does so itself.",
        show_default="1/1",
    ),
]
SandboxName = Annotated[
    str,
    typer.Option(
        "--sandbox",
        help=f"Where generated programs run: {', '.join(('auto', *BACKENDS))}. `auto` takes the first that proves to "
        "isolate, and never `none`.",
    ),
]
Unsafe = Annotated[
    bool, typer.Option("--allow-unsafe-code", help="Permit `--sandbox none`: programs run with all your rights.")
]
Workers = Annotated[int | None, typer.Option(help="Programs that run at once.", show_default="one per CPU", min=1)]
TopM = Annotated[int, typer.Option("--top-m", help="Candidates that a ranking by mean log-probability may run.")]
Dedup = Annotated[str, typer.Option("--deduplicate", help="What makes samples duplicates: text or ast.")]
LatencyPrompts = Annotated[
    int, typer.Option("--latency", help="Prompts that are timed for each n, with hf_fastdecode and without; 0: none.")
]

DEFAULT_SHOTS: Final = SHOTS


def parse_counts(text: str) -> list[int]:
    """Numbers of samples, rising, from ``1,4,8``.

    Raises:
        CommandError: One is not a whole number of at least 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not (part.isascii() and part.isdecimal() and int(part) >= 1)]:
        raise CommandError(f"--n must be whole numbers of at least 1 with commas between, got {wrong[0]!r}")
    return sorted(set(map(int, parts)))


def parse_ids(text: str | None) -> list[str] | None:
    """Task ids from a list with commas."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def check_drawing(*, counts: list[int], temperature: float, top_p: float, max_new_tokens: int, rows: int) -> None:
    """Refuse values that nothing can be drawn with.

    Raises:
        CommandError: One is out of its bounds.
    """
    if not (temperature == 0 or (temperature >= 1e-6 and math.isfinite(temperature))):
        raise CommandError(f"--temperature must be 0 (greedy) or at least 1e-6 and finite, got {temperature:g}")
    if temperature == 0 and counts != [1]:
        raise CommandError(f"greedy samples of a task are all equal, got --n up to {counts[-1]}; pass --n 1 or sample")
    if not 0 < top_p <= 1:
        raise CommandError(f"--top-p must be above 0 and at most 1, got {top_p:g}; 1 turns it off")
    for name, value in (("max-new-tokens", max_new_tokens), ("rows", rows)):
        if value < 1:
            raise CommandError(f"--{name} must be at least 1, got {value}; leave it out for its default")


def run_folder(out: Path | None, task: str, model: str) -> Path:
    """The folder of a run."""
    return out or Path("eval-runs") / f"{task}-{Path(model).name or model}"
