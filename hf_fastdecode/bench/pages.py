"""Keys and values in pages, as servers keep them: sequences are lists of pages, and equal pages are stored once.

Tokens of a case are numbered: those of the nodes, end to end as in their segment, then each row's suffix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .op_cases import OpCase
from .op_inputs import OpInputs

PAGE_SIZE = 16  # vLLM's default
LAYOUTS = {"HND": (1, 0, 2, 3), "NHD": (1, 2, 0, 3)}
"""Names of the orders of a page's heads, tokens and numbers, as axes of ``[kv_heads, pages, PAGE_SIZE, head_dim]``."""

Tokens = NDArray[np.int64]
"""Numbers of a sequence's tokens, in order."""


@dataclass(frozen=True)
class Sequences:
    """Page tables of sequences, on the CPU, as int32.

    Attributes:
        query_start: Where each sequence's queries start, ``[sequences + 1]``; rows are queries, in order.
        page_start: Where each sequence's pages start in `pages`, ``[sequences + 1]``.
        pages: Numbers of the pages, sequence after sequence.
        last_length: Tokens in each sequence's last page, ``[sequences]``; the others are full.
    """

    query_start: Tensor
    page_start: Tensor
    pages: Tensor
    last_length: Tensor


class PagePool:
    """The pages of all sequences; sequences with the same tokens in a page have one page."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def add(self, sequences: Sequence[Tokens], queries: Iterable[int]) -> Sequences:
        """The page tables of sequences, none empty, with so many queries each."""
        pages = [self._pages(tokens) for tokens in sequences]
        return Sequences(
            _starts(queries),
            _starts(map(len, pages)),
            torch.from_numpy(np.concatenate(pages)),
            torch.tensor([(len(tokens) - 1) % PAGE_SIZE + 1 for tokens in sequences], dtype=torch.int32),
        )

    def _pages(self, tokens: Tokens) -> NDArray[np.int32]:
        filled = np.pad(tokens, (0, -len(tokens) % PAGE_SIZE), constant_values=-1).reshape(-1, PAGE_SIZE)
        numbers = self._numbers
        return np.array([numbers.setdefault(page.tobytes(), len(numbers)) for page in filled], dtype=np.int32)

    def fill(self, inputs: OpInputs, layout: str) -> tuple[Tensor, Tensor]:
        """Keys and values in pages, a copy.

        Args:
            inputs: The case's inputs.
            layout: One of `LAYOUTS`; ``HND`` is ``[pages, kv_heads, PAGE_SIZE, head_dim]``.
        """
        # Nobody reads what follows the tokens of a partial page; -1 puts the last token there, which is finite.
        slots = torch.frombuffer(bytearray().join(self._numbers), dtype=torch.int64).to(inputs.query.device)

        def part(nodes: Tensor, own: Tensor) -> Tensor:
            tokens = torch.cat([nodes, own.transpose(0, 1).flatten(1, 2)], 1)  # [kv_heads, tokens, head_dim]
            return tokens[:, slots].unflatten(1, (-1, PAGE_SIZE)).permute(LAYOUTS[layout]).contiguous()

        return part(inputs.segment.keys, inputs.suffix.keys), part(inputs.segment.values, inputs.suffix.values)


def whole_rows(pool: PagePool, case: OpCase) -> Sequences:
    """Each row's whole context and suffix as one sequence; rows share the full pages of what they share."""
    paths: list[list[Tokens]] = [[] for _ in range(case.rows)]
    start = 0
    for node in case.nodes:
        tokens = np.arange(start, start + node.length)
        for path in paths[node.row_start : node.row_start + node.row_count]:
            path.append(tokens)
        start += node.length
    rows = [np.concatenate([*path, own]) for path, own in zip(paths, _suffixes(case), strict=True)]
    return pool.add(rows, [1] * case.rows)


def levels(pool: PagePool, case: OpCase) -> list[Sequences]:
    """The nodes of each depth as sequences, and last the suffixes."""
    found, start = [], 0
    for _, level in groupby(case.nodes, lambda node: node.depth):
        nodes = list(level)
        sequences = []
        for node in nodes:
            sequences.append(np.arange(start, start + node.length))
            start += node.length
        found.append(pool.add(sequences, [node.row_count for node in nodes]))
    return [*found, pool.add(_suffixes(case), [1] * case.rows)]


def _suffixes(case: OpCase) -> list[Tokens]:
    return list(np.arange(case.stored_tokens, case.stored_tokens + case.rows * case.suffix).reshape(case.rows, -1))


def _starts(lengths: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
