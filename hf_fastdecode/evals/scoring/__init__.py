"""Scoring: what became of samples when they were run on their tasks' tests."""

from .runner import LanguageSupport, Result, Runner
from .score import LANGUAGES, score, usable_cpus

__all__ = ["LANGUAGES", "LanguageSupport", "Result", "Runner", "score", "usable_cpus"]
