"""Isolation of untrusted programs: back ends, the proof that one isolates, limits, and running programs in it."""

from .fork_server import ForkedPython, ForkServer
from .launch import SandboxError, python_command
from .limits import LimitExceeded, Limits, Usage
from .process import SandboxedProcess
from .run import BACKENDS, Sandbox, choose

__all__ = [
    "BACKENDS",
    "ForkServer",
    "ForkedPython",
    "LimitExceeded",
    "Limits",
    "Sandbox",
    "SandboxError",
    "SandboxedProcess",
    "Usage",
    "choose",
    "python_command",
]
