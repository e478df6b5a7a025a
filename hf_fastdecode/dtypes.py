"""Names of dtypes: torch's own, the short ones, and torch's objects mean the same everywhere. Imports torch late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

FLOATS: Final = ("float32", "bfloat16", "float16")
"""Dtypes in which models are loaded."""

_SHORT: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}


def dtype_among(given: object, names: Iterable[str]) -> str | None:
    """The one of `names` that means the same dtype as `given`; None if none does.

    Args:
        given: ``"float16"``, ``"fp16"``, ``"torch.float16"`` or ``torch.float16``; other words, such as ``"auto"``,
            mean themselves.
        names: Dtypes by torch's or by short names, and other words.
    """
    return next((name for name in names if _full(name) == _full(given)), None)


def torch_dtype(given: object, names: Iterable[str] = FLOATS) -> torch.dtype:
    """The dtype that is given by name or as torch's object; raises ValueError unless it is one of `names`."""
    import torch

    if (name := dtype_among(given, names)) is None:
        raise ValueError(f"dtype must be one of {', '.join(names)}, or fp32, bf16, fp16, got {given!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _full(given: object) -> str:
    name = str(given).removeprefix("torch.")
    return _SHORT.get(name, name)
