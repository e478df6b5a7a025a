"""Rows with left padding of different lengths, whose positions stock counts with the padding."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import tiny_model


def padded(vocabulary: int) -> dict[str, torch.Tensor]:
    """Completions of one prompt, padded at the left."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, vocabulary, (40,), generator=generator)
    rows = [torch.cat([prompt, torch.randint(3, vocabulary, (3 + row,), generator=generator)]) for row in range(4)]
    ids, mask = torch.zeros(4, 46, dtype=torch.long), torch.zeros(4, 46, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, -len(tokens) :], mask[row, -len(tokens) :] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(("name", "shares"), [("llama-gqa", True), ("gpt_neox", True), ("gpt2", False)])
def test_positions_that_count_padding(name: str, shares: bool) -> None:
    """Rotary embeddings know distances alone; a table of positions does not. Error at most twice stock's."""
    model = tiny_model(name).eval()
    given = padded(model.config.vocab_size)
    seen = given["attention_mask"].bool()
    stock, exact = (one(**given).logits[seen] for one in (model, copy.deepcopy(model).double()))
    fd.enable(model, min_saved_tokens=1)
    ours = model(**given).logits[seen]
    report = fd.explain(model).last_forward
    assert report.path == ("shared" if shares else "stock")
    assert report.computed == (40 + 3 + 4 + 5 + 6 if shares else report.tokens)
    assert (ours - exact).abs().max() <= 2 * (stock - exact).abs().max()


def test_positions_from_the_first_token_share_in_tables_too() -> None:
    model = tiny_model("gpt2").eval()
    stock, given = copy.deepcopy(model), padded(model.config.vocab_size)
    given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp_min(0)
    fd.enable(model, min_saved_tokens=1)
    seen = given["attention_mask"].bool()
    torch.testing.assert_close(model(**given).logits[seen], stock(**given).logits[seen], rtol=0, atol=3e-6)
    assert fd.explain(model).last_forward.computed == 58


def test_a_cache_has_positions_that_count_padding() -> None:
    """It is filled by the decoder's own pass, so that it is continued as stock's is."""
    model = tiny_model("llama-gqa").eval()
    given, last = padded(model.config.vocab_size), torch.tensor([[5], [6], [7], [8]])
    mask = torch.cat([given["attention_mask"], torch.ones(4, 1, dtype=torch.long)], 1)
    found = []
    for enabled in (False, True):
        if enabled:
            fd.enable(model, min_saved_tokens=1)
        with torch.no_grad():
            output = model(**given)
            shared = enabled and fd.explain(model).last_forward.computed
            found.append(model(last, attention_mask=mask, **{CACHE: output[CACHE]}).logits)
    assert shared == 58
    torch.testing.assert_close(*found, rtol=0, atol=3e-6)


def test_a_cache_that_was_not_read_before_weights_changed() -> None:
    model = fd.enable(tiny_model("llama-gqa").eval(), min_saved_tokens=1)
    with torch.no_grad():
        output = model(**padded(model.config.vocab_size))
        model.model.norm.weight.mul_(2)
        with pytest.raises(RuntimeError, match="weights have changed since the pass of this cache"):
            output[CACHE].get_seq_length()


@pytest.mark.parametrize("masked", [False, True])
def test_labels_of_the_first_token_behind_padding(masked: bool) -> None:
    """Stock predicts it from padding, whose hidden states shared passes do not have."""
    model = tiny_model("llama-gqa").eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0.5  # of padding
    given = padded(model.config.vocab_size)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    if masked:
        labels[range(4), given["attention_mask"].argmax(1)] = -100
    stock = model(**given, labels=labels).loss
    fd.enable(model, min_saved_tokens=1)
    torch.testing.assert_close(model(**given, labels=labels).loss, stock, rtol=0, atol=1e-6)
    report = fd.explain(model).last_forward
    assert report.path == ("shared" if masked else "stock")
    assert masked or "labels count the first token behind left padding" in report.reason
