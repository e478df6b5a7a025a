"""Plans of random prompts are those of an oracle that compares everything, and are made in near-linear time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Path, Span, path_slice
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.generation.prompts.packed import _passes
from hf_fastdecode.generation.prompts.prompt_plan import PromptPlan, StoredPrompts, compare_prompts, group_prompts

from ..function_calls import calls_of
from . import planning_oracle as oracle

PROPERTY = settings(deadline=None, database=None, max_examples=500)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    """Ids and mask of a few rows: repeated, beginning alike, one beginning another, padded, with holes."""
    width = draw(st.integers(1, 9))
    texts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 9))):
        own = draw(st.lists(st.integers(0, 1), min_size=1, max_size=width))
        if texts and draw(st.integers(0, 3)):
            before = draw(st.sampled_from([texts[-1], texts[-1], *texts]))
            own = [*before[: draw(st.integers(0, len(before)))], *own][: draw(st.sampled_from([width, len(before)]))]
        texts.append(own)
    if draw(st.booleans()):  # no padding
        shortest = min(map(len, texts))
        return torch.tensor([text[:shortest] for text in texts]), None
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    if not draw(st.integers(0, 3)):
        mask[draw(st.integers(0, len(texts) - 1)), draw(st.integers(0, width - 1))] = 0
        mask[:, -1] = 1
    pad = draw(st.integers(0, 2))
    return torch.tensor([[pad] * (width - len(text)) + text for text in texts]), mask


def assert_same(plan: PromptPlan, expected: PromptPlan) -> None:
    assert (plan.items, plan.ends, plan.groups) == (expected.items, expected.ends, expected.groups)
    assert torch.equal(plan.new_tokens, expected.new_tokens)
    assert plan.forest == expected.forest


@PROPERTY
@given(calls=st.lists(batches(), min_size=1, max_size=3), data=st.data())
def test_plans_are_those_of_the_oracle(calls: list[tuple[Tensor, Tensor | None]], data: st.DataObject) -> None:
    """Each call finds in the cache what the calls before it stored, by paths of one or several spans."""
    cache = SharedContextCache()
    for input_ids, mask in calls:
        groups, expected = group_prompts(input_ids, mask), oracle.group_prompts(input_ids, mask)
        assert [(tuple(group.tokens.tolist()), group.count) for group in groups] == expected
        least, max_tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
        compared = compare_prompts(groups, StoredPrompts(cache), min_shared_tokens=least)
        plan = compared.plan()
        expected_plan, stored = oracle.plan_prompts(expected, cache, min_shared=least)
        assert_same(plan, expected_plan)
        assert compared.reused_lengths == compared.stored_lengths == stored
        assert compared.new_length == len(plan.new_tokens)
        assert [one for one, _ in _passes(plan.items, max_tokens)] == oracle.passes(plan.items, max_tokens)
        cache.add_segment(plan.new_tokens)
        kept = data.draw(st.sampled_from([(), cache.forest.paths]))
        cache.set_forest(Forest.from_paths([*kept, *plan.forest.paths]))


@PROPERTY
@given(calls=st.lists(batches(), min_size=2, max_size=2), recompute=st.integers(0, 9), least=st.integers(1, 4))
def test_last_tokens_to_recompute_are_new(
    calls: list[tuple[Tensor, Tensor | None]], recompute: int, least: int
) -> None:
    """Those of every prompt, though another one that goes on has them too, and the cache."""
    cache = SharedContextCache()
    for input_ids, mask in calls:
        groups = group_prompts(input_ids, mask)
        plan = compare_prompts(groups, StoredPrompts(cache), min_shared_tokens=least, recompute=recompute).plan()
        number = cache.add_segment(plan.new_tokens)
        cache.set_forest(plan.forest)
        prompts = [group.tokens for group in groups for _ in range(group.count)]
        for path, tokens in zip(plan.forest.paths, prompts, strict=True):
            assert torch.equal(cache.path_tokens(path), tokens)
            last = path_slice(path, max(0, len(tokens) - recompute), len(tokens))
            assert {span.segment for span in last} <= {number}


@settings(PROPERTY, max_examples=100)
@given(calls=st.lists(batches(), min_size=2, max_size=2))
def test_what_begins_kept_prompts_is_covered(calls: list[tuple[Tensor, Tensor | None]]) -> None:
    stored, prompts = [], []
    for input_ids, mask in calls:
        groups = group_prompts(input_ids, mask)
        cache = SharedContextCache()
        plan = compare_prompts(groups, StoredPrompts(cache), min_shared_tokens=2).plan()
        cache.add_segment(plan.new_tokens)
        cache.set_forest(plan.forest)
        stored.append(StoredPrompts(cache))
        prompts.append([group.tokens for group in groups])
    lengths = [max(oracle.common_prefix(new.tolist(), old.tolist()) for old in prompts[0]) for new in prompts[1]]
    assert stored[0].match_lengths(prompts[1]) == lengths
    assert stored[0].covers(stored[1]) == (lengths == [len(new) for new in prompts[1]])


@st.composite
def paths(draw: st.DrawFn) -> list[Path]:
    span = st.builds(Span, st.integers(0, 1), st.integers(0, 4), st.integers(0, 4))
    rows: list[Path] = []
    for _ in range(draw(st.integers(0, 7))):
        kept = rows[-1][: draw(st.integers(0, len(rows[-1])))] if rows else ()
        rows.append((*kept, *draw(st.lists(span, max_size=3))))
    return rows


@PROPERTY
@given(rows=paths())
def test_forests_are_those_of_the_oracle(rows: list[Path]) -> None:
    assert Forest.from_paths(rows) == oracle.forest_of(rows)


# how the work grows


def _random(rows: int, width: int = 64) -> Tensor:
    return torch.randint(3, 50_000, (rows, width), generator=torch.Generator().manual_seed(0))


def _behind_a_head(rows: int, width: int = 64) -> Tensor:
    ids = _random(rows, width)
    ids[: rows // 2, : width // 2] = ids[0, : width // 2]
    return ids


def _nested(rows: int) -> Tensor:
    ids = _random(rows)
    for level, size in enumerate((rows, 32, 16, 4)):
        own = slice(12 * level, 12 * level + 12)
        ids[:, own] = ids[::size, own].repeat_interleave(size, 0)
    return ids


def _equal(rows: int) -> Tensor:
    return _random(1).repeat(rows, 1)


def _plan(input_ids: Tensor, cache: SharedContextCache, max_tokens: int = 4096) -> PromptPlan:
    plan = compare_prompts(group_prompts(input_ids, None), StoredPrompts(cache), min_shared_tokens=8).plan()
    for _ in _passes(plan.items, max_tokens):
        pass
    return plan


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
@pytest.mark.parametrize("prompts", [_random, _behind_a_head, _nested, _equal])
def test_four_times_the_prompts_take_about_four_times_the_calls(prompts: Callable[..., Tensor], kept: bool) -> None:
    counts = []
    for rows in (128, 512):
        ids, cache = prompts(rows), SharedContextCache()
        if kept:
            plan = _plan(ids[:, :48], cache)
            cache.add_segment(plan.new_tokens)
            cache.set_forest(plan.forest)
        counts.append(calls_of(lambda ids=ids, cache=cache: _plan(ids, cache)))
    assert counts[1] < 5.5 * counts[0]  # bisection takes a step more for twice the stored prompts


def test_long_prompts_take_no_more_calls_than_short_ones() -> None:
    """Some hundred for a prompt of 8,192 tokens."""
    ids, plans = _behind_a_head(4096, 8192), []
    assert calls_of(lambda: plans.append(_plan(ids, SharedContextCache(), max_tokens=16384))) < 200 * 4096
    assert plans[0].forest.stored_tokens == 4096 * 8192 - 2047 * 4096
