"""`hf-fastdecode generate`: completions of prompts, by any model that generates text."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import typer

from ..assets import few_shot_prompt
from ..dtypes import parse_dtype
from ..errors import InputError
from ..measurement.rows import device_name
from ..model_names import config_file
from . import options
from .console import forced_options, note, progress_bar, quiet_libraries
from .demo import SHOTS
from .interrupts import exit_on_interrupt


@options.expand_option_groups
def generate(
    *,
    model: options.Model = "embedded",
    prompt: list[str] | None = typer.Option(None, help="A prompt; repeat it for more, which are padded on the left."),
    prompt_file: list[Path] | None = typer.Option(
        None,
        help="A UTF-8 text file: one prompt, taken verbatim; repeat it for more, which are padded on the left. "
        "Without any prompt: stdin.",
    ),
    task_id: list[int] | None = typer.Option(
        None, help="The few-shot prompt of this embedded task, which the embedded model completes; repeat it for more."
    ),
    shots: int | None = typer.Option(
        None, help="Solved examples in the prompt of a --task-id.", show_default=str(SHOTS)
    ),
    sampling: options.Sampling,
    stop: list[str] | None = typer.Option(
        None, help="A string that ends a completion and is cut off; repeat it for more."
    ),
    dtype: str = typer.Option(
        "auto",
        help="float32, bfloat16, float16, or `auto`: float32 for the embedded model, the checkpoint's for others.",
    ),
    device: options.Device = "auto",
    as_json: bool = typer.Option(
        False,
        "--json",
        help="One JSON object per completion and line: prompt and sample (indices), text, tokens, mean_logp "
        "(natural log, of the model's probabilities), finish (stop or length).",
    ),
    how: options.EnableOptions,
    explain: bool = typer.Option(False, "--explain", help="Tell on stderr which path ran and why."),
) -> None:
    """Draw completions of prompts with any model that generates text.

    Multimodal models are given the text alone; an encoder-decoder encodes the prompt and draws what follows. A LoRA
    adapter's folder is loaded into its base model, which needs `pip install peft`.

    Completions go to stdout, everything else to stderr. For a file of prompts, `hf-fastdecode eval generate --task
    prompts.jsonl` writes samples into a folder, goes on after an interruption, and by `--shard` in several processes
    (lines such as `{"prompt": "..."}`). Prompts are taken as they are, without a chat template. Only
    the special tokens of a checkpoint's generation defaults are used: sampling follows the options alone.
    `--mode`, `--backend`, `--sampler`, `--fuse-projections`, `--max-rows` and `--min-saved-tokens` are arguments of
    `hf_fastdecode.enable`.

    Examples:

        hf-fastdecode generate --task-id 127 --shots 10 --n 16 --explain
        hf-fastdecode generate --model gpt2 --prompt-file story.txt --n 64 --json \\
            > all.jsonl
        hf-fastdecode generate --model gpt2 --prompt-file story.txt --n 256 \\
            --dtype bfloat16 --mode graph
        cat prompt.txt | hf-fastdecode generate --greedy --stop "[DONE]" --explain
    """
    if explain and how.stock:
        raise InputError("--explain tells what hf_fastdecode did, and --stock runs without it; leave one out")
    if "" in (stops := stop or []):
        raise InputError("--stop got an empty string, which would end every completion at once; leave it out")
    stops = [given_text(string, "--stop") for string in stops]
    enable = how.arguments()
    dtype = parse_dtype(dtype)
    options.check_device(device)
    config_file(model)
    if shots is not None and not task_id:
        raise InputError(f"--shots {shots} is for the prompt of a --task-id; give one, or leave --shots out")
    if task_id and (prompt or prompt_file):
        raise InputError("--task-id is a prompt, and another was given; leave one out")
    if task_id:
        examples = SHOTS if shots is None else shots
        texts = [few_shot_prompt(task, examples) for task in options.pick_tasks(task_id, examples)]
    else:
        texts = read_prompts(prompt or [], prompt_file or [], sys.stdin)
    with quiet_libraries(warnings=True):
        with exit_on_interrupt():
            from .models import completion_heading, load_model, run_generate, summary

        target = options.pick_device(device)
        loaded, tokenizer = load_model(model, dtype, target, encoders=True)
        with progress_bar("generate", sampling.max_new_tokens) as on_step, forced_options():
            generated = run_generate(loaded, tokenizer, texts, sampling, stop=stops, options=enable, on_step=on_step)
    for completion in generated.completions:
        if as_json:
            print(json.dumps({**asdict(completion), "mean_logp": round(completion.mean_logp, 5)}), flush=True)
        else:
            if len(generated.completions) > 1:
                note(completion_heading(completion))
            print(completion.text, end="" if completion.text.endswith("\n") else "\n", flush=True)
    if explain:
        note(generated.report)
    note(summary(generated, machine=device_name(target), dtype=str(loaded.dtype).removeprefix("torch.")))


def read_prompts(prompts: Sequence[str], files: Sequence[Path], stdin: TextIO) -> list[str]:
    """The prompts, verbatim: those on the command line, or one from each file, or one from stdin."""
    if prompts and files:
        raise InputError("--prompt and --prompt-file were both given; leave one out")
    if prompts:
        texts, sources = [given_text(prompt, "--prompt") for prompt in prompts], ["--prompt"] * len(prompts)
    elif files:
        texts, sources = [_read(file) for file in files], [str(file) for file in files]
    elif stdin.isatty():
        raise InputError("there is no prompt; pass --prompt TEXT or --prompt-file FILE, or pipe text to stdin")
    else:
        texts, sources = [_read_stdin(stdin)], ["stdin"]
    if empty := [index for index, text in enumerate(texts) if not text]:
        raise InputError(f"prompt {empty[0]} (from {sources[empty[0]]}) is empty; a completion needs a text to follow")
    return texts


def given_text(text: str, source: str) -> str:
    """The text of an argument, which must be UTF-8 in any locale: Python keeps bytes that it cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _decode(os.fsencode(text), source)
    return text


def _read_stdin(stdin: TextIO) -> str:
    try:
        return _decode(stdin.buffer.read(), "stdin")
    except OSError as error:
        raise InputError(f"cannot read stdin: {error.strerror}; pass --prompt TEXT or --prompt-file FILE") from error


def _read(file: Path) -> str:
    if file.is_dir():
        raise InputError(f"{file} is a folder; name a text file")
    try:
        return _decode(file.read_bytes(), str(file))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; name a text file") from error


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); convert it, such "
            "as with iconv -f latin1 -t utf-8"
        ) from error
