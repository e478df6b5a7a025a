"""The names of what can attend in a step; apart from the operators, since commands check them before torch loads."""

from __future__ import annotations

import os

BACKENDS = ("auto", "flash", "cudnn", "efficient", "cpu", "plain")
"""PyTorch's operators: ``auto`` chooses by device, dtype and size; the others force one operator or raise.

What some queries of one call see and others do not is two matrix products under any of them: the small causal square
among a row's last tokens, and keys at the edge of a window.
"""

ALL_BACKENDS = ("auto", "triton", *BACKENDS[1:])
"""What `hf_fastdecode.enable` takes: those, and this package's kernels."""

BACKEND_VARIABLE = "HF_FASTDECODE_BACKEND"
"""Environment variable that stands in for ``backend=`` where that is ``auto``."""


def backend_of_environment() -> str | None:
    """The backend that the variable forces, or None where it is not set, empty or ``auto``."""
    given = os.environ.get(BACKEND_VARIABLE, "")
    return None if given in ("", "auto") else given
