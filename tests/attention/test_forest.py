"""Forests as descriptions: every operation is checked on the tokens that each row attends to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_fastdecode.attention.forest import Forest, Node, Path, Span, path_slice

from .forests import random_forest, tokens

PROPERTY = settings(deadline=None, database=None, max_examples=200)

SPANS = st.builds(Span, st.integers(0, 1), st.integers(0, 6), st.integers(0, 5))


@st.composite
def path_lists(draw: st.DrawFn) -> list[Path]:
    """Paths of few tokens, so that they often meet; a row often repeats the beginning of the row before it."""
    paths: list[Path] = []
    for _ in range(draw(st.integers(0, 7))):
        path: list[Span] = []
        if paths and draw(st.booleans()):
            left = draw(st.integers(0, 12))
            for span in paths[-1]:
                kept = min(left, span.length)
                path.append(Span(span.segment, span.start, kept))
                left -= kept
        paths.append((*path, *draw(st.lists(SPANS, max_size=4))))
    return paths


FORESTS = st.builds(
    random_forest, st.randoms(use_true_random=False), st.integers(0, 9), st.integers(0, 4), st.integers(1, 5)
)


def assert_well_formed(forest: Forest) -> None:
    """Nodes are non-empty ranges inside the rows; of one depth they are apart, and each is inside one node above."""
    for depth, level in enumerate(forest.levels):
        rows = [row for node in level for row in range(node.row_start, node.row_start + node.row_count)]
        assert rows == sorted(set(rows)) and set(rows) <= set(range(forest.rows))
        for node in level:
            own = set(range(node.row_start, node.row_stop))
            assert node.depth == depth and node.span.length > 0 and own
            above = forest.levels[depth - 1] if depth else [Node(node.span, 0, forest.rows)]
            assert sum(own <= set(range(parent.row_start, parent.row_stop)) for parent in above) == 1
    assert sorted(forest.nodes, key=str) == sorted((node for level in forest.levels for node in level), key=str)


def rows_as_tokens(forest: Forest) -> list[list[tuple[int, int]]]:
    return [tokens(path) for path in forest.paths]


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# from_paths


@PROPERTY
@given(paths=path_lists())
def test_from_paths_gives_each_row_its_tokens_in_order(paths: list[Path]) -> None:
    forest = Forest.from_paths(paths)
    assert forest.rows == len(paths)
    assert rows_as_tokens(forest) == [tokens(path) for path in paths]
    assert forest.context_lengths == tuple(len(tokens(path)) for path in paths)
    assert_well_formed(forest)


@PROPERTY
@given(paths=path_lists())
def test_neighbouring_rows_share_nodes_up_to_where_their_tokens_part(paths: list[Path]) -> None:
    forest = Forest.from_paths(paths)
    for row, (upper, lower) in enumerate(pairwise(paths)):
        shared = [node for node in forest.nodes if node.row_start <= row and row + 2 <= node.row_stop]
        assert sum(node.span.length for node in shared) == common_prefix(tokens(upper), tokens(lower))


@PROPERTY
@given(paths=path_lists())
def test_stored_tokens_counts_each_stored_token_once(paths: list[Path]) -> None:
    assert Forest.from_paths(paths).stored_tokens == len({token for path in paths for token in tokens(path)})


@PROPERTY
@given(paths=path_lists())
def test_from_paths_of_its_own_paths_is_the_same_forest(paths: list[Path]) -> None:
    forest = Forest.from_paths(paths)
    assert Forest.from_paths(forest.paths) == forest


def test_unequal_groups_below_a_shared_root() -> None:
    root, first, second, leaf = Span(0, 0, 10), Span(0, 20, 5), Span(1, 0, 7), Span(1, 30, 1)
    forest = Forest.from_paths([(root, first), (root, second, leaf), (root, second), (root, second), (root,)])
    assert forest.nodes == (Node(root, 0, 5, 0), Node(first, 0, 1, 1), Node(second, 1, 3, 1), Node(leaf, 1, 1, 2))
    assert forest.context_lengths == (15, 18, 17, 17, 10)
    assert forest.starts == ((0,) * 5, (10,) * 5, (15, 17, 17, 17, 10))
    assert forest.stored_tokens == 23


def test_a_span_is_split_where_rows_part_or_end_in_its_middle() -> None:
    forest = Forest.from_paths([(Span(0, 4, 6),), (Span(0, 4, 9),), (Span(0, 4, 2), Span(1, 0, 3)), (Span(0, 5, 2),)])
    assert forest.nodes == (
        Node(Span(0, 4, 2), 0, 3, 0),
        Node(Span(0, 5, 2), 3, 1, 0),
        Node(Span(0, 6, 4), 0, 2, 1),
        Node(Span(1, 0, 3), 2, 1, 1),
        Node(Span(0, 10, 3), 1, 1, 2),
    )


def test_spans_that_follow_each_other_in_storage_make_one_node() -> None:
    pieces = (Span(0, 0, 3), Span(0, 3, 0), Span(1, 9, 0), Span(0, 3, 4))
    assert Forest.from_paths([pieces, (Span(0, 0, 7),)]).nodes == (Node(Span(0, 0, 7), 0, 2),)


def test_rows_that_are_no_neighbours_show_one_span_in_two_nodes() -> None:
    forest = Forest.from_paths([(Span(0, 0, 4),), (), (Span(0, 0, 4),)])
    assert forest.nodes == (Node(Span(0, 0, 4), 0, 1), Node(Span(0, 0, 4), 2, 1))
    assert (forest.stored_tokens, forest.context_lengths) == (4, (4, 0, 4))


def test_a_staircase_is_as_deep_as_it_has_rows() -> None:
    forest = Forest.from_paths([(Span(0, 0, length),) for length in range(1, 41)])
    assert len(forest.levels) == 40 and forest.stored_tokens == 40
    assert [level[0].row_count for level in forest.levels] == list(range(40, 0, -1))
    assert_well_formed(forest)


# batches


@PROPERTY
@given(forest=FORESTS)
def test_batches_are_the_levels_cut_into_runs_of_alike_nodes(forest: Forest) -> None:
    for level, batches in zip(forest.levels, forest.batches, strict=True):
        assert tuple(node for batch in batches for node in batch) == level
        for batch in batches:
            assert len({(node.span.segment, node.span.length, node.row_count) for node in batch}) == 1
            assert all(left.row_stop == right.row_start for left, right in pairwise(batch))
            spacing = {right.span.start - left.span.start for left, right in pairwise(batch)}
            assert len(spacing) <= 1 and all(apart >= batch[0].span.length for apart in spacing)


def test_evenly_spaced_prompts_of_one_length_make_one_batch() -> None:
    prompts = [Node(Span(0, 10 * prompt, 8), 3 * prompt, 3) for prompt in range(4)]
    assert Forest(12, prompts).batches == ((tuple(prompts),),)
    odd = Node(Span(0, 41, 8), 12, 3)
    assert Forest(15, [*prompts, odd]).batches == ((tuple(prompts), (odd,)),)


# select_rows, drop_last, path_slice


@PROPERTY
@given(forest=FORESTS, data=st.data())
def test_select_rows_is_indexing(forest: Forest, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, forest.rows - 1), max_size=12) if forest.rows else st.just([]))
    selected, before = forest.select_rows(rows), rows_as_tokens(forest)
    assert rows_as_tokens(selected) == [before[row] for row in rows]
    assert rows_as_tokens(forest) == before
    assert_well_formed(selected)


@PROPERTY
@given(forest=FORESTS)
def test_random_forests_are_well_formed_and_a_set_of_nodes(forest: Forest) -> None:
    assert_well_formed(forest)
    assert Forest(forest.rows, reversed(forest.nodes)) == forest
    assert hash(Forest(forest.rows, reversed(forest.nodes))) == hash(forest)
    assert forest != Forest(forest.rows + 1, forest.nodes)
    assert forest.stored_tokens == len({token for node in forest.nodes for token in tokens(node.span)})
    assert f"rows={forest.rows}" in repr(forest)


@PROPERTY
@given(paths=path_lists(), data=st.data())
def test_drop_last_shortens_each_row(paths: list[Path], data: st.DataObject) -> None:
    forest = Forest.from_paths(paths)
    lost = [data.draw(st.integers(0, length)) for length in forest.context_lengths]
    shorter = forest.drop_last(lost)
    assert rows_as_tokens(shorter) == [
        path[: len(path) - count] for path, count in zip(rows_as_tokens(forest), lost, strict=True)
    ]
    assert_well_formed(shorter)


@pytest.mark.parametrize("lost", [[5], [0, 1, 2]])
def test_drop_last_needs_one_count_per_row_within_the_path(lost: list[int]) -> None:
    with pytest.raises(ValueError, match=r"0 to 4 of them, got 5|shorter|longer"):
        Forest(1, [Node(Span(0, 0, 4), 0, 1)]).drop_last(lost)


@PROPERTY
@given(path=st.lists(SPANS, max_size=5).map(tuple), start=st.integers(0, 30), stop=st.integers(0, 30))
def test_a_path_is_cut_like_its_tokens(path: Path, start: int, stop: int) -> None:
    assert tokens(path_slice(path, start, stop)) == tokens(path)[start:stop]


@PROPERTY
@given(span=SPANS, start=st.none() | st.integers(-7, 7), stop=st.none() | st.integers(-7, 7))
def test_a_span_is_cut_like_its_tokens(span: Span, start: int | None, stop: int | None) -> None:
    assert tokens(span[start:stop]) == tokens(span)[start:stop]
    assert span.stop - span.start == span.length


@pytest.mark.parametrize("step", [2, -1])
def test_a_span_has_no_stride(step: int) -> None:
    with pytest.raises(ValueError, match=f"step 1, got {step}"):
        Span(0, 0, 9)[::step]


# validation

SPAN = Span(0, 0, 4)


@pytest.mark.parametrize(
    ("rows", "nodes", "message"),
    [
        pytest.param(-1, [], r"rows >= 0, got -1", id="negative-rows"),
        pytest.param(2, [Node(Span(0, 3, 0), 0, 2)], r"at least one token.*length=0", id="empty-node"),
        pytest.param(2, [Node(SPAN, 0, 3)], r"row_count=3.*inside 0\.\.2", id="beyond-the-rows"),
        pytest.param(2, [Node(SPAN, -1, 2)], r"row_start=-1.*inside 0\.\.2", id="before-the-rows"),
        pytest.param(2, [Node(SPAN, 1, 0)], r"row_count=0.*non-empty", id="no-rows"),
        pytest.param(
            4, [Node(SPAN, 0, 3), Node(SPAN, 2, 2)], r"overlap.*row_count=3.*row_start=2", id="overlap-at-depth-0"
        ),
        pytest.param(
            4,
            [Node(SPAN, 0, 4), Node(SPAN, 0, 2, 1), Node(SPAN, 1, 1, 1)],
            r"overlap.*row_count=2.*row_start=1",
            id="overlap-at-depth-1",
        ),
        pytest.param(
            4,
            [Node(SPAN, 0, 2), Node(SPAN, 2, 2), Node(SPAN, 1, 2, 1)],
            r"row_start=1, row_count=2.*not inside one node of depth 0",
            id="across-two-parents",
        ),
        pytest.param(4, [Node(SPAN, 0, 2), Node(SPAN, 0, 3, 1)], r"row_count=3.*depth 0", id="wider-than-its-parent"),
        pytest.param(4, [Node(SPAN, 0, 2), Node(SPAN, 2, 2, 1)], r"row_start=2.*depth 0", id="beside-its-parent"),
        pytest.param(4, [Node(SPAN, 0, 2, 1)], r"depth=1.*depth 0", id="no-root"),
        pytest.param(4, [Node(SPAN, 0, 4, -1)], r"at least 0.*depth=-1", id="negative-depth"),
        pytest.param(4, [Node(SPAN, 0, 4), Node(SPAN, 0, 2, 2)], r"depth=2.*depth 1", id="missing-level"),
    ],
)
def test_a_malformed_forest_is_refused_with_the_value(rows: int, nodes: list[Node], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Forest(rows, nodes)


def test_no_rows_and_no_nodes_are_forests() -> None:
    assert Forest.from_paths([]) == Forest(0)
    assert Forest.from_paths([(), ()]) == Forest(2)
    assert (Forest(2).levels, Forest(2).paths, Forest(2).stored_tokens) == ((), ((), ()), 0)


def test_spans_begin_inside_their_segment():
    with pytest.raises(ValueError, match="at least 0, got -3 and 5"):
        Span(0, -3, 5)


def test_rows_cannot_lose_fewer_than_no_tokens():
    with pytest.raises(ValueError, match="0 to 5 of them, got -1"):
        Forest.from_paths([(Span(0, 0, 5),)]).drop_last([-1])
