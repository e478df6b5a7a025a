"""Values of options that hold several numbers. Without torch."""

from __future__ import annotations

from .errors import CommandError


def parse_counts(name: str, text: str) -> list[int]:
    """Whole numbers of at least 1 from ``1,4,16``, rising.

    Args:
        name: Of the option.
        text: Given with it.

    Raises:
        CommandError: One is no such number.
    """
    parts = split_values(text)
    if wrong := [part for part in parts if not is_count(part)]:
        raise CommandError(f"--{name} must be whole numbers of at least 1 with commas between, got {wrong[0]!r}")
    return sorted(set(map(int, parts)))


def split_values(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",")]


def is_count(text: str) -> bool:
    """Whether it is a whole number of at least 1."""
    return text.isascii() and text.isdecimal() and int(text) >= 1
