"""Measurements: cases as data, one runner, rows that say where they come from."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
"""Where the rows lie that the documentation cites."""
