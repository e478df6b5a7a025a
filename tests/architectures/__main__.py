"""``python -m tests.architectures [CLASS ...]``: compare all generating classes, or these, with stock.

Prints each class's verdict and how many there are of each kind. Of a run over all classes it writes
``docs/architectures.md``; of one over some, it replaces their rows, if the page is of the installed transformers. The
exit code is 1 when any class gave other tokens than stock, raised, or proved nothing.
"""

from __future__ import annotations

import sys
from collections import Counter

import transformers

from .classes import generating_classes
from .compare import Verdict, verdict_on
from .page import PAGE, read, version, written
from .processes import verdicts_of

_FAILURES = ("wrong", "crashed", "blind")


def main() -> int:
    """Run the command; returns the exit code."""
    asked = sys.argv[1:]
    if unknown := sorted(set(asked) - set(generating_classes())):
        sys.exit(f"{unknown[0]} is no generating class of the installed transformers")
    verdicts: dict[str, Verdict] = {}
    for name, verdict, seconds in verdicts_of(asked or list(generating_classes()), verdict_on):
        verdicts[name] = verdict
        print(f"{seconds:6.1f} s  {name}: {verdict.kind}{verdict.reason and ', '}{verdict.reason}", flush=True)
    counts = Counter(verdict.kind for verdict in verdicts.values())
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    if not asked or version() == transformers.__version__:
        PAGE.write_text(written(({} if not asked else read()) | verdicts))
    return int(any(counts[kind] for kind in _FAILURES))


if __name__ == "__main__":
    sys.exit(main())
