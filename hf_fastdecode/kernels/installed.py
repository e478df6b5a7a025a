"""Whether the kernels' compiler is there."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache


@lru_cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton interprets kernels, as it does on a CPU when it is told to."""
    return os.environ.get("TRITON_INTERPRET") == "1"
