"""Every supported architecture gives stock transformers' tokens in fp32."""

import pytest
import torch

from ..tiny_models import ARCHITECTURES, ragged_prompts, tiny_model
from .calls import as_in_stock

LONGER = ragged_prompts(90, 70, 81, 64, shared=60)
ALONE = ragged_prompts(90, 57, seed=1)
PROMPTS = {name: torch.cat([value, ALONE[name][1:]]) for name, value in LONGER.items()}
"""Four that begin alike, and one that shares with its own samples only."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_stock(name):
    """Of two levels of sharing and of one; rows are beyond every window and reach further with each token."""
    model, new = tiny_model(name), 10
    arguments = {**PROMPTS, "max_new_tokens": new, "num_return_sequences": 3, "do_sample": True, "temperature": 0.9}
    tokens = []

    def call():
        tokens.append(model.generate(**arguments, top_k=0))
        return tokens[-1]

    report = as_in_stock(model, call, "shared")
    assert report.prefilled_tokens == 60 + (30 + 10 + 21 + 4) + 57, report.forest
    assert tokens[0].shape == (15, 90 + new)
    for samples in tokens[0][:, 90:].unflatten(0, (-1, 3)).tolist():
        assert len({tuple(row) for row in samples}) > 1, "samples that agree would show nothing"


def test_greedy_tokens_equal_stock():
    """Rows of one prompt are equal by definition, so they are repeated by hand."""
    model = tiny_model("llama-gqa")
    prompts = {name: value.repeat_interleave(4, 0) for name, value in ragged_prompts(57, 40, 71).items()}
    report = as_in_stock(model, lambda: model.generate(**prompts, max_new_tokens=24, do_sample=False), "shared")
    assert report.prefilled_tokens == 57 + 40 + 71
