"""Report of a run folder: metrics.json, curve.csv, pictures, a self-contained page, and tables for a terminal.

Accuracy comes from samples and their verdicts, latency from runs of its own; the two are joined by n and never pooled.
`report` names the files of a run folder, `Latency` the columns of its ``latency.csv``. Without torch; matplotlib is
imported when something is drawn.
"""

from __future__ import annotations

from .build import LATENCY, SAMPLES, SETTINGS, VERDICTS, Report, report
from .latency import Latency, read_latency, write_latency
from .terminal import report_text
from .write import write_report

__all__ = [
    "LATENCY",
    "SAMPLES",
    "SETTINGS",
    "VERDICTS",
    "Latency",
    "Report",
    "read_latency",
    "report",
    "report_text",
    "write_latency",
    "write_report",
]
