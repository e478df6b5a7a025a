"""torchao: a model with quantized weights gives stock's tokens, also from a kept cache."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import ragged_prompts, seeded, tiny_model

quantization = pytest.importorskip("torchao.quantization")
PROMPTS = ragged_prompts(80, 73, shared=50)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 9}


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_int8_weights(config):
    model = tiny_model("llama-gqa")
    quantization.quantize_(model, getattr(quantization, config)())
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    stock = seeded(lambda: model.generate(**PROMPTS, **SAMPLING))
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPTS, **SAMPLING)), stock)
        assert fd.explain(model).last_call.path == "shared"
        cache = fd.prefill(model, PROMPTS)
        assert torch.equal(seeded(lambda: model.generate(**PROMPTS, **SAMPLING, **{CACHE: cache})), stock)
