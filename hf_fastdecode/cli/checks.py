"""Bounds and choices of options, each checked in one place. Without torch, which takes seconds to import."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..assets import Task, embedded_tasks, fewshot_tasks
from ..errors import InputError, one_line
from ..generation.options import Options
from .interrupts import exit_on_interrupt

if TYPE_CHECKING:
    import torch

LEAST_TEMPERATURE: Final = 1e-6  # logits divided by much less overflow float32
_DEVICES: Final = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "xla", "xpu")


def check_choice(option: str, given: Iterable[str], known: Collection[str]) -> list[str]:
    """The given values of an option, each once; raises an InputError if one is not known."""
    for value in (values := list(dict.fromkeys(given))):
        if value not in known:
            raise InputError(f"--{option} must be one of {', '.join(known)}, got {value!r}; choose one")
    return values


def check_enable_options(**given: Any) -> None:
    """Refuse values that `hf_fastdecode.enable` does not take, given as options or by the environment."""
    try:
        Options(**given)
    except ValueError as error:
        text = str(error)
        for name in given:
            text = text.replace(name, name.replace("_", "-"))
        raise InputError(text if text.startswith("$") else f"--{text}") from error


def check_device(name: str) -> None:
    """Refuse what torch does not know as a device; whether this machine has it, `pick_device` finds out."""
    kind = re.fullmatch(r"([a-z]+)(:\d+)?", name)
    if name != "auto" and (kind is None or kind[1] not in _DEVICES):
        raise InputError(f"there is no device {name!r}; try auto or cpu, or cuda:0 for the first GPU")


def pick_device(name: str) -> torch.device:
    """The device of this name, if it is here; ``auto`` is the first GPU, or else the CPU. Imports torch."""
    with exit_on_interrupt():
        import torch
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("meta"):
        raise InputError(f"device {name!r} holds no numbers; try auto or cpu")
    check_device(name)
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {name!r} is not available: {one_line(error)}; try auto or cpu") from error
    return torch.device(name)


def check_count(option: str, *values: int) -> None:
    """Refuse numbers below 1 of an option that counts something."""
    for value in values:
        if value < 1:
            raise InputError(f"--{option} must be at least 1, got {value}; leave it out for its default")


def parse_counts(option: str, text: str) -> list[int]:
    """Whole numbers of at least 1 from ``1,4,16``, rising."""
    parts = split_values(text)
    if wrong := [part for part in parts if not re.fullmatch("0*[1-9][0-9]*", part)]:
        raise InputError(
            f"--{option} must be whole numbers of at least 1 with commas between, got {wrong[0]!r}; such as 1,8,32"
        )
    return sorted(set(map(int, parts)))


def split_values(text: str) -> list[str]:
    """The values between commas."""
    return [part.strip() for part in text.split(",")]


def check_sampling(temperature: float, top_p: float, seed: int, *, zero_is_greedy: bool) -> None:
    """Refuse a temperature, top-p or seed out of its bounds; temperature 0 may be greedy."""
    if not (temperature >= LEAST_TEMPERATURE and math.isfinite(temperature)) and not (
        zero_is_greedy and temperature == 0
    ):
        raise InputError(
            f"--temperature must be 0 (greedy) or at least 1e-6 and finite, got {temperature:g}"
            if zero_is_greedy
            else f"--temperature must be at least {LEAST_TEMPERATURE:g} and finite, got {temperature:g}; "
            "`hf-fastdecode generate --greedy` takes the most likely tokens"
        )
    if not 0 < top_p <= 1:
        raise InputError(f"--top-p must be above 0 and at most 1, got {top_p:g}; 1 turns it off")
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed must be at least 0 and below 2**63, got {seed}; leave it out for 0")


def pick_tasks(ids: Sequence[int], shots: int) -> list[Task]:
    """The embedded tasks with these ids; checks the number of shots too."""
    most = len(fewshot_tasks())
    if not 0 <= shots <= most:
        raise InputError(
            f"--shots must be between 0 and {most}, the number of solved examples, got {shots}; leave it out"
        )
    tasks = {task["task_id"]: task for task in embedded_tasks()}
    if unknown := [one for one in ids if one not in tasks]:
        raise InputError(
            f"there is no task {unknown[0]}; the embedded tasks have ids from {min(tasks)} to {max(tasks)}"
        )
    return [tasks[one] for one in ids]
