"""Benchmarks of the package, run in a clone: ``python -m benchmarks``. Cases are data; rows carry their source."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
"""The rows that the documentation cites."""
