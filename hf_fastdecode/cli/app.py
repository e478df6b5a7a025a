"""hf-fastdecode: demo, generate, inspect, convert-checkpoint, eval, bench, lm-eval, serve.

torch and transformers take seconds to import, so a command imports what it runs, after its input has been checked.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..assets import few_shot_prompt
from ..command_options import EMBEDDED, check_device, check_dtype, check_options, config_file, truth
from ..errors import CommandError, forced_options
from .bench.app import app as bench
from .console import ManyValues, OneLineErrors, cpu_is_busy, note, progress_bar, quiet_libraries
from .convert import convert_checkpoint
from .evaluation.app import app as evaluations
from .inspection.command import inspect
from .interrupts import exit_on_interrupt
from .lm_eval import PASS_ON, lm_eval
from .prompts import given_text, read_prompts
from .sampling import TEMPERATURE, TOP_P, Sampling, check_positive, sampling_from_options
from .serve import serve
from .tasks import DEFAULT_TASK, SHOTS, pick_tasks

app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench, name="bench")
app.add_typer(evaluations, name="eval")
app.command("inspect", cls=ManyValues)(inspect)
app.command("convert-checkpoint")(convert_checkpoint)
app.command("lm-eval", context_settings=PASS_ON, no_args_is_help=True)(lm_eval)
app.command("serve", context_settings=PASS_ON)(serve)

_MODEL_HELP = "`embedded`, a folder, or an id on the Hugging Face Hub."
_DEVICE_HELP = "`auto` (the first GPU, else the CPU), cpu, cuda, cuda:1, ..."
_SEED_HELP = "Of torch's random generator; the same seed draws the same completions."


def _show_version(asked: bool) -> None:
    if asked:
        print(f"hf-fastdecode {__version__} (transformers {_installed('transformers')}, torch {_installed('torch')})")
        raise typer.Exit


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Fast decoding for Hugging Face Transformers where many sequences share context.

    Many completions of one prompt read the same keys and values: hf_fastdecode computes, stores and reads them once.

    Start with `hf-fastdecode demo`.

    Exit codes: 0; 2 for bad input, 1 for a check that failed or an error of ours, each told in one line on stderr; 130
    after Ctrl-C; 141 when the reader of stdout went away. With HF_FASTDECODE_TRACEBACK=1 in the environment, errors
    show their tracebacks.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    n: Annotated[int, typer.Option(help="Completions to draw.")] = 32,
    shots: Annotated[int, typer.Option(help="Solved examples before the task, of about 150 tokens each.")] = SHOTS,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens in one completion.")] = 96,
    temperature: Annotated[float, typer.Option(help="Divides the logits; above 0.")] = TEMPERATURE,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set of this probability; 1 is off.")] = TOP_P,
    seed: Annotated[int, typer.Option(help=_SEED_HELP)] = 0,
    task_id: Annotated[int, typer.Option(help="One of the embedded tasks.")] = DEFAULT_TASK,
    best: Annotated[int, typer.Option(help="Completions to show, best mean log-probability first.")] = 5,
    device: Annotated[str, typer.Option(help=_DEVICE_HELP)] = "auto",
) -> None:
    """Compare stock and shared decoding on the embedded model. Needs no download.

    Draws N completions of one few-shot task twice, with stock transformers and with shared context, in float32: shows
    tokens prefilled, bytes of KV cache and seconds, checks that both drew the same tokens (exit code 1 if not), ranks
    the completions by mean log-probability, and runs the task's tests on them. Where other programs keep the CPU busy,
    OMP_NUM_THREADS=1 in the environment makes the seconds steadier.

    Examples:

        hf-fastdecode demo
        hf-fastdecode demo --n 128 --shots 12
        hf-fastdecode demo --task-id 117 --seed 3 --best 10
    """
    sampling = Sampling(n, max_new_tokens, temperature, top_p, seed=seed)
    check_positive("best", best)
    check_options()
    check_device(device)
    (task,) = pick_tasks([task_id], shots)
    busy = cpu_is_busy()
    with quiet_libraries():
        with exit_on_interrupt():
            from rich.console import Console

            from .demo import run_demo
            from .devices import pick_device
            from .models import load_model, machine
            from .render import demo_text

        place = pick_device(device)
        model, tokenizer = load_model(EMBEDDED, "float32", place)
        with forced_options():
            found = run_demo(
                model,
                tokenizer,
                task,
                sampling,
                shots=shots,
                bar=progress_bar,
                check_progress=sys.stderr.isatty(),
            )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = f"Embedded model ({parameters / 1e6:.1f} M parameters)"
    Console().print(demo_text(found, machine=machine(place), model=name, best=best))
    if busy and place.type == "cpu":
        print("Other programs keep the CPU busy: with OMP_NUM_THREADS=1 before it the seconds are steadier.")


@app.command()
def generate(
    model: Annotated[str, typer.Option(help=_MODEL_HELP)] = "embedded",
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; repeat it for more, which are padded on the left.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="A UTF-8 text file: one prompt, taken verbatim; repeat it for more, which are padded on the left. "
            "Without any prompt: stdin."
        ),
    ] = None,
    task_id: Annotated[
        list[int] | None,
        typer.Option(
            help="The few-shot prompt of this embedded task, which the embedded model completes; repeat it for more."
        ),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(help="Solved examples in the prompt of a --task-id.", show_default=str(SHOTS))
    ] = None,
    n: Annotated[
        int | None, typer.Option(help="Completions of each prompt.", show_default="4, with --greedy 1")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens in one completion.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="Divides the logits; above 0.", show_default=str(TEMPERATURE))
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the smallest set of this probability; 1 is off.", show_default=str(TOP_P)),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Draw from this many most likely tokens. 0 is off; transformers' own default is 50, which cuts the "
            "tail without a word.",
            show_default="0",
        ),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token at each step.")] = False,
    seed: Annotated[int, typer.Option(help=_SEED_HELP)] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends a completion and is cut off; repeat it for more.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16, float16, or `auto`: float32 for the embedded model, the checkpoint's own "
            "for others."
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help=_DEVICE_HELP)] = "auto",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="One JSON object per completion and line: prompt and sample (indices), text, tokens, mean_logp "
            "(natural log, of the model's own probabilities), finish (stop or length).",
        ),
    ] = False,
    stock: Annotated[
        bool,
        typer.Option(
            "--stock", help="Run without hf_fastdecode; in float32 the same seed draws the same completions."
        ),
    ] = False,
    mode: Annotated[
        str, typer.Option(help="How steps run: auto, eager, graph or compile, as `hf_fastdecode.enable` has them.")
    ] = "auto",
    backend: Annotated[
        str,
        typer.Option(help="What attends in a step: auto, triton, flash, cudnn, efficient, cpu or plain; likewise."),
    ] = "auto",
    sampler: Annotated[
        str, typer.Option(help="Who draws tokens: auto, hf (transformers, draw for draw) or fast; likewise.")
    ] = "auto",
    fuse_projections: Annotated[
        str,
        typer.Option(
            help="Compute projections of one input concurrently, in captured steps: auto, true or false; likewise."
        ),
    ] = "auto",
    explain: Annotated[bool, typer.Option("--explain", help="Tell on stderr which path ran and why.")] = False,
) -> None:
    """Draw completions of prompts with any decoder-only model.

    Completions go to stdout, everything else to stderr. Prompts are taken as they are, without a chat template. Of a
    checkpoint's own generation defaults only the special tokens are used: what is drawn is what the options say.

    Examples:

        hf-fastdecode generate --task-id 127 --shots 10 --n 16 --explain
        hf-fastdecode generate --model gpt2 --prompt-file story.txt --n 64 --json > all.jsonl
        hf-fastdecode generate --model gpt2 --prompt-file story.txt --n 256 --dtype bfloat16 --mode compile
        cat prompt.txt | hf-fastdecode generate --greedy --stop "[DONE]" --explain
    """
    sampling = sampling_from_options(
        n=n,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        greedy=greedy,
        seed=seed,
    )
    if explain and stock:
        raise CommandError("--explain tells what hf_fastdecode did, and --stock runs without it; leave one out")
    given_options = {"mode": mode, "backend": backend, "sampler": sampler, "fuse-projections": fuse_projections}
    if stock and (given := next((f"--{key} {text}" for key, text in given_options.items() if text != "auto"), None)):
        raise CommandError(f"{given} is for hf_fastdecode, and --stock runs without it; leave one out")
    if "" in (stops := stop or []):
        raise CommandError("--stop got an empty string, which would end every completion at once; leave it out")
    stops = [given_text(string, "--stop") for string in stops]
    fuse = truth(fuse_projections)
    if not stock:
        check_options(mode=mode, backend=backend, sampler=sampler, fuse_projections=fuse)
    check_dtype(dtype)
    check_device(device)
    config_file(model)
    if shots is not None and not task_id:
        raise CommandError(f"--shots {shots} is for the prompt of a --task-id; give one, or leave --shots out")
    if task_id and (prompt or prompt_file):
        raise CommandError("--task-id is a prompt, and another was given; leave one out")
    if task_id:
        examples = SHOTS if shots is None else shots
        texts = [few_shot_prompt(task, examples) for task in pick_tasks(task_id, examples)]
    else:
        texts = read_prompts(prompt or [], prompt_file or [], sys.stdin)
    with quiet_libraries(warnings=True):
        with exit_on_interrupt():
            from .devices import pick_device
            from .generate import generate as run
            from .models import load_model, machine
            from .render import completion_heading, summary

        place = pick_device(device)
        loaded, tokenizer = load_model(model, dtype, place)
        with progress_bar("generate", max_new_tokens) as on_step, forced_options():
            options = {"mode": mode, "backend": backend, "sampler": sampler, "fuse_projections": fuse}
            how = None if stock else options
            generated = run(loaded, tokenizer, texts, sampling, stop=stops, options=how, on_step=on_step)
    for completion in generated.completions:
        if as_json:
            print(json.dumps({**asdict(completion), "mean_logp": round(completion.mean_logp, 5)}), flush=True)
        else:
            if len(generated.completions) > 1:
                note(completion_heading(completion))
            print(completion.text, end="" if completion.text.endswith("\n") else "\n", flush=True)
    if explain:
        note(generated.report)
    note(summary(generated, machine=machine(place), dtype=str(loaded.dtype).removeprefix("torch.")))
