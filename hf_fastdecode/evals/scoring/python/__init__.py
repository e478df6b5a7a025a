"""Checking Python programs: the program runs in one sandbox and the tests in another."""

from .runner import PYTHON, PythonRunner

__all__ = ["PYTHON", "PythonRunner"]
