"""Whether Triton is installed, and whether it interprets kernels."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache


@lru_cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton interprets kernels (``TRITON_INTERPRET=1``), which also works on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and triton_is_installed()
