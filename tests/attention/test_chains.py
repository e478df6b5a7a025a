"""Which nodes are read in chains: every row still reads its whole path once."""

import random
from dataclasses import replace

import pytest

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.launch.plan import chains_may_stay, choose_chains, node_shapes, with_own_nodes
from hf_fastdecode.kernels.forest_decode.schedule import NodeShape

from .forests import random_forest

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode.config import CHAINED, Config


def tree(*levels: tuple[int, int], rows: int) -> Forest:
    """A forest of levels of so many nodes of so many tokens, evenly divided."""
    nodes = [
        Node(Span(0, 1000 * depth + 10 * index, tokens), index * rows // count, rows // count, depth)
        for depth, (count, tokens) in enumerate(levels)
        for index in range(count)
    ]
    return Forest(rows, nodes)


@pytest.mark.parametrize("seed", range(60))
def test_rows_read_their_paths_in_order(seed):
    rng = random.Random(seed)
    forest = random_forest(rng, rng.randint(1, 30), rng.randint(0, 6), longest=rng.choice((3, 20, 200)))
    if seed % 2:
        counts = [1, *sorted(2 ** rng.randint(0, 4) for _ in range(5)), 16]
        forest = tree(*((count, rng.randint(1, 30)) for count in counts), rows=16)
    config = Config(rng.choice((16, 32, 64)), block_n=rng.choice((16, 64)), chain=rng.choice((2, 3, 8)))
    shapes = node_shapes(forest, rng.choice((1, 4, 16)), config)
    assert [shape[:2] for shape in shapes] == sorted(shape[:2] for shape in shapes)
    read = [[] for _ in range(forest.rows)]
    for shape in shapes:
        assert 1 <= len(shape.links) <= config.chain
        assert shape.length == sum(forest.nodes[index].span.length for index, _ in shape.links)
        assert [tokens for _, tokens in shape.links] == [forest.nodes[index].span.length for index, _ in shape.links]
        last = forest.nodes[shape.links[-1][0]]
        assert (shape.row_start, shape.row_count) == (last.row_start, last.row_count)
        for row in range(shape.row_start, shape.row_start + shape.row_count):
            read[row].append((shape.depth, shape.links))
    for row, found in enumerate(read):
        assert [depth for depth, _ in found] == list(range(len(found)))
        spans = [forest.nodes[index].span for _, links in found for index, _ in links]
        assert tuple(spans) == forest.paths[row]


def test_short_nodes_are_read_with_those_below():
    """Query tiles of four rows: reading the root once more with each of its descendants takes no more of them."""
    forest = tree((1, 512), (4, 4), (8, 4), (16, 4), rows=64)
    shapes = node_shapes(forest, 4, Config(16, block_n=64, chain=8))
    assert [len(shape.links) for shape in shapes] == [4] * 16
    assert shapes[1] == NodeShape(0, 4, 4, 524, ((0, 512), (1, 4), (5, 4), (14, 4)))
    shorter = node_shapes(forest, 4, Config(16, block_n=64, chain=2))
    assert [(shape.depth, len(shape.links)) for shape in shorter] == [(0, 2)] * 4 + [(1, 2)] * 16
    assert node_shapes(forest, 4, Config(16))[1] == NodeShape(1, 0, 16, 4)


def test_a_long_node_is_read_by_itself_where_that_takes_fewer_query_tiles():
    forest = tree((1, 512), (8, 4), (32, 4), rows=32)
    shapes = node_shapes(forest, 1, Config(16, block_n=64, chain=8))
    assert shapes[0] == NodeShape(0, 0, 32, 512, ((0, 512),))
    assert [(shape.depth, len(shape.links)) for shape in shapes[1:]] == [(1, 2)] * 32


def test_a_node_that_some_rows_end_with_is_read_alone():
    forest = Forest(4, [Node(Span(0, 0, 3), 0, 4), Node(Span(0, 5, 3), 0, 3, 1)])
    shapes = node_shapes(forest, 1, Config(16, chain=4))
    assert [shape.links for shape in shapes] == [((0, 3),), ((1, 3),)]


HOPPER = Config(128, block_n=128, stages=2, hopper=True)
NARROW = Config(16, block_n=64)


@pytest.mark.parametrize(
    ("levels", "rows", "kv_heads", "queries", "found"),
    [
        (((1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (32, 16), (64, 16), (128, 16)), 1024, 8, 4, 64),
        (((1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (32, 16), (64, 16), (128, 16)), 1024, 32, 1, 16),
        (((1, 1024), (16, 256)), 64, 8, 4, 64),
        (((1, 1024), (4, 256), (16, 128)), 512, 8, 4, None),
        (((1, 2400), (8, 512)), 1024, 8, 4, None),
        (((1, 2048),), 1024, 8, 4, None),
    ],
)
def test_chains_are_for_short_nodes(levels, rows, kv_heads, queries, found):
    """Trees of FastTree, and contexts that many rows share, of which the Hopper kernel's wide tiles waste nothing."""
    forest = tree(*levels, rows=rows)
    config = choose_chains(forest, kv_heads, queries, 128, HOPPER, 132)
    assert config is HOPPER if found is None else (config in CHAINED and config.block_m == found)


def test_narrow_tiles_large_heads_and_single_levels_have_no_chains():
    deep = tree(*((2**depth, 16) for depth in range(8)), rows=1024)
    for forest, head_dim, config in (
        (deep, 256, HOPPER),
        (deep, 128, NARROW),
        (tree((128, 16), rows=1024), 128, HOPPER),
        (Forest(1024), 128, HOPPER),
    ):
        assert choose_chains(forest, 8, 4, head_dim, config, 132) is config


@pytest.mark.parametrize(("levels", "rows"), [(((1, 4000),), 10), (((1, 8), (2, 256)), 64)])
def test_own_nodes_do_not_decide(levels, rows):
    """A captured step has its launch parameters before any row has own nodes, and keeps them."""
    forest = tree(*levels, rows=rows)
    for tokens in (1, 384):
        found = choose_chains(with_own_nodes(forest, tokens), 1, 16, 128, HOPPER, 132)
        assert found is choose_chains(forest, 1, 16, 128, HOPPER, 132)


@pytest.mark.parametrize(
    ("levels", "rows", "wide", "stays"),
    [
        (((1, 190), (2, 200)), 16, Config(64, block_n=128), True),  # without chains about as fast
        (((1, 40), (2, 200)), 16, Config(64, block_n=128), True),
        (((1, 16384), (2, 200)), 256, HOPPER, False),
        (((2, 300),), 16, Config(64, block_n=128), False),  # nothing is known of single levels
        ((), 16, Config(64, block_n=128), False),
    ],
)
def test_captured_chains_stay_where_they_cost_little(levels, rows, wide, stays):
    forest = with_own_nodes(tree(*levels, rows=rows), 1)
    chained, _ = CHAINED
    assert chains_may_stay(forest, 2, 4, chained, wide, 132) is stays
    assert not chains_may_stay(forest, 2, 4, chained, NARROW, 132)
    assert not chains_may_stay(forest, 2, 4, replace(chained, chain=3), wide, 132)  # whose time is not known
