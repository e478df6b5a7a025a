"""Checking Java programs: each in a sandbox of its own; one process compiles them all and runs their tests."""

from .runner import JAVA, JavaRunner

__all__ = ["JAVA", "JavaRunner"]
