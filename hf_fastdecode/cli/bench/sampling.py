"""``bench sampling``: drawing the tokens of one step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...bench.sampling_cases import SAMPLING_SETS, SAMPLING_WAYS
from ...measurement.out_file import check_out
from ..checks import check_choice, check_device
from ..interrupts import exit_on_interrupt
from ..options import Check, CsvFile, Device, ListCases, Only, repeatable, sets_of
from .report import chosen, find_device, report, show_cases


def sampling(
    sets: Annotated[list[str] | None, sets_of(SAMPLING_SETS, "grid")] = None,
    way: Annotated[list[str] | None, repeatable(SAMPLING_WAYS, "both")] = None,
    only: Only = None,
    device: Device = "auto",
    check: Check = True,
    show: ListCases = False,
    out: CsvFile = Path("runs/sampling.csv"),
) -> None:
    """Drawing the tokens of one step: the sampling kernel beside transformers' own processors.

    The kernel (`fast`) is timed in a CUDA graph over logits larger than the L2 cache; transformers' processors,
    softmax and multinomial (`hf`) as `generate` calls them. The floor is one read of the logits at the copy bandwidth
    measured in the same run. The kernel is first checked: it draws only what transformers leaves, and its
    log-probabilities err at most twice as much as PyTorch's against fp64, or its row says `wrong` and the command ends
    with exit code 1.

    Examples:

        hf-fastdecode bench sampling
        hf-fastdecode bench sampling --only n1024- --way fast
        hf-fastdecode bench sampling --set grid --only top_p0.95 --list
        hf-fastdecode bench sampling --out runs/sampling-h200.csv
    """
    check_choice("set", sets or [], SAMPLING_SETS)
    ways = check_choice("way", way or SAMPLING_WAYS, SAMPLING_WAYS)
    check_device(device)
    names = sets or ["tiny" if find_device(device).type == "cpu" else "grid"]
    cases = chosen([case for name in names for case in SAMPLING_SETS[name]], only)
    if show:
        return show_cases(cases)
    check_out(out)
    place = find_device(device)
    with exit_on_interrupt():
        from ...bench.sampling import SamplingBench
        from ...bench.sampling_table import sampling_table
        from ...measurement.rows import provenance
        from ...measurement.runner import run

    rows = run(cases, ways, SamplingBench(place, check=check).measure, provenance=provenance(place), out=out)
    report(rows, out, sampling_table, plot=False)
