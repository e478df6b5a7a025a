"""Begins to compile, once a model's first step is captured, kernels that captures of other sizes are likely to need.

Launch parameters depend on numbers of rows and on lengths of contexts. The kernels are listed by launches that do not
take place, and compiled in a process of their own. Those that are not listed are compiled when a step is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ...attention.forest import Forest, Node, Span
from ...kernels.ahead import listed
from ...kernels.compiling_process import CompilingProcess
from ...kernels.noted import Note
from .cuda_graph import bucket

logger = logging.getLogger("hf_fastdecode")

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_SHORT, _LONG = 512, 32768
"""Tokens of contexts for which launch parameters of short and of long ones are chosen."""


def compile_other_sizes(
    process: CompilingProcess, notes: Iterable[Note], forest: Forest, device: torch.device
) -> None:
    """Begin to compile the kernels of captures of other sizes than the first, the most likely first.

    Args:
        process: Does it.
        notes: What a step asks kernels for.
        forest: Of the first captured step.
    """
    try:
        with torch.cuda.device(device):
            process.compile(listed(lambda: launch_other_sizes(notes, forest)))
    except Exception as error:
        logger.debug("kernels of other sizes are compiled when they are launched: %s", error)
        process.end()


def launch_other_sizes(notes: Iterable[Note], forest: Forest) -> None:
    """Launch what steps of other sizes than a forest's would: first those of about as many rows."""
    notes, now = list(notes), bucket(forest.rows)
    longest = max(forest.context_lengths, default=0)
    sizes = sorted(_ROWS, key=lambda rows: (max(rows / now, now / rows), -rows))
    for rows in sizes:
        for tokens in (longest, _LONG, _SHORT):
            for ask, of_nodes in notes:
                if of_nodes or tokens == longest:
                    ask(rows, _shared_by_all(rows, tokens, len(forest.levels)))
    for rows in sizes:
        for ask, of_nodes in notes:
            if of_nodes:
                ask(rows, Forest(rows, [Node(Span(row, 0, _SHORT), row, 1) for row in range(rows)]))


def _shared_by_all(rows: int, tokens: int, levels: int) -> Forest:
    """Contexts of so many tokens in so many levels of nodes."""
    each = max(1, tokens // max(1, levels))
    return Forest(rows, [Node(Span(depth, 0, each), 0, rows, depth) for depth in range(levels)])
