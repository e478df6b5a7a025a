"""Attention by PyTorch's operators: decode over a forest, prefill, and the choice of a fused operator."""

import os
from typing import Final, Literal, get_args

TorchBackend = Literal["auto", "flash", "cudnn", "efficient", "cpu", "plain"]
"""PyTorch's operators: ``auto`` chooses by device, dtype and size; the others force one operator or raise.

Two small masked parts of a decode step are computed by ``plain`` under every name: the causal square among the queries
of one step, and keys at the edge of a window. A forced operator raises for a soft cap, suffixes of unequal length and
a window in prefill.
"""

TORCH_BACKENDS: Final[tuple[TorchBackend, ...]] = get_args(TorchBackend)

Backend = Literal["auto", "triton", TorchBackend]
"""Backends of `hf_fastdecode.enable`: PyTorch's operators and this package's kernels."""

BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)

BACKEND_VARIABLE = "HF_FASTDECODE_BACKEND"
"""Environment variable that replaces ``backend="auto"``."""


def backend_of_environment() -> str | None:
    """The backend forced by the environment; None when the variable is unset, empty or ``auto``."""
    given = os.environ.get(BACKEND_VARIABLE, "")
    return None if given in ("", "auto") else given
