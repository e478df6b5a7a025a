"""Names of attention backends, in a module without torch, because commands check them before it loads."""

from __future__ import annotations

import os

BACKENDS = ("auto", "flash", "cudnn", "efficient", "cpu", "plain")
"""PyTorch's operators: ``auto`` chooses by device, dtype and size; the others force one operator or raise.

Masked parts are always two matrix products: the small causal square among a row's last tokens, and keys at the edge of
a window.
"""

ALL_BACKENDS = ("auto", "triton", *BACKENDS[1:])
"""Backends of `hf_fastdecode.enable`: PyTorch's operators and this package's kernels."""

BACKEND_VARIABLE = "HF_FASTDECODE_BACKEND"
"""Environment variable that replaces ``backend="auto"``."""


def backend_of_environment() -> str | None:
    """The backend forced by the environment; None when the variable is unset, empty or ``auto``."""
    given = os.environ.get(BACKEND_VARIABLE, "")
    return None if given in ("", "auto") else given
