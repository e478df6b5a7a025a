"""Measuring for `bench`, evaluations and benchmarks: models, timed calls, and rows written as they come."""

from typing import Any

SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
"""How tokens are drawn wherever they are sampled: arguments of `generate`."""
