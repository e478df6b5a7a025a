"""``eval latency``: time drawing n samples of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import InputError
from ...evals.run_folder import LATENCY, SETTINGS, read_settings
from ...measurement.rows import Case
from ..checks import split_values
from ..console import forced_options, note, quiet_libraries
from ..options import Sampler, expand_option_groups
from .generate import Options, Prepared, load_suitable_tasks, prepare
from .options import DecodingOptions, DrawOptions, ModelOptions, Out, PromptOptions, TaskOptions, run_folder


@expand_option_groups
def latency(
    tasks: TaskOptions,
    model: ModelOptions,
    prompts: PromptOptions,
    draw: DrawOptions,
    mode: Annotated[
        str,
        typer.Option(help="How shared decode steps run: auto, eager, graph; several with commas."),
    ] = "auto",
    sampler: Sampler = "auto",
    calls: Annotated[
        int, typer.Option("--prompts", help="Prompts that are timed for each n: the first ones.", min=1)
    ] = 3,
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
        DecodingOptions(mode=one).check()
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
        """Columns that identify the case."""
        return {**self.about, "n": self.n}


def time_samples(prepared: Prepared, folder: Path, prompts: int, modes: list[str]) -> None:
    """Time what the folder's latency.csv lacks; raises if it has rows of another model or task."""
    from ...evals.generation import measure_latency
    from ...measurement.rows import provenance, run

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
    _check_rows(path, about)
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
    if not (folder / SETTINGS).exists():
        return
    kept = read_settings(folder)
    for name in ("model", "task", "format", "temperature", "top_p", "new_tokens"):
        before = kept.get("max_" * (name == "new_tokens") + name)
        if before != about[name]:
            raise InputError(
                f"{folder} holds a run with another {name.replace('_', ' ')} ({before}, now {about[name]}); name "
                "another --out, or time with the run's own options"
            )


def _check_rows(path: Path, about: Mapping[str, Any]) -> None:
    """Refuse a file with rows of something else."""
    from ...files import read_rows

    for row in read_rows(path) if path.exists() else []:
        for name, value in about.items():
            if row.get(name, str(value)) != str(value):
                raise InputError(
                    f"{path} has rows of another {name.replace('_', ' ')} ({row[name]}, now {value}); name another "
                    "--out, or delete the file"
                )
