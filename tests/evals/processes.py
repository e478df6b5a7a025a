"""Processes of this machine."""

from __future__ import annotations

from pathlib import Path


def running(token: str) -> bool:
    """Whether a process has this argument."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False
