"""Records what a fixed set of calls does, to show that a change of the code's structure changes nothing else.

    python -m tools.freeze write FILE
    python -m tools.freeze write FILE --architectures [CLASS ...]   # the verdicts of `tests.architectures` too
    python -m tools.freeze compare FILE [FILE2]                     # with another file, or with what calls do now

On the CPU, captured steps run uncaptured, over the same tables, by interpreted kernels. Where there is a CUDA device,
every call runs there in bfloat16, eagerly and captured, and kernel launches and waits of the host are counted.

An entry holds digests of the tokens and of returned scores, the text of the report, the number of forward passes, and
what the host did: calls of the package's functions (also for each layer, from one pass to the next; comprehensions do
not count) and files that were entered. `compare` prints what differs. Its exit code is 1 when any of the first differ,
or the host does more than before.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Differences between two files: whether they are a fault, and lines about them."""
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield True, f"{name}: only in the {'second' if old is None else 'first'} file"
            continue
        for key in {**old, **new}:
            one, other = old.get(key), new.get(key)
            if one == other:
                continue
            if key == "report" and one and other:
                lines = list(difflib.unified_diff(one, other, lineterm="", n=0))[2:]
                yield True, "\n    ".join([f"{name}: report", *lines])
            elif key == "host" and one and other:
                changed = [part for part in one if one[part] != other[part]]
                worse = any((other[part] or 0) > (one[part] or 0) for part in changed)
                yield worse, f"{name}: {', '.join(f'{part} {one[part]} -> {other[part]}' for part in changed)}"
            else:
                yield name != "made on", f"{name}: {key} {one} -> {other}"


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.freeze", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write a file")
    write.add_argument("file", type=Path)
    write.add_argument("--architectures", nargs="*", metavar="CLASS", help="verdicts on these classes too, or on all")
    compare = commands.add_parser("compare", help="compare a file with another, or with what calls do now")
    compare.add_argument("file", type=Path)
    compare.add_argument("other", type=Path, nargs="?")
    given = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
    warnings.simplefilter("ignore")
    if given.command == "compare" and given.other:
        before, after = (json.loads(file.read_text()) for file in (given.file, given.other))
    else:
        from .measured import measure  # which imports Triton, after it is known whether kernels are interpreted

        if given.command == "write":
            given.file.write_text(json.dumps(measure(given.architectures), indent=1) + "\n")
            return 0
        before = json.loads(given.file.read_text())
        after = measure([name.removeprefix("architectures: ") for name in before if ": " in name] or None)
    found = list(differences(before, after))
    for fault, line in found:
        print(f"{'!' if fault else ' '} {line}")
    print(f"{len(found)} differences, {sum(fault for fault, _ in found)} of them faults")
    return int(any(fault for fault, _ in found))


if __name__ == "__main__":
    sys.exit(main())
