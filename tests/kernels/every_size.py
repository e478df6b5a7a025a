"""Which kernels steps of other sizes need, of those that begin to compile after the first: on a GPU that is pretended.

``python -m tests.kernels.every_size`` prints, for each shape of a model, what a step needs that has not begun.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Set
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from hf_fastdecode.attention.launch.step_tables import Attention, attend_nothing
from hf_fastdecode.generation.fused.products import RowProducts
from hf_fastdecode.generation.steps.cuda_graph import bucket
from hf_fastdecode.generation.steps.other_sizes import launch_other_sizes
from hf_fastdecode.kernels.ahead import Launch, listed
from hf_fastdecode.kernels.compiling_process import sources_of
from hf_fastdecode.kernels.noted import taking_notes
from hf_fastdecode.kernels.row_products import config

from .compile_all import CUDA, Activation, Claimed, Forest, Node, Span, pretending

ROWS = (1, 2, 3, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 100, 128)
CONTEXTS = (100, 2048, 5000, 20_000)


class Shape(NamedTuple):
    """Sizes of a model's layers."""

    kv_heads: int
    group: int
    hidden: int


SHAPES = {"7b-mha": Shape(32, 1, 11008), "8b-gqa": Shape(8, 4, 14336)}


def step(shape: Shape, forest: Forest) -> None:
    """What a captured step over a forest launches that is compiled for numbers of rows or lengths."""
    rows, width = bucket(forest.rows), shape.kv_heads * shape.group * 128
    attend_nothing(Attention(shape.kv_heads, shape.group, 1, 128, torch.bfloat16), rows, forest, device=CUDA)

    def empty(*sizes: int) -> Any:
        return torch.empty(sizes, dtype=torch.bfloat16, device=CUDA)

    products, x, columns = RowProducts(), empty(rows, width), 128 * shape.kv_heads
    products.linears(x, [empty(width, width), empty(columns, width), empty(columns, width)], [None] * 3)
    products.linears(x, [empty(width, width)], [None])
    products.gated(x, (empty(shape.hidden, width), empty(shape.hidden, width)), (None, None), Activation.SILU)
    products.linears(empty(rows, shape.hidden), [empty(width, shape.hidden)], [None])


def keys_of(launches: Iterable[Launch]) -> Set[str]:
    """By which Triton stores their kernels."""
    return sources_of(launches).keys()


def forests() -> Iterator[Forest]:
    """Prompts of some lengths, one for all rows and one for each."""
    for rows, context, each in product(ROWS, CONTEXTS, (False, True)):
        nodes = [Node(Span(row, 0, context), row, 1) for row in range(rows)]
        yield Forest(rows, nodes if each else [Node(Span(0, 0, context), 0, rows)])


def missing(shape: Shape, first: Forest) -> list[str]:
    """What steps need that is not among the first's kernels, nor among those that begin to compile after it."""
    with taking_notes() as notes:
        launched = listed(lambda: step(shape, first))
    begun = listed(lambda: launch_other_sizes(notes.values(), first))
    known = keys_of(launched) | keys_of(begun)
    assert 10 < len(known) < 40
    found = []
    for forest in forests():
        launches = listed(lambda forest=forest: step(shape, forest))
        found += [f"{forest.rows} rows: {one.kernel.__name__}" for one in launches if not keys_of([one]) <= known]
    return found


def main() -> None:
    """Print them."""
    first = Forest(16, [Node(Span(0, 0, 2048), 0, 16)])
    of_streams = patch.object(RowProducts, "_counters", lambda *_: None)
    with pretending((9, 0)), patch.object(config, "Tensor", Claimed), of_streams:
        print(json.dumps({name: missing(shape, first) for name, shape in SHAPES.items()}))


if __name__ == "__main__":
    main()
