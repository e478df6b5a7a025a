"""Rows of one batch that keep different numbers of draft tokens."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import ragged_prompts, tiny_model

NEW_TOKENS, DRAFTED = 8, 3


def speculate(model, cache, last, drafts):
    """Greedy decoding of several rows at once, which check drafted tokens in one pass and keep those that are right.

    Args:
        last: ``[rows]``: the last token of each row's prompt, not in the cache.
        drafts: ``[rows, tokens]``: what is drafted at each place of a completion.

    Returns:
        By row, the tokens; and the number of passes.
    """
    rows = len(last)
    found, passes = [[] for _ in range(rows)], 0
    while min(map(len, found)) < NEW_TOKENS:
        drafted = torch.stack([drafts[row, len(found[row]) :][:DRAFTED] for row in range(rows)])
        guesses = model(torch.cat([last[:, None], drafted], 1), **{CACHE: cache}).logits.argmax(-1)
        right = (guesses[:, :-1] == drafted).long().cumprod(1).sum(1)
        cache.drop_last(DRAFTED - right)
        for row in range(rows):
            found[row] += guesses[row, : right[row] + 1].tolist()
        last, passes = torch.tensor([tokens[-1] for tokens in found]), passes + 1
    return [tokens[:NEW_TOKENS] for tokens in found], passes


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-window"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_drafts_for_several_rows(name, backend):
    """Right, wrong, and half right drafts beside each other: the tokens are those of greedy decoding."""
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("float32 is refused on a GPU")
    model = tiny_model(name, num_hidden_layers=1 if backend == "triton" else 2)
    prompts = ragged_prompts(21, 17, 19, shared=14)
    stock = model.generate(**prompts, do_sample=False, max_new_tokens=NEW_TOKENS)[:, -NEW_TOKENS:]
    drafts = torch.cat([stock] * (DRAFTED + 2), 1)  # rows go on beyond their end, until the last one is there
    drafts[1, ::2] += 1
    drafts[2] += 1
    with fd.enabled(model, backend=backend), torch.no_grad():
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        cache = fd.prefill(model, [row[seen.bool()][:-1] for row, seen in zip(ids, mask)])
        found, passes = speculate(model, cache, ids[:, -1], drafts)
        assert found == stock.tolist()
        assert passes == NEW_TOKENS  # of the row that is never right
        lengths = cache.suffix_lengths.tolist()
        assert lengths[0] > lengths[1] > lengths[2] == NEW_TOKENS
        kept = [tokens[:length] for tokens, length in zip(cache.suffix_tokens().tolist(), lengths)]
        assert kept[1][1:NEW_TOKENS] == found[1][: NEW_TOKENS - 1]


def test_counts_are_checked():
    model = tiny_model("llama-gqa")
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, ragged_prompts(9, 7)["input_ids"])
        model(torch.tensor([[5, 6], [7, 8]]), **{CACHE: cache})
        with pytest.raises(ValueError, match="row 1 cannot lose 3 tokens: its suffix has 2"):
            cache.drop_last([0, 3])
        with pytest.raises(ValueError, match=r"a whole number for each of 2 rows, got int64 numbers of shape \[3\]"):
            cache.drop_last([0, 0, 1])
        for counts in ([0.5, 1.0], torch.tensor([True, False])):
            with pytest.raises(ValueError, match=r"a whole number for each of 2 rows, got (float32|bool) numbers"):
                cache.drop_last(counts)
        with pytest.raises(ValueError, match="row 0 cannot lose -1 tokens"):
            cache.drop_last([-1, 0])
        cache.drop_last([2, 1])
        assert cache.suffix_lengths.tolist() == [0, 1]
        assert cache.suffix_length == 1
        cache.drop_last([0, 1])
        assert cache.state.suffixes.lengths.per_row is None


def test_as_many_of_each_row_as_crop_removes():
    """Also where rows that were dropped have left padding."""
    model = tiny_model("llama-gqa")
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, [[5] * 10, [6] * 4])
        cache.select_rows([1, 1])
        model(torch.tensor([[5, 6, 7], [7, 8, 9]]), **{CACHE: cache})
        assert cache.get_seq_length() == 13
        other = cache.fork()
        cache.drop_last([0, 0])
        assert cache.get_seq_length() == 13
        cache.drop_last([1, 1])
        other.crop(-1)
        assert cache.get_seq_length() == other.get_seq_length() == 12
        cache.drop_last([1, 2])
        assert cache.get_seq_length() == 11


@pytest.mark.parametrize("rows", [[0], [1], [0, 1], [1, 0], [0, 0], [1, 1, 0]])
@pytest.mark.parametrize("then", ["generate", "fork", "pass"])
def test_rows_selected_behind_counts_that_differ(rows, then):
    """Also where the row with the longest suffix is not among them."""
    model, prompts, drafts = (
        tiny_model("llama-gqa"),
        [[5, 6, 7, 8], [6, 7, 8]],
        torch.tensor([[9, 10, 11], [12, 13, 14]]),
    )
    texts = [prompts[row] + drafts[row, : row + 1].tolist() for row in rows]
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, prompts)
        model(drafts, **{CACHE: cache})
        cache.drop_last([2, 1])
        cache.select_rows(rows)
        assert cache.suffix_tokens().shape == (len(rows), max(rows) + 1)
        if then == "fork":
            cache = cache.fork()
        if then == "generate":
            text = torch.tensor([texts[0] + [20, 21]])
            found = model.generate(text, do_sample=False, max_new_tokens=4, **{CACHE: cache})
            assert fd.explain(model).last_call.known_tokens == (len(texts[0]),)
            assert found.equal(fd.disable(model).generate(text, do_sample=False, max_new_tokens=4))
        else:
            logits = model(torch.full((len(rows), 1), 20), **{CACHE: cache}).logits[:, -1]
            for text, found in zip(texts, logits, strict=True):
                torch.testing.assert_close(found, model(torch.tensor([[*text, 20]])).logits[0, -1])
            assert [path.tolist() for path in map(cache.fork().path_tokens, cache.fork().forest.paths)] == [
                [*text, 20] for text in texts
            ]


@pytest.mark.parametrize(("method", "counts"), [("crop", -2), ("drop_last", [2])])
def test_ids_behind_embeddings_stay_unknown(method, counts):
    """A pass of embeddings gives no ids: what is left behind it must not be taken for the first tokens."""
    model = tiny_model("llama-gqa")
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, [[5, 6, 7, 8]])
        model(inputs_embeds=model.get_input_embeddings()(torch.tensor([[50]])), **{CACHE: cache})
        model(torch.tensor([[11, 12, 13]]), **{CACHE: cache})
        getattr(cache, method)(counts)
        with pytest.raises(ValueError, match="holds 2 suffix tokens but knows the ids of 0"):
            cache.suffix_tokens()
        cache.crop(-2)
        model(torch.tensor([[14]]), **{CACHE: cache})
        assert cache.suffix_tokens().tolist() == [[14]]


def test_rows_of_different_lengths_behind_embeddings():
    model = tiny_model("llama-gqa")
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, [[5, 6, 7], [6, 7, 8]])
        embedded = model.get_input_embeddings()(torch.tensor([[50, 51], [52, 53]]))
        model(inputs_embeds=embedded, **{CACHE: cache})
        cache.drop_last([0, 1])
        logits = model(torch.tensor([[9], [10]]), **{CACHE: cache}).logits[:, -1]
    for row, ids in enumerate(([5, 6, 7, 50, 51, 9], [6, 7, 8, 52, 10])):
        torch.testing.assert_close(logits[row], model(torch.tensor([ids])).logits[0, -1])


def test_ids_of_some_rows_behind_embeddings():
    """Lengths that are equal again do not make the ids known of the row that was shorter."""
    model = tiny_model("llama-gqa")
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, [[5, 6, 7], [6, 7, 8]])
        model(torch.tensor([[20, 21, 22], [23, 24, 25]]), **{CACHE: cache})
        cache.drop_last([2, 0])
        embedded = model.get_input_embeddings()(torch.tensor([[10, 11], [12, 13]]))
        model(inputs_embeds=embedded, **{CACHE: cache})
        cache.drop_last([0, 2])
        assert cache.suffix_lengths.tolist() == [3, 3]
        with pytest.raises(ValueError, match="holds 3 suffix tokens but knows the ids of 1"):
            cache.suffix_tokens()


def test_counts_and_ids_of_any_integer_type():
    model = tiny_model("llama-gqa")
    fd.SharedContextCache().drop_last([])
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, [[5, 6, 7], [6, 7, 8]])
        model(torch.full((2, 300), 9), **{CACHE: cache})
        cache.drop_last(torch.tensor([1, 2], dtype=torch.uint8))
        assert cache.suffix_lengths.tolist() == [299, 298]
        model(torch.tensor([[9], [9]], dtype=torch.int32), **{CACHE: cache})
        assert cache.suffix_tokens().dtype == torch.int64
        for counts in (None, "ab", ["1", "0"], [2**100, 0], [1j, 0]):
            with pytest.raises(ValueError, match="drop_last takes a whole number for each of 2 rows, got"):
                cache.drop_last(counts)
        with pytest.raises(TypeError, match=r"crop takes minus the number of tokens to remove, got -1\.5"):
            cache.crop(-1.5)
        assert cache.suffix_lengths.tolist() == [300, 299]
