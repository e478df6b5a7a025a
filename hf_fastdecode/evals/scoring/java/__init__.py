"""Java: one process that compiles programs and runs tests, and a process of its own for each program."""

from .runner import JavaRunner, missing_jdk

__all__ = ["JavaRunner", "missing_jdk"]
