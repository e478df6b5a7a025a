"""``forward``: passes without a cache over rows that begin alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hf_fastdecode.cli.bench import place_of_calls
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import CsvFile, Device, Repeats, check_choice

from ..forward.cases import FORWARD_SETS, FORWARD_WAYS
from .options import Check, ListCases, Only, cases_of_sets, chosen, measured, repeatable, report, sets_of, show_cases


def forward(
    sets: Annotated[list[str] | None, sets_of(FORWARD_SETS, "qwen3-4b")] = None,
    way: Annotated[list[str] | None, repeatable(FORWARD_WAYS, "stock, enabled")] = None,
    only: Only = None,
    device: Device = "auto",
    repeats: Repeats = 5,
    check: Check = True,
    show: ListCases = False,
    out: CsvFile = Path("runs/forward.csv"),
) -> None:
    """Passes without a cache over completions of the same prompts: training steps and scoring, stock beside enabled.

    A training step is the mean log-probability of the completions and its gradient, scoring the former alone; the head
    is computed in parts, alike in all ways. Ours and peers are checked first: in a small model of the same kind,
    log-probabilities and gradients err at most twice as much as stock's against fp64, and so do those of a row of the
    case itself against fp32, or its row says `wrong` and the command ends with exit code 1.

    Examples:

        python -m benchmarks forward --set qwen3-4b --set 8b-gqa
        python -m benchmarks forward --only training-1182x16x256 --way stock
    """
    ways = check_choice("way", way or ("stock", "enabled"), FORWARD_WAYS)
    cases = chosen(cases_of_sets(FORWARD_SETS, sets, device, "qwen3-4b"), only)
    if show:
        return show_cases(cases)
    place = place_of_calls(device, out)
    with exit_on_interrupt():
        from ..forward.cases import forward_table
        from ..forward.measure import ForwardBench

    report(measured(cases, ways, ForwardBench(place, repeats=repeats, check=check), out), out, forward_table)
