"""Names of dtypes: full, short, and torch's objects mean the same everywhere. Imports torch late."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from .errors import InputError

if TYPE_CHECKING:
    import torch

FLOATS: Final = ("float32", "bfloat16", "float16")
"""Dtypes in which models are loaded."""

_SHORT: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


def parse_dtype(given: object, *, auto: bool = True, known: Collection[str] = FLOATS, argument: str = "dtype") -> str:
    """The dtype's name in torch; or ``auto``, if allowed.

    Args:
        given: ``"float16"``, ``"fp16"``, ``"torch.float16"`` or ``torch.float16``.
        auto: Whether ``"auto"`` is a value too.
        known: Names of the dtypes that are allowed.
        argument: Its name, for the error.

    Raises:
        InputError: The dtype is none of `known`.
    """
    name = str(given).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name in known or (auto and name == "auto"):
        return name
    names = ["auto"] * auto + [one if short_dtype(one) == one else f"{one} ({short_dtype(one)})" for one in known]
    raise InputError(f"`{argument}` must be one of {', '.join(names)}, got {given!r}; choose one")


def short_dtype(name: str) -> str:
    """The short name of a dtype, such as ``fp16``, or torch's where there is none."""
    return next((short for short, full in _SHORT.items() if full == name), name)


def torch_dtype(given: object, known: Collection[str] = FLOATS) -> torch.dtype:
    """The dtype as torch's object; raises InputError where it is none of `known`."""
    import torch

    dtype: torch.dtype = getattr(torch, parse_dtype(given, auto=False, known=known))
    return dtype
