"""The commands of the workloads: ``hier`` and ``longqa``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hf_fastdecode.cli import options
from hf_fastdecode.cli.console import prints_tables, quiet_libraries
from hf_fastdecode.cli.evaluation.options import ModelOptions, TaskFile
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.evals.prompts import SHOTS
from hf_fastdecode.evals.tasks import load_tasks
from hf_fastdecode.measurement import SAMPLING
from hf_fastdecode.measurement.rows import check_out

from ..workloads.cases import LEVELS, WAYS, check_point, parse_points, problem_prompts
from .options import NOTE, measured, report_workload

app = options.command_group()

_BUDGET_S: Final = {"cpu": 4.0, "cuda": 20.0}  # seconds after which a call is not repeated


@app.callback()
def main() -> None:
    """Workloads of the Hydragen paper: samples of many problems, and many questions about one long text."""


@app.command(epilog=NOTE)
@prints_tables
@options.expand_option_groups
def hier(
    model: ModelOptions,
    task: Annotated[str, typer.Option(help="embedded or mbpp.")] = "embedded",
    data: TaskFile = None,
    shots: Annotated[int, typer.Option(help="Solved examples in front of every problem.", min=1)] = SHOTS,
    points: Annotated[
        str,
        typer.Option(help="PROBLEMSxSAMPLES, commas between: a call draws so many samples of each of the problems."),
    ] = "2x8,4x8",
    new_tokens: Annotated[int, typer.Option(help="Tokens of every sample; none ends before.", min=2)] = 16,
    repeats: options.Repeats = 3,
    check: Annotated[
        bool, typer.Option(help="In float32, measure a level only if its greedy tokens are stock's.")
    ] = True,
    out: options.CsvFile = Path("runs/hier.csv"),
) -> None:
    """Samples of several problems in one call, with no, one or two levels of sharing.

    All problems begin with the same solved examples, and all samples of a problem with its prompt. The same rows are
    generated at four levels: `none` is stock transformers; `few-shot` stores the examples once for all rows, the
    paper's single level; `problem` each problem's whole prompt once for its samples; `two-level` the examples once for
    all rows, each problem once for its samples, as hf_fastdecode does by itself.

    Examples:

        python -m benchmarks workloads hier --model shape:7b-mha \\
            --points 8x64,8x128 --new-tokens 128
    """
    wanted = parse_points(points)
    options.check_enable_options()
    texts = problem_prompts(load_tasks(task, data=data), shots)
    for problems, samples in wanted:
        check_point(problems, samples, len(texts))
    with _prepared(model, out) as (loaded, tokenizer, budget_s):
        from ..figures import draw_levels
        from ..workloads.measure import HierBench, Timing
        from ..workloads.tables import levels_page

        bench = HierBench(
            loaded,
            [tokenizer(text, verbose=False).input_ids for text in texts[: max(wanted)[0]]],
            name=model.model,
            task=task,
            shots=shots,
            timing=Timing(new_tokens, repeats, budget_s, SAMPLING),
            check=check,
        )
        cases = [bench.case(problems, samples) for problems, samples in wanted]
        rows = measured(cases, [*LEVELS], bench, out)
    report_workload(rows, out, levels_page, draw_levels)


@app.command(epilog=NOTE)
@prints_tables
@options.expand_option_groups
def longqa(
    model: ModelOptions,
    tokens: Annotated[
        int,
        typer.Option(help="Tokens that all rows share: the text with its facts, then the solved questions.", min=1),
    ] = 1024,
    shots: Annotated[int, typer.Option(help="Solved questions after the text.", min=0)] = 5,
    questions: Annotated[
        str, typer.Option(help="Numbers of questions asked at once, commas between; the paper's go up to 512.")
    ] = "1,4,16,32",
    new_tokens: Annotated[int, typer.Option(help="Tokens of every answer; none ends before.", min=2)] = 16,
    repeats: options.Repeats = 3,
    out: options.CsvFile = Path("runs/longqa.csv"),
) -> None:
    """Many questions about one long text in one call: the text stored once, or by stock transformers in every row.

    Sentences that no model can know are hidden in the text: colours of dogs, codes of lockers, villages, each about a
    name of its own. Every question is a row that begins with the whole text and some solved questions; there are up to
    256, which come again when more are asked. An answer is right if its first line is the fact's. In float32 the
    tokens of both ways must be equal.

    Hydragen's setting (section 4.3, figure 6) is `--tokens 19947 --questions 64,128,256,512`. Where memory runs out,
    the row says so and the run goes on.

    Examples:

        python -m benchmarks workloads longqa --model shape:8b-gqa --tokens 20000 \\
            --questions 64,512 --new-tokens 64
    """
    wanted = options.parse_counts("questions", questions)
    options.check_enable_options()
    with _prepared(model, out) as (loaded, tokenizer, budget_s):
        from ..figures import draw_questions
        from ..workloads.document import make_document
        from ..workloads.measure import QuestionsBench, Timing
        from ..workloads.tables import questions_page

        bench = QuestionsBench(
            loaded,
            tokenizer,
            make_document(lambda text: len(tokenizer(text, verbose=False).input_ids), tokens, shots=shots),
            name=model.model,
            document_name="made from seed 0",
            timing=Timing(new_tokens, repeats, budget_s, {"do_sample": False}),
        )
        cases = [bench.case(number) for number in wanted]
        rows = measured(cases, [*WAYS], bench, out)
    report_workload(rows, out, questions_page, draw_questions)


@contextmanager
def _prepared(model: ModelOptions, out: Path) -> Iterator[tuple[Any, Any, float]]:
    """Within, libraries are quiet; the model, its tokenizer, and seconds after which a call of it is not repeated."""
    check_out(out)
    with exit_on_interrupt():
        from hf_fastdecode.cli.models import load_model
    with quiet_libraries():
        loaded, tokenizer = load_model(model.model, model.dtype, options.pick_device(model.device))
        yield loaded, tokenizer, _BUDGET_S.get(loaded.device.type, _BUDGET_S["cuda"])
