"""`SharedContextCache` as a transformers Cache: against a DynamicCache that holds the same rows."""

import copy
import weakref

import pytest
import torch
from transformers import DynamicCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.forest import Forest, Span
from hf_fastdecode.cache.shared import SharedContextCache

from ..tiny_models import ragged_prompts, tiny_model

# Three prompts of one length: a DynamicCache can hold them.
PROMPTS = ragged_prompts(40, 40, 40, shared=33)["input_ids"]
TOKENS = ragged_prompts(5, 5, 5, seed=3)["input_ids"]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")


@pytest.fixture
def pair(model):
    """A shared and a stock cache after the same prompts and the same five tokens a row."""
    with fd.enabled(model, min_shared_tokens=8), torch.no_grad():
        shared = fd.prefill(model, PROMPTS)
        model(TOKENS, **{CACHE: shared}, position_ids=torch.arange(40, 45).expand(3, -1))
        stock = DynamicCache(config=model.config)
        model(torch.cat([PROMPTS, TOKENS], 1), **{CACHE: stock})
        yield shared, stock


def step(model, cache, rows):
    """Logits of one more token in every row."""
    token = torch.arange(7, 7 + rows)[:, None]
    position = torch.full((rows, 1), cache.get_seq_length())
    return model(token, **{CACHE: cache}, position_ids=position).logits[:, -1]


def assert_same(model, shared, stock, rows):
    assert shared.get_seq_length() == stock.get_seq_length()
    assert shared.get_mask_sizes(2, 0) == stock.get_mask_sizes(2, 0)
    torch.testing.assert_close(step(model, shared, rows), step(model, stock, rows))


def test_several_tokens_at_once(model, pair):
    shared, _stock = pair
    assert [node.span.length for node in shared.forest.nodes] == [33, 7, 7, 7]
    assert_same(model, *pair, rows=3)
    assert (shared.rows, shared.suffix_length, shared.batch_size) == (3, 6, 3)


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 0, 2], [1, 1, 1], [0, 2, 0]], ids=str)
def test_reorder_cache(model, pair, order):
    for cache in pair:
        cache.reorder_cache(torch.tensor(order))
    assert_same(model, *pair, rows=3)


@pytest.mark.parametrize("rows", [[2], [0, 2], [1, 0]], ids=str)
def test_batch_select_indices(model, pair, rows):
    for cache in pair:
        cache.batch_select_indices(torch.tensor(rows))
    assert_same(model, *pair, rows=len(rows))


def test_batch_select_by_mask(model, pair):
    for cache in pair:
        cache.batch_select_indices(torch.tensor([True, False, True]))
    assert_same(model, *pair, rows=2)


def test_batch_repeat_interleave_copies_no_node(model, pair):
    shared, _stock = pair
    before = [segment.keys.data_ptr() for segment in shared.layers[0].storage.segments.values()]
    for cache in pair:
        cache.batch_repeat_interleave(4)
    assert shared.rows == 12
    assert [segment.keys.data_ptr() for segment in shared.layers[0].storage.segments.values()] == before
    assert shared.forest.stored_tokens == 33 + 3 * 7
    assert_same(model, *pair, rows=12)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 12, 20], ids=str)
def test_crop(model, pair, count):
    """Within the suffix, all of it, into the leaves, all of them, and into what the rows share."""
    for cache in pair:
        cache.crop(-count)
    assert_same(model, *pair, rows=3)


def test_crop_takes_no_target_length(pair):
    with pytest.raises(ValueError, match=r"minus the number of tokens to remove, got 10; pass a value <= 0"):
        pair[0].crop(10)


def test_crop_then_other_tokens_then_fork(model, pair):
    shared, stock = pair
    for cache in pair:
        cache.crop(-3)
        step(model, cache, 3)
    expected = torch.cat([TOKENS[:, :2], torch.arange(7, 10)[:, None]], 1)
    assert torch.equal(shared.suffix_tokens(), expected)
    fork = shared.fork()
    assert torch.equal(fork.path_tokens(fork.forest.paths[1]), torch.cat([PROMPTS[1], expected[1]]))
    assert_same(model, fork, stock, rows=3)
    assert shared.suffix_length == 3


def test_a_fork_and_its_origin_go_separate_ways(model, pair):
    shared, _stock = pair
    fork = shared.fork()
    for _ in range(3):
        step(model, fork, 3)
    fork.crop(-7)
    step(model, fork, 3)
    assert_same(model, *pair, rows=3)


def test_deepcopy(model, pair):
    """Users copy a prompt's cache before each call, as transformers' documentation shows."""
    shared, _stock = pair
    twin = copy.deepcopy(shared)
    step(model, twin, 3)
    assert twin.layers[0].storage.segments[0].keys.data_ptr() != shared.layers[0].storage.segments[0].keys.data_ptr()
    assert_same(model, *pair, rows=3)


def test_reset(model, pair):
    shared, _ = pair
    shared.reset()
    assert (shared.get_seq_length(), shared.rows, shared.nbytes.stored) == (0, 0, 0)
    assert_same(model, shared, DynamicCache(config=model.config), rows=2)  # any number of rows fits an empty cache


def test_an_empty_cache_works_like_a_stock_one(model):
    with fd.enabled(model), torch.no_grad():
        caches = fd.SharedContextCache(), DynamicCache(config=model.config)
        for cache in caches:
            model(PROMPTS, **{CACHE: cache}, position_ids=torch.arange(40).expand(3, -1))
        assert_same(model, *caches, rows=3)


def test_suffix_is_written_in_place_and_bounded(model):
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, PROMPTS).fork(max_suffix=6)
        pointers = set()
        for _ in range(6):
            step(model, cache, 3)
            pointers.add(cache.layers[1].storage.suffix.keys.data_ptr())
        assert len(pointers) == 1
        assert cache.layers[1].storage.suffix.keys.shape == (3, 2, 6, 16)
        step(model, cache, 3)  # past the bound it grows: the bound is a hint for allocation, not a limit
        assert cache.suffix_length == 7


def test_growth_keeps_what_was_written(model, monkeypatch):
    monkeypatch.setattr("hf_fastdecode.cache.storage._FIRST_CAPACITY", 2)
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, PROMPTS)
        stock = DynamicCache(config=model.config)
        model(PROMPTS, **{CACHE: stock})
        for _ in range(9):
            assert_same(model, cache, stock, rows=3)
        assert cache.layers[0].storage.suffix.keys.shape[2] == 16


def test_nbytes(model):
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, PROMPTS[:1])
        cache.batch_repeat_interleave(5)
        per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, bytes
        assert cache.nbytes == (40 * per_token, 40 * per_token, 5 * 40 * per_token)
        step(model, cache, 5)
        assert cache.nbytes.stored == (40 + 5) * per_token
        assert cache.nbytes.stock == 5 * 41 * per_token
        segment = cache.layers[0].storage.segments[0]
        suffix = cache.layers[0].storage.suffix
        assert cache.nbytes.allocated == 2 * sum(part.nbytes for part in (*segment, *suffix))


def test_rows_must_match(model):
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, PROMPTS)
        with pytest.raises(ValueError, match=r"holds 3 rows, got keys for 4; expand it with batch_repeat_interleave"):
            step(model, cache, 4)


def test_rows_out_of_range(pair):
    cache = pair[0]
    for select, rows in ((cache.select_rows, [0, 3]), (cache.batch_select_indices, torch.tensor([3]))):
        with pytest.raises(IndexError, match=r"row 3 is not among the cache's rows 0\.\.2"):
            select(rows)
    with pytest.raises(IndexError, match="row -4 is not among"):
        cache.batch_select_indices(torch.tensor([-4]))
    with pytest.raises(IndexError, match="a boolean for each of the cache's 3 rows is needed, got 5"):
        cache.batch_select_indices(torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        cache.batch_repeat_interleave(0)


@pytest.mark.parametrize("rows", ["ab", 1, None, [0.5], [[0]], [None], torch.tensor([0.0])], ids=repr)
def test_row_numbers_are_whole_numbers(pair, rows):
    cache = pair[0]
    with pytest.raises(TypeError, match=r"select_rows takes row numbers 0\.\.2, got"):
        cache.select_rows(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "bogus"}, "backend must be one of auto, triton, flash, .*, got 'bogus'"),
        ({"max_suffix": -1}, "max_suffix must be an integer of at least 0, or None, got -1"),
        ({"max_suffix": "x"}, "max_suffix must be an integer .* got 'x'"),
        ({"max_suffix": True}, "max_suffix must be an integer .* got True"),
        ({"max_suffix": torch.tensor(1.5)}, r"max_suffix must be an integer .* got tensor\(1.5"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        SharedContextCache(**options)


def test_plant_checks_the_padded_length(pair):
    with pytest.raises(ValueError, match="at least the longest row, 40 tokens, got 39"):
        pair[0].set_forest(Forest.from_paths([(Span(0, 0, 40),)]), length=39)


def test_tokens_of_an_unknown_origin_cannot_be_matched(model):
    """Keys appended by inputs_embeds carry no ids, so a later generate call could not check them."""
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, PROMPTS)
        embeds = model.get_input_embeddings()(TOKENS)
        model(inputs_embeds=embeds, **{CACHE: cache}, position_ids=torch.arange(40, 45).expand(3, -1))
        with pytest.raises(ValueError, match="holds 5 suffix tokens but knows the ids of 0"):
            cache.fork()


def test_a_fork_of_one_row_is_a_copy_too(model):
    with fd.enabled(model), torch.no_grad():
        cache, stock = fd.prefill(model, PROMPTS[:1]), DynamicCache(config=model.config)
        model(PROMPTS[:1], **{CACHE: stock})
        for each in (cache, stock):
            step(model, each, 1)
        fork = cache.fork()
        cache.crop(-1)
        other = torch.full((1, 1), 50)
        model(other, **{CACHE: cache}, position_ids=torch.full((1, 1), 40))
        assert_same(model, fork, stock, rows=1)


def test_a_failed_forward_leaves_no_layer_ahead(model, pair):
    shared, stock = pair

    def fail(module, args):
        raise RuntimeError("on purpose")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        step(model, shared, 3)
    hook.remove()
    assert (shared.suffix_length, [layer.appended for layer in shared.layers]) == (5, [0, 0])
    assert_same(model, shared, stock, rows=3)


def test_a_failed_first_forward_leaves_the_number_of_rows_open(model):
    def fail(module, args):
        raise RuntimeError("on purpose")

    tokens = PROMPTS[:2, :5]
    with fd.enabled(model), torch.no_grad():
        cache = SharedContextCache()
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(PROMPTS[:, :5], **{CACHE: cache})
        hook.remove()
        logits = model(tokens, **{CACHE: cache}).logits
    torch.testing.assert_close(logits, model(tokens).logits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_suffixes_are_freed_when_others_take_their_place(model):
    """A batch that did not fit goes on in smaller ones, in the memory that it gives back."""
    pytest.importorskip("triton")
    with fd.enabled(model, backend="triton"), torch.no_grad():
        cache = fd.prefill(model, PROMPTS)
        model(TOKENS, **{CACHE: cache}, position_ids=torch.arange(40, 45).expand(3, -1))
        for change in (lambda: cache.select_rows([0, 2]), lambda: cache.set_forest(cache.forest)):
            memory = [weakref.ref(part) for layer in cache.layers for part in layer.storage.suffix]
            change()
            assert not any(part() is not None for part in memory)


def test_a_mask_must_not_hide_tokens():
    model, prompts = tiny_model("llama-gqa"), ragged_prompts(60, 45, shared=40)
    token, position = torch.tensor([[5], [6]]), torch.tensor([[60], [45]])
    padded = torch.cat([prompts["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    with torch.no_grad(), fd.enabled(model):

        def logits(mask):
            cache = fd.prefill(model, prompts)
            return model(token, **{CACHE: cache}, position_ids=position, attention_mask=mask).logits

        expected = logits(None)
        assert torch.equal(logits(padded), expected)
        assert torch.equal(logits(torch.ones_like(padded)), expected)
        for row, hidden in ((0, slice(20, 30)), (0, slice(0, 1)), (1, slice(0, 16)), (1, slice(-1, None))):
            mask = padded.clone()
            mask[row, hidden] = 0
            with pytest.raises(ValueError, match="attention_mask hides tokens of the cache"):
                logits(mask)
