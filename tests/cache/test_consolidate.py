"""What a cache that is kept over many turns holds, and in how many nodes."""

import math

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import Segment
from hf_fastdecode.cache.forest_cache import consolidate
from hf_fastdecode.cache.layers.attention import SharedContextLayer
from hf_fastdecode.cache.stores import Kind, Store
from hf_fastdecode.generation.steps import modes

from ..module_calls import before_calls
from ..tiny_models import ragged_prompts, seeded, tiny_model
from .storage import held


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")


def filled_cache(*lengths, layers=2):
    """A cache with segments of these lengths, filled with numbers that tell tokens, layers, keys and values apart."""
    cache = fd.SharedContextCache()
    for length in lengths:
        cache.add_segment(torch.randint(1000, (length,)))
    for index in range(layers):
        cache.layers.append(SharedContextLayer(cache.state, index, Store(Kind.FULL)))
        cache.layers[-1].storage.segments = {
            index: Segment(torch.randn(3, length, 4), torch.randn(3, length, 5))
            for index, length in enumerate(lengths)
            if length
        }
    return cache


def contents(cache):
    """By row: token ids, and every layer's keys and values."""
    return [
        (
            cache.path_tokens(path).tolist(),
            [
                [
                    torch.cat([layer.storage.segments[span.segment].view(span)[part] for span in path], 1).tolist()
                    for part in (0, 1)
                ]
                for layer in cache.layers
            ],
        )
        for path in cache.forest.paths
        if path
    ]


def chain(*lengths):
    """A row whose path shows the first so many tokens of one segment after the other."""
    return tuple(Span(index, 0, length) for index, length in enumerate(lengths))


@pytest.mark.parametrize(
    ("lengths", "merged"),
    [
        ((9,), (9,)),
        ((100, 9), (100, 9)),
        ((18, 9), (27,)),
        ((19, 9), (19, 9)),
        ((1, 100), (101,)),
        ((100, 40, 15, 7), (100, 40, 15, 7)),
        ((80, 39, 15, 9, 7), (143, 7)),
        ((200, 20, 6, 20, 6), (200, 46, 6)),
    ],
    ids=str,
)
def test_a_chain_has_nodes_of_geometric_lengths(lengths, merged):
    cache = filled_cache(*lengths)
    cache.set_forest(Forest.from_paths([chain(*lengths)] * 3), length=300)
    before, segments = contents(cache), dict(cache.layers[0].storage.segments)
    consolidate(cache)
    assert contents(cache) == before
    assert tuple(node.span.length for node in cache.forest.nodes) == merged
    assert (cache.rows, cache.get_seq_length()) == (3, 300)
    if lengths == merged:
        assert all(cache.layers[0].storage.segments[index] is segment for index, segment in segments.items())
    assert cache.nbytes.stored == held(cache) == sum(lengths) * 2 * 3 * 9 * 4


def test_what_no_row_attends_to_is_dropped():
    cache = filled_cache(30, 0, 64, 50, 10)
    kept = cache.layers[0].storage.segments[0]
    # All of one segment, an eighth and more than half of others, and none of the last.
    root, sparse, dense = Span(0, 0, 30), Span(2, 8, 8), Span(3, 10, 26)
    cache.set_forest(Forest.from_paths([(root, sparse), (root, dense)]))
    before = contents(cache)
    consolidate(cache)
    assert contents(cache) == before
    assert cache.layers[0].storage.segments[0] is kept
    assert sorted(cache.state.segment_lengths) == [8, 30, 50]
    assert cache.nbytes.stored == held(cache) == (30 + 50 + 8) * 2 * 3 * 9 * 4
    consolidate(cache)
    assert contents(cache) == before


def test_what_several_nodes_show_stays_stored_once():
    """Rows apart that show one span, or parts of it that overlap: merging would copy it for each."""
    shared, own = Span(0, 0, 40), [Span(1, start, 30) for start in (0, 30, 60)]
    cache = filled_cache(40, 90)
    nodes = [Node(span, row, 1, depth) for row, tail in enumerate(own) for depth, span in enumerate((shared, tail))]
    cache.set_forest(Forest(3, nodes))
    segments = dict(cache.layers[0].storage.segments)
    consolidate(cache)
    assert cache.layers[0].storage.segments == segments
    # An overlap of parts, in a segment that is hardly shown otherwise, is copied out once.
    cache = filled_cache(90)
    cache.set_forest(Forest(2, [Node(Span(0, 50, 20), 0, 1), Node(Span(0, 60, 15), 1, 1)]))
    before = contents(cache)
    consolidate(cache)
    assert contents(cache) == before
    assert cache.state.segment_lengths == [25]


def test_rows_that_merge_side_by_side_are_evenly_spaced():
    """So that one call with a batch dimension attends to them."""
    cache = filled_cache(7 * 10, 7 * 8)
    cache.set_forest(Forest.from_paths([(Span(0, 10 * row, 10), Span(1, 8 * row, 8)) for row in range(7)]))
    before = contents(cache)
    consolidate(cache)
    assert contents(cache) == before
    assert [len(run) for level in cache.forest.batches for run in level] == [7]


def turns(model, count, *, cache=None, rows=1, **arguments):
    """A conversation; yields the ids so far and the output of each turn, of which row 0 or the last one goes on."""
    ids = ragged_prompts(40, seed=1)["input_ids"]
    for turn in range(count):
        given = {} if cache is None else {CACHE: cache}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_return_sequences=rows, return_dict_in_generate=True,
            **arguments, **given,
        )  # fmt: skip
        yield out
        cache = None if cache is None else out[CACHE]
        ids = torch.cat([out.sequences[-1:], ragged_prompts(5, seed=turn)["input_ids"]], 1)


def test_a_conversation_has_few_nodes_however_many_turns(model):
    stock = [out.sequences for out in turns(model, 30, do_sample=False, max_new_tokens=6)]
    with fd.enabled(model):
        cache = fd.prefill(model, ragged_prompts(40, seed=1)["input_ids"])
        for turn, out in enumerate(turns(model, 30, cache=cache, do_sample=False, max_new_tokens=6)):
            assert torch.equal(out.sequences, stock[turn])
            kept, report = out[CACHE], fd.explain(model).last_call
            assert len(kept.forest.nodes) <= 2 + math.log2(kept.get_seq_length())
            assert kept.nbytes.allocated == held(kept)
            assert report.nbytes.stored == kept.nbytes.stored
            assert report.forest == repr(kept.forest)


def test_best_of_n_holds_what_its_rows_show(model):
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 6, "rows": 9}
    stock = seeded(lambda: [out.sequences for out in turns(model, 8, **arguments)])
    with fd.enabled(model):
        cache = fd.prefill(model, ragged_prompts(40, seed=1)["input_ids"][:, :33])
        torch.manual_seed(0)
        for turn, out in enumerate(turns(model, 8, cache=cache, **arguments)):
            assert torch.equal(out.sequences, stock[turn])
            kept = out[CACHE]
            shown = kept.forest.stored_tokens + 9 * kept.suffix_length
            assert kept.nbytes.stored == fd.explain(model).last_call.nbytes.stored == shown * 2 * 2 * 2 * 16 * 4
            assert kept.nbytes.allocated == held(kept)


def test_calls_copy_nothing_of_a_prefilled_cache(model):
    """Also where what they add is longer, so that merging would copy it for every call."""
    ids = ragged_prompts(70, seed=2)["input_ids"]
    arguments = {"do_sample": False, "max_new_tokens": 4, "return_dict_in_generate": True}
    with fd.enabled(model):
        cache = fd.prefill(model, ids[:, :30])
        nodes = cache.layers[1].storage.segments[0].keys
        first = model.generate(ids, **arguments, **{CACHE: cache})
        more = torch.cat([first.sequences, ids], 1)
        second = model.generate(more, attention_mask=torch.ones_like(more), **arguments, **{CACHE: first[CACHE]})
        for out in (first, second):
            assert out[CACHE].layers[1].storage.segments[0].keys is nodes
        assert held(cache, first[CACHE]) == first[CACHE].nbytes.allocated
        assert [node.span.length for node in second[CACHE].forest.nodes] == [30, 114]


def test_calls_whose_cache_is_not_returned_copy_nothing(model):
    ids = ragged_prompts(70, seed=2)["input_ids"]
    arguments = {"do_sample": False, "max_new_tokens": 4}
    with fd.enabled(model):
        out = model.generate(ids, **arguments, **{CACHE: fd.prefill(model, ids[:, :50])}, return_dict_in_generate=True)
        given = out[CACHE].fork()
        addresses = {segment.keys.data_ptr() for segment in given.layers[0].storage.segments.values()}
        seen = []
        with before_calls(model.model, lambda args, kwargs: seen.append(kwargs[CACHE])):
            model.generate(torch.cat([out.sequences, ids], 1), **arguments, **{CACHE: given})
    assert addresses <= {segment.keys.data_ptr() for segment in seen[-1].layers[0].storage.segments.values()}


def test_a_cache_that_memory_does_not_suffice_to_copy_stays_as_it_is(model, monkeypatch):
    ids = ragged_prompts(70, seed=2)["input_ids"]
    arguments = {"do_sample": False, "max_new_tokens": 4, "return_dict_in_generate": True}

    def fail(*args):
        raise torch.OutOfMemoryError

    with fd.enabled(model):
        first = model.generate(ids, **arguments, **{CACHE: fd.prefill(model, ids[:, :30])})
        more = torch.cat([first.sequences, ids], 1)
        expected = model.generate(more, **arguments, **{CACHE: first[CACHE]})
        monkeypatch.setattr("hf_fastdecode.cache.storage.TokenStorage.copied", fail)
        found = model.generate(more, **arguments, **{CACHE: first[CACHE]})
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found[CACHE].forest.nodes) > len(expected[CACHE].forest.nodes)


def test_a_merged_cache_outlives_inference_mode(model):
    with fd.enabled(model):
        with torch.inference_mode():
            cache = fd.prefill(model, ragged_prompts(40, seed=1)["input_ids"][:, :33])
            *_, out = turns(model, 3, cache=cache, do_sample=False, max_new_tokens=6)
        kept, token = out[CACHE], out.sequences[:, -1:].clone()
        assert len(kept.forest.nodes) == 2
        found = model(token, **{CACHE: kept}).logits[:, -1]
        assert found.requires_grad
        kept.batch_repeat_interleave(2)
    torch.testing.assert_close(found, model(out.sequences.clone()).logits[:, -1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_captured_steps_follow(monkeypatch):
    """The tables of captured steps are pointed at the storage that took the place of what they read before."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)  # the steps run uncaptured, and interpreted
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "rows": 2}
    model = tiny_model("llama-gqa", num_hidden_layers=1)
    stock = seeded(lambda: [out.sequences for out in turns(model, 3, **arguments)])
    with fd.enabled(model, mode="graph", backend="triton"):
        cache = fd.prefill(model, ragged_prompts(40, seed=1)["input_ids"][:, :33])
        torch.manual_seed(0)
        nodes = []
        for turn, out in enumerate(turns(model, 3, cache=cache, **arguments)):
            assert torch.equal(out.sequences, stock[turn])
            assert fd.explain(model).last_call.mode == "graph"
            nodes.append(len(out[CACHE].forest.nodes))
        assert nodes == [2, 2, 2]  # two more in every turn, were they not merged
