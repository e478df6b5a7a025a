"""Numbers of a command line: points of problems and samples, numbers of questions. Without torch."""

from __future__ import annotations

from hf_fastdecode.command_errors import CommandError


def parse_points(text: str) -> list[tuple[int, int]]:
    """Problems and samples from ``4x8,8x16``, in the order given.

    Raises:
        CommandError: A point is not of that form.
    """
    points = []
    for part in _parts(text):
        problems, cross, samples = part.partition("x")
        if not (cross and _is_count(problems) and _is_count(samples)):
            raise CommandError(f"--points are PROBLEMSxSAMPLES with commas between, such as 4x8,8x16, got {part!r}")
        points.append((int(problems), int(samples)))
    return list(dict.fromkeys(points))


def check_point(problems: int, samples: int, available: int) -> None:
    """Refuse a point at which levels of sharing do not differ, or that asks for problems that there are not.

    Raises:
        CommandError: There are not so many problems, or fewer than 2 problems or samples.
    """
    if problems < 2 or samples < 2:
        raise CommandError(
            f"--points {problems}x{samples}: levels of sharing differ from 2 problems and 2 samples on; ask for more"
        )
    if problems > available:
        raise CommandError(
            f"--points {problems}x{samples} asks for {problems} problems, there are {available}; ask for fewer, or "
            "name a larger --data"
        )


def parse_counts(name: str, text: str) -> list[int]:
    """Whole numbers of at least 1 from ``1,4,16``, rising.

    Args:
        name: Of the option.
        text: Given with it.

    Raises:
        CommandError: One is no such number.
    """
    parts = _parts(text)
    if wrong := [part for part in parts if not _is_count(part)]:
        raise CommandError(f"--{name} must be whole numbers of at least 1 with commas between, got {wrong[0]!r}")
    return sorted(set(map(int, parts)))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) >= 1
