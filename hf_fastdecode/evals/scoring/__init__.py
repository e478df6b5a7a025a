"""Scoring: what became of samples when they were run on their tasks' tests."""

from .languages import LANGUAGES
from .runner import LanguageSupport, Result, Runner
from .score import score, usable_cpus

__all__ = ["LANGUAGES", "LanguageSupport", "Result", "Runner", "score", "usable_cpus"]
