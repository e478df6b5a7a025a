"""Parts of vision towers: convolutions of patches, and attention within each of several images.

Qwen-VL's and GLM-V's processors cut images into patches, ``[patches, channels, *kernel]``. Each meets the kernel once,
as in a linear layer, and several versions of cuDNN have no fast kernel for that in half precision
(transformers#45750). Without flash attention, each layer splits queries, keys and values at ``cu_seqlens``, for which
it waits for the GPU three times: it is given a copy on the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from functools import partial
from itertools import chain
from types import CodeType
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.generic import is_flash_attention_requested

from ..._compat import tensor_version, uncompiled_call
from ..foreign_code import is_of_transformers
from .trial import FusedKind, by_kernel, close, function_key, is_plain, own_result, random, runs_fused, twin

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

_LENGTHS: Final = "cu_seqlens"
_ON_HOST: Final = "_hf_fastdecode_on_host"
_SPLITS: Final = frozenset({"is_flash_attention_requested", "split", "tolist"})
"""Names in the code of attention modules that read lengths for `torch.split` alone, or for flash attention."""


def may_split(module: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    if code is None or _LENGTHS not in code.co_varnames or not is_of_transformers(module.forward):
        return False
    within = (inner for inner in code.co_consts if isinstance(inner, CodeType))  # comprehensions, before Python 3.12
    return _SPLITS.issubset(chain(code.co_names, *(inner.co_names for inner in within)))


def _split(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of the module, given lengths on the CPU unless it requests flash attention, which has them on the GPU."""
    lengths = kwargs.get(_LENGTHS)
    if isinstance(lengths, Tensor) and is_plain(module) and not is_flash_attention_requested(module.config):
        version, known = tensor_version(lengths), getattr(lengths, _ON_HOST, None)
        if known is None or known[0] != version:
            known = version, lengths.to("cpu", copy=True)
            setattr(lengths, _ON_HOST, known)  # for the other layers, which are given the same tensor
        kwargs[_LENGTHS] = known[1]
    return uncompiled_call(module, *args, **kwargs)


SPLITS = FusedKind(
    *("", may_split, lambda module: function_key(type(module).forward), lambda _: True),
    lambda module, _: partial(_split, module),
)
