"""Samples in the files of other tools: human-eval, EvalPlus, bigcode-evaluation-harness, mxeval, and our own."""

from __future__ import annotations

from .read import import_samples
from .write import FORMS, Form, export_samples

__all__ = ["FORMS", "Form", "export_samples", "import_samples"]
