"""torchao: models with quantized weights give stock's tokens, also from a kept cache, below LoRA, and in training."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.snapshot import ModelWalk
from hf_fastdecode.generation.support import check_quantized

from ..tiny_models import ragged_prompts, seeded, tiny_model

quantization = pytest.importorskip("torchao.quantization")
PROMPTS = ragged_prompts(80, 73, shared=50)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 9}


def quantized(config):
    model = tiny_model("llama-gqa")
    quantization.quantize_(model, getattr(quantization, config)())
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    return model


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_weights_of_eight_bits(config):
    model = quantized(config)
    stock = seeded(lambda: model.generate(**PROMPTS, **SAMPLING))
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPTS, **SAMPLING)), stock)
        assert fd.explain(model).last_call.path == "shared"
        cache = fd.prefill(model, PROMPTS)
        assert torch.equal(seeded(lambda: model.generate(**PROMPTS, **SAMPLING, **{CACHE: cache})), stock)
        model.model.layers[0].mlp.up_proj.weight.qdata.view(torch.int8).add_(1)
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPTS, **SAMPLING, **{CACHE: cache})


def test_one_scale_for_all_tokens_runs_stock():
    """Which float8 activations have by default; their products need a GPU, and the check does not."""
    from torchao.quantization.granularity import PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import Float8Tensor, QuantizeTensorToFloat8Kwargs

    model = tiny_model("llama-gqa")
    projection = model.model.layers[1].mlp.up_proj
    own = projection.weight
    for granularity in (PerTensor(), PerRow()):
        given = QuantizeTensorToFloat8Kwargs(granularity=granularity)
        weight = Float8Tensor.from_hp(own.detach(), granularity=granularity, act_quant_kwargs=given)
        projection.weight = torch.nn.Parameter(weight, requires_grad=False)
        refused = isinstance(granularity, PerTensor)
        with pytest.raises(Unsupported, match="one scale for all tokens") if refused else nullcontext():
            check_quantized(ModelWalk(model))


def test_training_below_lora():
    """Loss and gradients of adapters, as of QLoRA, are stock's, and then the tokens."""
    adapters = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(quantized("Int8WeightOnlyConfig"), adapters).train()
    rows = {name: value[:1].repeat(4, 1) for name, value in PROMPTS.items()}
    rows["input_ids"][1:, -9:] += torch.arange(3)[:, None] % 2 + 1

    def step():
        model.zero_grad()
        loss = model(**rows, labels=rows["input_ids"]).loss
        loss.backward()
        return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]

    stock = step()
    with fd.enabled(model, share_forward=True):
        torch.testing.assert_close(step(), stock, rtol=1e-4, atol=1e-5)
        assert "shared" in str(fd.explain(model))
    model.eval()
    tokens = seeded(lambda: model.generate(**PROMPTS, **SAMPLING))
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPTS, **SAMPLING)), tokens)
        assert fd.explain(model.get_base_model()).last_call.path == "shared"
