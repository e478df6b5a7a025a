"""Devices, from a name on the command line."""

from __future__ import annotations

import torch

from ..errors import CommandError, one_line


def pick_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is the first GPU, or the CPU where there is none.

    Raises:
        CommandError: torch has no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:  # which lists every device type there is
        raise CommandError(f"there is no device {name!r}; try auto or cpu, or cuda:0 for the first GPU") from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CommandError(f"device {name!r} is not available: {one_line(error)}; try auto or cpu") from error
    if device.type == "meta":
        raise CommandError(f"device {name!r} holds no numbers; try auto or cpu")
    return device
