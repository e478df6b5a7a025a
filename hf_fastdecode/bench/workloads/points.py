"""Points of problems and samples on a command line. Without torch."""

from __future__ import annotations

import re

from hf_fastdecode.errors import CommandError


def parse_points(text: str) -> list[tuple[int, int]]:
    """Problems and samples from ``4x8,8x16``, in the order given.

    Raises:
        CommandError: A point is not of that form.
    """
    points = []
    for part in (part.strip() for part in text.split(",")):
        point = re.fullmatch("(0*[1-9][0-9]*)x(0*[1-9][0-9]*)", part)
        if point is None:
            raise CommandError(f"--points are PROBLEMSxSAMPLES with commas between, such as 4x8,8x16, got {part!r}")
        points.append((int(point[1]), int(point[2])))
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
