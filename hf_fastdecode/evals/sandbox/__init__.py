"""Isolation of untrusted programs: back ends, the proof that one isolates, limits, and running programs in it."""

from .choice import BACKENDS, choose
from .launch import SandboxError
from .limits import LimitExceeded, Limits, Usage
from .process import SandboxedProcess
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
