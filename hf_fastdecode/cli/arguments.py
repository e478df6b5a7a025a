"""Arguments in messages of the library, written as the options of the command line."""

from __future__ import annotations

import re
from typing import Final

# The library's errors name arguments in backticks, with or without a value: `dtype`, `dtype="bfloat16"`, `chat=False`.
_ARGUMENT: Final = re.compile(r"`(\w+)(?:=([^`]*))?`")

OPTIONS: Final = {
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("cache_dtype", "calibration", "chat", "data", "device", "dtype", "format", "limit"),
            *(
                "max_shard_size",
                "n",
                "new_tokens",
                "out",
                "plan",
                "plot",
                "point",
                "points",
                "rank",
                "resume",
                "rope",
                "rows",
            ),
            *("sandbox", "shard", "shots", "split", "task", "task_ids", "tokens", "tolerance", "tree", "verify"),
        )
    },
    "allow_unsafe": "--allow-unsafe-code",
    "prompt_format": "--format",
}
"""The option of each argument that messages name."""


def in_options(message: str) -> str:
    """The message with options for arguments: ``--dtype bfloat16`` for `dtype="bfloat16"`, ``--no-chat`` for
    `chat=False`. What is no argument of `OPTIONS` stays as it is."""
    return _ARGUMENT.sub(_option, message)


def _option(match: re.Match[str]) -> str:
    name, value = match.groups()
    if (option := OPTIONS.get(name)) is None:
        return match[0]
    if value in ("True", "False"):
        return option if value == "True" else f"--no-{option[2:]}"
    return option if value is None else f"{option} {value.strip(chr(34) + chr(39))}"
