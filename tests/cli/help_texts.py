"""What the help of every command must be, of ``hf-fastdecode`` and of ``python -m benchmarks``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any

from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import parse_args as torchrun_arguments
from typer.main import get_command


def commands(app: Any) -> list[tuple[str, ...]]:
    """The words of every command that help lists, groups included."""

    def found(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for name, command in getattr(group, "commands", {}).items():
            if not command.hidden:
                yield from found(command, (*words, name))

    return list(found(get_command(app), ()))


def check_width(shown: str) -> None:
    """No word is cut at 80 columns, and an example that takes several lines can be pasted."""
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    examples = takewhile(lambda line: line[:2] in ("", "  "), shown.partition("Examples:")[2].splitlines())
    lines = [line.strip() for line in examples if line.strip()]
    assert len(lines) >= shown.count("Examples:")
    before_options = shown.partition("Examples:")[2].partition("╭")[0].split()
    behind = before_options[len(" ".join(lines).split()) :]
    assert not behind or behind[-1].endswith("."), f"no sentence: {' '.join(behind)}"
    for before, line in pairwise(["", *lines]):
        command = line.removeprefix("CUDA_VISIBLE_DEVICES=1 ").split()[0]
        known = command in ("hf-fastdecode", "torchrun", "accelerate", "cat") or line.startswith(
            "python -m benchmarks"
        )
        assert known or before.endswith("\\"), line


def check_examples(shown: str, module: str, words: tuple[str, ...]) -> None:
    """An example of the command itself; torchrun and accelerate hand over what is the command's, `--n` among it."""
    lines = takewhile(lambda line: line[:2] in ("", "  "), shown.partition("Examples:")[2].splitlines())
    text = "\n".join(line.strip() for line in lines).replace("\\\n", " ")
    found = [shlex.split(line) for line in text.splitlines() if line]
    assert any(" ".join(words) in " ".join(one) for one in found)
    for given in found:
        if given[0] == "torchrun":
            parsed = torchrun_arguments(given[1:])
        elif given[0] == "accelerate":
            parsed = launch_command_parser().parse_args(given[2:])
        else:
            continue
        assert (parsed.module, parsed.training_script) == (True, module)
        rest = parsed.training_script_args
        rest = rest[1:] if rest[:1] == ["--"] else rest  # Python 3.13 leaves it, and so the command takes it
        assert " ".join(rest[: len(words)]) == " ".join(words)
        assert rest == given[-len(rest) :]
