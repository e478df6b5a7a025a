"""`hf-fastdecode inspect`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hf_fastdecode.interrupts import exit_on_interrupt

from ...command_options import check_dtype, check_options, config_file
from ..console import quiet_libraries
from ..sampling import check_positive


def inspect(
    model: Annotated[
        list[str],
        typer.Argument(
            help="`embedded`, a folder, a config.json, or an id on the Hugging Face Hub; several, to compare."
        ),
    ],
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens that the samples share, and of a row without sharing; several may follow.",
            show_default="what the model takes",
        ),
    ] = None,
    n: Annotated[
        list[int] | None,
        typer.Option(help="Samples that share a context; several may follow.", show_default="16 128"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each sample adds.")] = 256,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            help="Rows without sharing, between which a step's reads of weights are divided; several may follow.",
            show_default="1 64",
        ),
    ] = None,
    encoder_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the encoder's output, for encoder-decoders.",
            show_default="the config's max_source_positions, else the context",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of weights, keys and values: float32, bfloat16, float16, or `auto`, as `generate` loads the model."
        ),
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per model and line, with sizes in bytes.")
    ] = False,
) -> None:
    """Count what a model's keys and values take: with and without sharing, and in slim caches.

    Reads configs only: no weights are downloaded or loaded. Sizes are in bytes (1 KiB = 1024 bytes).

    Tables of caches have what slim attention could store in the place of keys and values: keys, or keys and d/32 to
    d/2 V-coordinates; for encoder-decoders keys, or the encoder's output once for all cross-attention layers; beside
    int8 keys and values. These are bounds from sizes: only `convert-checkpoint --dry-run` measures which caches a
    model's layers can have in half precision, and where none can, nothing is saved. Reads per token count each cached
    number once, and the weight matrices, those of all experts, once for a batch. A model that `convert-checkpoint`
    refuses is marked so, with the reason.

    Examples:

        hf-fastdecode inspect embedded
        hf-fastdecode inspect meta-llama/Llama-3.1-8B --context 2048 8192 --n 16 128
        hf-fastdecode inspect lmsys/vicuna-7b-v1.5 openai/whisper-tiny --dtype float16 --batch 1 64
        hf-fastdecode inspect path/to/config.json --dtype bfloat16 --json
    """
    contexts, samples, batches = context or [], n or [16, 128], batch or [1, 64]
    check_positive("context", *contexts)
    check_positive("n", *samples)
    check_positive("new-tokens", new_tokens)
    check_positive("batch", *batches)
    if encoder_tokens is not None:
        check_positive("encoder-tokens", encoder_tokens)
    check_dtype(dtype)
    check_options()
    for name in model:
        config_file(name)
    with quiet_libraries():
        with exit_on_interrupt():
            from rich.console import Console

            from ...configs import load_config
            from .caches_table import caches_text
            from .report import inspect_model
            from .sharing_table import sharing_text

        reports = [
            inspect_model(
                name,
                load_config(name),
                contexts,
                samples,
                new_tokens=new_tokens,
                dtype=dtype,
                encoder_tokens=encoder_tokens,
            )
            for name in model
        ]
    if as_json:
        for report in reports:
            print(json.dumps(report.to_json(batches)))
        return
    console = Console()
    for report in reports:
        if report.sharing is not None:
            console.print(sharing_text(report.sharing))
            console.print()
    console.print(caches_text(reports, batches))
