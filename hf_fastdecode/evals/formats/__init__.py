"""Samples in the files of other tools: human-eval, EvalPlus, bigcode-evaluation-harness, mxeval, and our own."""

from __future__ import annotations

from .read import read_samples
from .write import FORMS, Form, write_samples

__all__ = ["FORMS", "Form", "read_samples", "write_samples"]
