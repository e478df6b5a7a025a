"""The commands of the workloads: ``hier`` and ``longqa``.

torch and transformers take seconds to import, so a command imports what it runs, after its input has been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from ...attention.torch_operators import backend_of_environment
from ...bench.generate.cases import SAMPLING
from ...bench.workloads.cases import GREEDY, LEVELS, WAYS, check_point, parse_points, problem_prompts
from ...command_options import check_options
from ...errors import CommandError, one_line
from ...evals.prompts import SHOTS
from ...evals.tasks import load_tasks
from ...option_values import parse_counts
from ..bench.report import report_workload
from ..console import quiet_libraries
from ..interrupts import exit_on_interrupt
from .option_groups import expand_option_groups
from .options import ModelOptions

if TYPE_CHECKING:
    from ...bench.workloads.calls import Timing
    from ...measurement.rows import Measurement
    from ...measurement.runner import Case

C = TypeVar("C", bound="Case")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TOKENS: Final = 1024
_QUESTION_SHOTS: Final = 5
_BUDGET_S: Final = {"cpu": 4.0, "cuda": 20.0}  # seconds after which a call is not repeated

Mode = Annotated[str, typer.Option(help="How shared decode steps run: auto, eager, graph or compile.")]
Repeats = Annotated[int, typer.Option(help="Timed runs of each call, at most; slow calls have fewer.", min=1)]

_NOTE: Final = (
    "Rows have the device, versions, commit (`$COMMIT` when it is set) and command; a picture goes beside them. Rows "
    "that the file already has from the same commit and command are kept: run a command again, and it goes on where "
    "it broke off."
)


@app.callback()
def main() -> None:
    """Workloads of the Hydragen paper: samples of many problems, and many questions about one long text."""


@app.command(epilog=_NOTE)
@expand_option_groups
def hier(
    model: ModelOptions,
    task: Annotated[str, typer.Option(help="embedded, mbpp, or apps with --data.")] = "embedded",
    data: Annotated[
        Path | None,
        typer.Option(help="Tasks from a .jsonl, .jsonl.gz or .json file in their published form.", dir_okay=False),
    ] = None,
    shots: Annotated[int, typer.Option(help="Solved examples in front of every problem.", min=1)] = SHOTS,
    points: Annotated[
        str,
        typer.Option(help="PROBLEMSxSAMPLES, commas between: a call draws so many samples of each of the problems."),
    ] = "2x8,4x8",
    level: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(LEVELS)}.", show_default="all")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of every sample; none ends before.", min=2)] = 16,
    mode: Mode = "auto",
    sampler: Annotated[str, typer.Option(help="Who draws the tokens of shared calls: auto, hf or fast.")] = "auto",
    repeats: Repeats = 3,
    check: Annotated[
        bool, typer.Option(help="In float32, measure a level only if its greedy tokens are stock's.")
    ] = True,
    out: Annotated[Path, typer.Option(help="CSV file of rows.")] = Path("runs/hier.csv"),
) -> None:
    """Samples of several problems in one call, with no, one or two levels of sharing.

    All problems begin with the same solved examples, and all samples of a problem with its prompt. The same rows are
    generated at four levels:

    - `none`: stock transformers; every row stores and reads all of its prompt.

    - `few-shot`: the examples are stored once for all rows, a problem once for each of its samples; this is the
    paper's single level.

    - `problem`: the whole prompt of a problem, examples and all, is stored once for its samples.

    - `two-level`: the examples once for all rows, each problem once for its samples; so hf_fastdecode does by itself.

    Hydragen's setting (section 4.4, figure 7) is `--task apps --data FILE --shots 2 --new-tokens 512`. Of such a file
    (question and solutions in each line) the first solved problems are the examples, and those with starter code are
    left out.

    Examples:

        hf-fastdecode eval workloads hier
        hf-fastdecode eval workloads hier --task mbpp --data mbpp.jsonl --points 8x16,16x32 --new-tokens 64
        hf-fastdecode eval workloads hier --model shape:7b-mha --points 8x64,8x128 --new-tokens 128
    """
    wanted = parse_points(points)
    levels = _known("level", level, LEVELS)
    check_options(mode=mode, sampler=sampler)
    model.check()
    texts = problem_prompts(load_tasks(task, data=data), shots)
    for problems, samples in wanted:
        check_point(problems, samples, len(texts))
    with _prepared(model, out) as found:
        from ...bench.workloads.figures import draw_levels
        from ...bench.workloads.hier import HierBench
        from ...bench.workloads.tables import levels_table

        bench = HierBench(
            found.model,
            [found.tokenizer(text, verbose=False).input_ids for text in texts[: max(wanted)[0]]],
            name=model.model,
            task=task,
            shots=shots,
            timing=found.timing(new_tokens, repeats, SAMPLING),
            mode=mode,
            sampler=sampler,
            check=check,
        )
        cases = [bench.case(problems, samples) for problems, samples in wanted]
        rows = found.run(cases, levels, bench.measure)
    report_workload(rows, out, levels_table, draw_levels)


@app.command(epilog=_NOTE)
@expand_option_groups
def longqa(
    model: ModelOptions,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that all rows share: the text with its facts, then the solved questions.",
            show_default=f"{_TOKENS}, or all of --document",
            min=1,
        ),
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text file whose sentences hide the facts.", show_default="made", dir_okay=False),
    ] = None,
    shots: Annotated[int, typer.Option(help="Solved questions behind the text.", min=0)] = _QUESTION_SHOTS,
    questions: Annotated[
        str, typer.Option(help="Numbers of questions asked at once, commas between; the paper's go up to 512.")
    ] = "1,4,16,32",
    way: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(WAYS)}.", show_default="all")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of every answer; none ends before.", min=2)] = 16,
    seed: Annotated[int, typer.Option(help="The same seed makes the same facts and the same text.")] = 0,
    mode: Mode = "auto",
    repeats: Repeats = 3,
    out: Annotated[Path, typer.Option(help="CSV file of rows.")] = Path("runs/longqa.csv"),
) -> None:
    """Many questions about one long text in one call: the text stored once, or by stock transformers in every row.

    Sentences that no model can know are hidden in the text: colours of dogs, codes of lockers, villages, each about a
    name of its own. Every question is a row that begins with the whole text and some solved questions; there are up to
    256, which come again when more are asked. An answer is right if its first line is the fact's. In float32 the
    tokens of both ways must be equal.

    Hydragen's setting (section 4.3, figure 6) is `--tokens 19947 --questions 64,128,256,512`. Where memory runs out,
    the row says so and the run goes on.

    Examples:

        hf-fastdecode eval workloads longqa
        hf-fastdecode eval workloads longqa --model MODEL --document book.txt --tokens 20000 --questions 1,16,256
        hf-fastdecode eval workloads longqa --model shape:8b-gqa --tokens 20000 --questions 64,512 --new-tokens 64
    """
    wanted = parse_counts("questions", questions)
    ways = _known("way", way, WAYS)
    check_options(mode=mode)
    model.check()
    prose = None if document is None else _text(document)
    with _prepared(model, out) as found:
        from ...bench.workloads.document import make_document
        from ...bench.workloads.figures import draw_questions
        from ...bench.workloads.longqa import QuestionsBench
        from ...bench.workloads.tables import questions_table

        length = _TOKENS if tokens is None and prose is None else tokens
        bench = QuestionsBench(
            found.model,
            found.tokenizer,
            make_document(found.count, length, shots=shots, seed=seed, prose=prose),
            name=model.model,
            document_name=f"made from seed {seed}" if document is None else document.name,
            timing=found.timing(new_tokens, repeats, GREEDY),
            mode=mode,
        )
        rows = found.run([bench.case(number) for number in wanted], ways, bench.measure)
    report_workload(rows, out, questions_table, draw_questions)


@dataclass(frozen=True)
class _Prepared:
    """What both workloads run on."""

    model: Any
    tokenizer: Any
    out: Path

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer(text, verbose=False).input_ids)

    def timing(self, new_tokens: int, repeats: int, sampling: dict[str, Any]) -> Timing:
        """How calls are timed on this device."""
        from ...bench.workloads.calls import Timing

        return Timing(new_tokens, repeats, _BUDGET_S.get(self.model.device.type, _BUDGET_S["cuda"]), sampling)

    def run(
        self, cases: Sequence[C], ways: Sequence[str], measure: Callable[[C, str], dict[str, Any]]
    ) -> list[Measurement]:
        """Rows of the cases and ways, those of an earlier run or measured now."""
        from ...measurement.rows import provenance
        from ...measurement.runner import run

        where = provenance(self.model.device, backend=backend_of_environment())
        return run(cases, ways, measure, provenance=where, out=self.out)


@contextmanager
def _prepared(model: ModelOptions, out: Path) -> Iterator[_Prepared]:
    """Within, the model is loaded and libraries are quiet."""
    from ...measurement.runner import check_out

    check_out(out)
    with exit_on_interrupt():
        from ..devices import pick_device
        from ..models import load_model
    with quiet_libraries():
        yield _Prepared(*load_model(model.model, model.dtype, pick_device(model.device)), out)


def _known(name: str, given: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Values of a repeatable option, all where none is given.

    Raises:
        CommandError: One is none of those known.
    """
    names = list(known)
    if wrong := [one for one in given or () if one not in names]:
        raise CommandError(f"--{name} must be one of {', '.join(names)}, got {wrong[0]!r}")
    return [one for one in names if one in (given or names)]


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read --document {path}: {one_line(error)}; name a UTF-8 text file") from error
    if not text.strip():
        raise CommandError(f"--document {path} is empty; name a text of some sentences, or leave it out")
    return text
