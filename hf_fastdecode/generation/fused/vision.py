"""Convolutions of patches, ``[patches, channels, *kernel]``: each patch meets the kernel once, as in a linear layer.

Qwen-VL's and GLM-V's processors cut images into such patches, for which several versions of cuDNN have no fast kernel
in half precision (transformers#45750).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from torch import Tensor, nn
from torch.nn import functional

from .trial import FusedKind, by_kernel, close, function_key, own_result, random, runs_fused, twin

_CHANNELS_TRIED: Final = 8


def may_be(module: type[nn.Module]) -> bool:
    return module in (nn.Conv2d, nn.Conv3d)


def key(module: nn.Module) -> Hashable | None:
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    if module.groups != 1 or any(module.padding) or any(width != 1 for width in module.dilation):
        return None
    of_class = type(module), function_key(type(module).forward)
    return *of_class, module.in_channels, module.kernel_size, module.bias is None


def form_of(module: nn.Module) -> bool | None:
    """Whether the convolution is `_product`; None if it is not."""
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    of_patch = module.in_channels, *module.kernel_size
    weight, x = random(_CHANNELS_TRIED, *of_patch, seed=1), random(5, *of_patch, seed=2)
    bias = None if module.bias is None else random(_CHANNELS_TRIED, seed=3)
    small = twin(module, weight=weight)
    small.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return close(own_result(small, x), _product(x, weight, bias), rtol=0.02, atol=0.1) or None


def _run(module: nn.Module, form: bool, input: Tensor) -> Tensor | None:
    weight = module._parameters["weight"]
    if (
        type(weight) is not nn.Parameter
        or input.shape[1:] != weight.shape[1:]
        or input.dtype != weight.dtype
        or not runs_fused(input, differentiable=True)
    ):
        return None
    return _product(input, weight, module._parameters["bias"])


def _product(patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[patches, channels, 1, ...]``, with as many dimensions as the patches."""
    found = functional.linear(patches.flatten(1), weight.flatten(1), bias)
    return found.view(*found.shape, *[1] * (patches.dim() - 2))


PATCHES = FusedKind("convolutions of patches", may_be, key, form_of, by_kernel(_run))
