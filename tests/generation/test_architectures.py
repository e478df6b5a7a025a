"""Every supported architecture gives stock transformers' tokens in fp32."""

import pytest

from ..tiny_models import ARCHITECTURES, ragged_prompts, seeded, tiny_model
from .calls import as_in_stock


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_stock(name, do_sample):
    model = tiny_model(name)
    arguments = {**ragged_prompts(57, 40, 71), "max_new_tokens": 24, "num_return_sequences": 4 if do_sample else 1}
    if not do_sample:  # greedy samples of one prompt are equal by definition, so the rows are repeated by hand
        arguments |= {key: arguments[key].repeat_interleave(4, 0) for key in ("input_ids", "attention_mask")}
    arguments |= {"do_sample": do_sample, "temperature": 0.9 if do_sample else None, "top_k": 0 if do_sample else None}

    call = as_in_stock(model, lambda: model.generate(**arguments), "shared")
    assert call.prefilled_tokens == 57 + 40 + 71
    stock = seeded(lambda: model.generate(**arguments))
    assert stock.shape == (12, 71 + 24)
    if do_sample:
        assert len({tuple(row) for row in stock[:4, 71:].tolist()}) == 4, "samples that agree would show nothing"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_levels_of_sharing_equal_stock(name):
    model = tiny_model(name)
    prompts = ragged_prompts(90, 70, 81, 64, shared=60)
    arguments = {**prompts, "max_new_tokens": 12, "num_return_sequences": 3, "do_sample": True, "top_k": 0}
    call = as_in_stock(model, lambda: model.generate(**arguments), "shared")
    assert call.prefilled_tokens == 60 + (30 + 10 + 21 + 4), call.forest
