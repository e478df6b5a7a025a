"""Report of a run folder: metrics.json, curve.csv, pictures, a self-contained page, and tables for a terminal.

Accuracy comes from samples and their verdicts, latency from runs of its own; the two are joined by n and never pooled.
Without torch; matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from .build import Report, report
from .latency import read_latency
from .words import report_text
from .write import write_report

__all__ = ["Report", "read_latency", "report", "report_text", "write_report"]
