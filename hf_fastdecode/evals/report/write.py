"""Everything that a report is written as."""

from __future__ import annotations

from pathlib import Path

from .build import Report
from .figures import AGAINST_LATENCY, AGAINST_N, draw_against_latency, draw_against_n
from .page import PAGE, write_page
from .tables import CURVE, METRICS, write_curve, write_metrics


def write_report(found: Report, folder: Path) -> list[Path]:
    """Write metrics.json, curve.csv, the pictures and report.html into a folder.

    Each is written under a temporary name and renamed, so that an interruption leaves the old ones.

    Args:
        found: The report.
        folder: Where; made if need be.

    Returns:
        The files written.
    """
    pictures: dict[str, Path] = {}
    for name, file, draw in (
        ("accuracy against latency", AGAINST_LATENCY, draw_against_latency),
        ("accuracy against n", AGAINST_N, draw_against_n),
    ):
        if draw(found, folder / file) is not None:
            pictures[name] = folder / file
        else:
            (folder / file).unlink(missing_ok=True)  # of an earlier report, which had something to draw
    return [
        write_metrics(found, folder / METRICS),
        write_curve(found, folder / CURVE),
        *pictures.values(),
        write_page(found, pictures, folder / PAGE),
    ]
