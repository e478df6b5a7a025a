"""Isolation of untrusted programs: back ends, the proof that one isolates, limits, and running programs in it."""

from .choice import BACKENDS, choose
from .limits import Limits, Usage
from .process import LimitExceeded, SandboxedProcess, SandboxError
from .run import Outcome, Sandbox
from .view import python_command

__all__ = [
    "BACKENDS",
    "LimitExceeded",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxError",
    "SandboxedProcess",
    "Usage",
    "choose",
    "python_command",
]
