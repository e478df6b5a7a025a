"""Slim models whose linear layers were quantized in place, as bitsandbytes does."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.patches.layers.slim_attention import KeyProjection

from ..tiny_models import ragged_prompts
from .encoder_decoder_models import encoder_decoder
from .family_models import family_model
from .slim_models import TEXT, pair

PROMPTS = ragged_prompts(9, 31, 20)


class Int8Linear(nn.Linear):
    """A linear layer with a weight in int8 and a scale per row."""

    scales: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scales).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scales, self.bias)


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with `Int8Linear` for linear layers but the last."""
    model = deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            model.set_submodule(name, Int8Linear(module))
    return model


@pytest.mark.parametrize("variant", ["plain", "biases"])
def test_keys_keep_their_precision(variant: str) -> None:
    """The dtype of cached keys follows from their projection, as the others have weights in int8."""
    model = quantized(pair("k+r", variant)[1])
    assert isinstance(model.get_submodule("model.layers.0.self_attn.k_proj"), KeyProjection)
    dequantized = deepcopy(model)
    for module in dequantized.modules():
        if isinstance(module, Int8Linear):
            module.weight = nn.Parameter(module.weight * module.scales)
            module.scales = torch.ones(())
    found, expected = (one.generate(**PROMPTS, max_new_tokens=16, do_sample=False) for one in (model, dequantized))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_dtypes_of_quantized_weights_are_refused(name: str, dtype: torch.dtype) -> None:
    """Of parameters that are plain tensors, as layerwise casting leaves them."""
    model = family_model(name) if name == "gpt2" else encoder_decoder(name)
    place, parameter = next(one for one in model.named_parameters() if "1.layer.0" in one[0] or "h.1.mlp" in one[0])
    module, _, own = place.rpartition(".")
    setattr(model.get_submodule(module), own, nn.Parameter(parameter.to(dtype), requires_grad=False))
    with pytest.raises(ValueError, match=f"{place} is of dtype {str(dtype).removeprefix('torch.')}, as quantized"):
        to_slim(model, TEXT)
