"""`hf-fastdecode demo`: one few-shot task, many completions, stock and shared side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import typer

from ..measurement.rows import device_name
from ..model_names import EMBEDDED
from . import options
from .console import forced_options, quiet_libraries
from .interrupts import exit_on_interrupt

DEFAULT_TASK: Final = 127
"""A task that some samples solve and others do not, so that ranking them has a point."""

_SHOWN: Final = 5  # completions, best mean log-probability first

SHOTS: Final = 9
"""Solved examples before a task by default."""


def demo(
    n: int = typer.Option(32, help="Completions to draw."),
    shots: int = typer.Option(SHOTS, help="Solved examples before the task, of about 150 tokens each."),
    max_new_tokens: options.MaxNewTokens = 96,
    temperature: options.Temperature = options.TEMPERATURE,
    top_p: options.TopP = options.TOP_P,
    seed: options.Seed = 0,
    task_id: int = typer.Option(DEFAULT_TASK, help="One of the embedded tasks."),
    device: options.Device = "auto",
) -> None:
    """Compare stock and shared decoding on the embedded model. Needs no download.

    Draws N completions of one few-shot task twice, with stock transformers and with shared context, in float32: shows
    tokens prefilled, bytes of KV cache and seconds, checks that both drew the same tokens (exit code 1 if not), ranks
    the completions by mean log-probability, and runs the task's tests on them. Where other programs keep the CPU busy,
    OMP_NUM_THREADS=1 in the environment makes the seconds steadier.

    Examples:

        hf-fastdecode demo
        hf-fastdecode demo --n 128 --shots 12
        hf-fastdecode demo --task-id 117 --seed 3
    """
    sampling = options.Sampling(n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    options.check_enable_options()
    options.check_device(device)
    (task,) = options.pick_tasks([task_id], shots)
    with quiet_libraries():
        with exit_on_interrupt():
            from rich.console import Console

            from .demo_run import demo_text, run_demo
            from .models import load_model

        target = options.pick_device(device)
        model, tokenizer = load_model(EMBEDDED, "float32", target)
        with forced_options():
            found = run_demo(model, tokenizer, task, sampling, shots=shots)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = f"Embedded model ({parameters / 1e6:.1f} M parameters)"
    Console().print(demo_text(found, task, shots, machine=device_name(target), model=name, best=_SHOWN))
    print(_next_steps(Path(sys.executable)))


def _next_steps(python: Path) -> str:
    """Next steps after the demo, by the interpreter that ran it, as it is named from the working folder."""
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    pages = Path(__file__).resolve().parents[2] / "docs" / "README.md"
    lines = [
        "",
        "Next, with your model:",
        f"  {python} script.py, in which hf_fastdecode.enable(model)",
        "    stands before model.generate(...)",
        f"  {python.with_name('hf-fastdecode')} generate --model MODEL --prompt TEXT --n 8",
    ]
    if pages.exists():  # in a clone
        lines.append("README.md has a quickstart, docs/README.md lists all pages.")
    return "\n".join(lines)
