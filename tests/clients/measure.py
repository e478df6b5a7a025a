"""Programs that call `generate`, stock and enabled: ``HF_HUB_OFFLINE=1 python -m tests.clients.measure``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_fastdecode as fd
from benchmarks import RESULTS
from hf_fastdecode.assets import MODEL_PATH, embedded_tasks
from hf_fastdecode.measurement.rows import failed, provenance, run

from .evaluation import evalplus_decoder, evalplus_samples, lm_eval_samples, lm_eval_scores, pipeline_samples
from .models import load
from .programs import PROGRAMS, Work
from .programs import run as run_program
from .recording import Calls, recorded, recorded_scoring

WAYS = ("stock", "enabled")


@dataclass(frozen=True)
class ClientCase:
    """A program, a model and a setting.

    Attributes:
        program: As a table shows it.
        model: Of `models.load`.
        setting: What of the program was set, in words.
        run: Runs the program on the model, enabled or not; returns its samples or weights, and its calls.
        repeats: Timed runs.
    """

    program: str
    model: str
    setting: str
    run: Callable[[bool], tuple[Any, Calls]] = field(compare=False)
    repeats: int = 3

    def columns(self) -> dict[str, Any]:
        """What of the case stands in a row."""
        return {"program": self.program, "model": self.model, "setting": self.setting}


def evaluated(
    name: str, generate: Callable[[PreTrainedModel, PreTrainedTokenizerBase], Any], **options: Any
) -> Callable[[bool], tuple[Any, Calls]]:
    """A run of a program that is given the model `name`; `options` are those of `enable`."""

    def once(enable: bool) -> tuple[Any, Calls]:
        model, tokenizer = _loaded(name)
        with fd.enabled(model, **options) if enable else nullcontext(), recorded(model) as calls:
            return generate(model, tokenizer), calls

    return once


def lm_eval(problems: int, **options: Any) -> Callable[[PreTrainedModel, PreTrainedTokenizerBase], Any]:
    """lm-eval on so many problems; `options` as for `lm_eval_samples`."""

    def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return lm_eval_samples(model, tokenizer, embedded_tasks()[:problems], Path(folder), **options)

    return generate


def lm_eval_scored(enable: bool, *, problems: int, shots: int, batch_size: int, rolling: bool) -> tuple[Any, Calls]:
    """Log-likelihoods by lm-eval, whose metrics, as it prints them, stand for samples; calls are forward passes."""
    (model, tokenizer), sizes = _loaded("embedded"), {"problems": problems, "shots": shots, "batch_size": batch_size}
    keeping = fd.enabled(model, reuse_prefix=True) if enable else nullcontext()
    with tempfile.TemporaryDirectory() as folder, keeping, recorded_scoring(model) as calls:
        scores, _ = lm_eval_scores(model, tokenizer, Path(folder), rolling=rolling, **sizes)
    return {name: f"{value:.4f}" for name, value in scores.items()}, calls


def evalplus(enable: bool) -> tuple[Any, Calls]:
    """evalplus's decoder, which loads its model by name."""
    decoder = evalplus_decoder(MODEL_PATH, samples=16, new_tokens=64)
    with fd.enabled(decoder.model) if enable else nullcontext(), recorded(decoder.model) as calls:
        return evalplus_samples(decoder, embedded_tasks()[:4], shots=6, samples=16), calls


def grpo(enable: bool, **options: Any) -> tuple[Any, Calls]:
    """Three steps of GRPO with TRL's defaults; the weights stand for the samples that led to them."""
    from .training import train  # TRL takes seconds to import

    sizes = {"shots": 3, "num_generations": 16, "per_device_train_batch_size": 16, "max_completion_length": 48}
    with tempfile.TemporaryDirectory() as folder:
        ran = train("grpo", Path(folder), enable=enable, **sizes, **options)
    return {name: value.numpy().tobytes() for name, value in ran.parameters.items()}, ran.calls


def cases() -> list[ClientCase]:
    """What is measured; cases of one model stand together."""
    reuse = {"reuse_prefix": True}

    def pipelined(problems: int, **options: Any) -> Callable[[PreTrainedModel, PreTrainedTokenizerBase], Any]:
        return lambda *given: pipeline_samples(*given, embedded_tasks()[:problems], **options)

    batch = lm_eval(4, shots=6, batch_size=16, new_tokens=64, repeats=16)
    single = lm_eval(12, shots=8, batch_size=1, new_tokens=32)
    pipe = pipelined(4, shots=6, samples=16, new_tokens=64)
    choices = partial(lm_eval_scored, problems=24, shots=5, batch_size=16, rolling=False)
    rolling = partial(lm_eval_scored, problems=48, shots=0, batch_size=16, rolling=True)
    of_embedded = [
        ("lm-eval", "6 shots, 16 repeats, batches of 16", evaluated("embedded", batch)),
        ("lm-eval", "8 shots, greedy, batch size 1, reuse_prefix=True", evaluated("embedded", single, **reuse)),
        ("lm-eval", "5 shots, multiple choice, batches of 16, reuse_prefix=True", choices),
        ("evalplus", "6 shots, 16 samples", evalplus),
        ("pipeline", "6 shots, 16 samples", evaluated("embedded", pipe)),
    ]
    batch = lm_eval(2, shots=3, batch_size=8, new_tokens=32, repeats=8)
    single = lm_eval(12, shots=6, batch_size=1, new_tokens=16)
    pipe = pipelined(1, shots=3, samples=16, new_tokens=48)
    of_smollm2 = [
        ("lm-eval", "3 shots, 8 repeats, batches of 8", evaluated("smollm2", batch)),
        ("lm-eval", "6 shots, greedy, batch size 1, reuse_prefix=True", evaluated("smollm2", single, **reuse)),
        ("pipeline", "3 shots, 16 samples", evaluated("smollm2", pipe)),
    ]
    at_once = Work(problems=4, shots=6, samples=16, new_tokens=64)
    one_by_one = Work(problems=12, shots=8, samples=1, new_tokens=32)

    def loaded(name: str, work: Work) -> Callable[[bool], tuple[Any, Calls]]:
        return lambda enable: run_program(name, work, enable=enable)

    of_programs = [
        (name, "8 shots, 12 prompts one at a time, reuse_prefix=True", loaded(name, one_by_one))
        if program.options
        else (name, "6 shots, 16 samples", loaded(name, at_once))
        for name, program in PROGRAMS.items()
    ]
    return [
        ClientCase("TRL GRPO", "embedded", "bf16 autocast, 3 shots, 16 completions", grpo, repeats=1),
        *(ClientCase(program, "embedded", setting, run) for program, setting, run in of_embedded),
        ClientCase(
            "lm-eval", "embedded", "texts without a common context, batches of 16, reuse_prefix=True", rolling, 15
        ),
        *(ClientCase(program, "embedded", setting, run, repeats=1) for program, setting, run in of_programs),
        *(ClientCase(program, "smollm2", setting, run, repeats=1) for program, setting, run in of_smollm2),
    ]


@lru_cache(maxsize=1)
def _loaded(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load(name)
    model.generate(**tokenizer("warm up", return_tensors="pt"), max_new_tokens=4)
    return model, tokenizer


@lru_cache(maxsize=1)
def _runs(case: ClientCase) -> dict[str, list[tuple[Any, Calls]]]:
    """Samples and calls of each run by way; stock and enabled run in turn, as machines are faster at times."""
    pairs = [[case.run(way == "enabled") for way in WAYS] for _ in range(case.repeats)]
    return dict(zip(WAYS, map(list, zip(*pairs, strict=True)), strict=True))


def measure(case: ClientCase, way: str) -> dict[str, Any]:
    """The measured columns of a row; the status tells other samples than stock's, and calls that were not shared."""
    found, runs, status = _runs(case)[way], [calls for _, calls in _runs(case)[way]], "ok"
    if way == "enabled":
        expected = _runs(case)["stock"][0][0]
        stock = [call for calls in runs for call in calls.made if call.path != "shared"]
        if any(samples != expected for samples, _ in found):
            status = "wrong: other samples than stock"
        elif stock and "reuse_prefix" not in case.setting:
            status = f"failed: a call ran {stock[0].path}: {stock[0].reason}"
    return {
        "calls": len(runs[0].made),
        "rows": sum(call.rows for call in runs[0].made),
        "prefilled_tokens": runs[0].prefilled_tokens,
        "generate_s": round(median(calls.seconds for calls in runs), 3),
        "runs": len(runs),
        "status": status,
    }


def main(
    out: Annotated[Path, typer.Option(help="CSV file of rows to write.")] = RESULTS / "clients-cpu.csv",
    only: Annotated[str, typer.Option(help="Measure the cases whose columns contain this.")] = "",
) -> None:
    """Measure the programs, stock and enabled, and write a row for each."""
    chosen = [case for case in cases() if only in " ".join(map(str, case.columns().values()))]
    if bad := failed(run(chosen, WAYS, measure, provenance=provenance("cpu"), out=out)):
        raise typer.Exit(len(bad))


if __name__ == "__main__":
    typer.run(main)
