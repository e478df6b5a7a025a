"""`hf-fastdecode inspect`: what sharing and slim caches would save, counted from configs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...dtypes import parse_dtype
from ...model_names import config_file, load_config
from ..console import quiet_libraries, show_tables
from ..interrupts import exit_on_interrupt
from ..options import check_count, check_enable_options


def inspect(
    model: Annotated[
        list[str],
        typer.Argument(
            help="`embedded`, a folder, a config.json, or an id on the Hugging Face Hub; several, to compare."
        ),
    ],
    context: list[int] | None = typer.Option(
        None,
        help="Tokens of context, which the samples share, or of a row without sharing; several may follow.",
        show_default="what the model takes",
    ),
    n: list[int] | None = typer.Option(
        None, help="Samples that share a context; several may follow.", show_default="16 128"
    ),
    new_tokens: int = typer.Option(256, help="Tokens that each sample adds."),
    batch: list[int] | None = typer.Option(
        None, help="Batch sizes without sharing, for the reads per token; several may follow.", show_default="1 64"
    ),
    dtype: str = typer.Option(
        "auto",
        help="Dtype of weights, keys and values: float32, bfloat16, float16, or `auto`, as `generate` loads "
        "the model.",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per model and line, with sizes in bytes."),
) -> None:
    """Count the bytes of a model's keys and values, with and without sharing, and of the slim caches it could have.

    Reads configs only: no weights are downloaded or loaded. Sizes are in bytes (1 KiB = 1024 bytes).

    Slim caches hold keys, or keys and d/32 to d/2 V-coordinates; those of encoder-decoders hold keys, or the encoder's
    output once for all cross-attention layers; int8 keys and values are listed for comparison. These are bounds from
    sizes: only `convert-checkpoint --dry-run` measures which caches are accurate enough for a model's layers. Models
    that it refuses are marked, with the reason. For a slim checkpoint: what each layer caches, and the total.

    Reads per token: a row's cache once, and the weight matrices (of all experts) divided by the rows of the batch.

    Examples:

        hf-fastdecode inspect embedded
        hf-fastdecode inspect meta-llama/Llama-3.1-8B --context 2048 8192 --n 16 128
        hf-fastdecode inspect lmsys/vicuna-7b-v1.5 openai/whisper-tiny \\
            --dtype float16 --batch 1 64
        hf-fastdecode inspect path/to/config.json --dtype bfloat16 --json
    """
    contexts, samples, batches = context or [], n or [16, 128], batch or [1, 64]
    check_count("context", *contexts)
    check_count("n", *samples)
    check_count("new-tokens", new_tokens)
    check_count("batch", *batches)
    dtype = parse_dtype(dtype)
    check_enable_options()
    for name in model:
        config_file(name)
    with quiet_libraries():
        with exit_on_interrupt():
            from .report import caches_text, inspect_model, sharing_text

        reports = [
            inspect_model(name, load_config(name), contexts, samples, new_tokens=new_tokens, dtype=dtype)
            for name in model
        ]
    if as_json:
        for report in reports:
            print(json.dumps(report.to_json(batches)))
        return
    shared = [part for report in reports if report.sharing for part in (sharing_text(report, report.sharing), "\n")]
    show_tables(*shared, caches_text(reports, batches))
