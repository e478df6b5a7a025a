"""Random weights of a shape, quantized where they lie: what transformers makes of them while it loads a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_fastdecode.measurement.rows import NotAvailableError

_BLOCK: Final = 128
"""Rows and columns of a weight that share a scale, as in FP8 checkpoints."""


class Quantizer(NamedTuple):
    """How a model is quantized.

    Attributes:
        apply: Quantizes a model in place.
        requires: Packages.
        in_fp32: Whether it also takes activations in fp32, in which tokens are compared.
    """

    apply: Callable[[PreTrainedModel], None]
    requires: tuple[str, ...] = ()
    in_fp32: bool = False


def quantize(model: PreTrainedModel, how: str) -> None:
    """Quantize the linear layers, or experts, of a model's layers in place.

    Raises NotAvailableError where a package, or a kernel of the Hub, is not installed.
    """
    quantizer = QUANTIZERS[how]
    for package in quantizer.requires:
        try:
            version(package)
        except PackageNotFoundError as error:
            raise NotAvailableError(f"{package} is not installed; pip install {package}") from error
    quantizer.apply(model)


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with ordinary linear layers, whose weights are what the quantized ones make of the unit matrix."""
    if any(type(module).__name__ == "Mxfp4GptOssExperts" for module in model.modules()):
        raise NotAvailableError("steps over experts in MXFP4 cannot be checked; measure without checks")
    plain = copy.deepcopy(model)
    for parent, name, part in _linears(plain):
        with torch.no_grad():
            made = part(torch.eye(part.in_features, dtype=model.dtype, device=model.device))
        own = nn.Linear(part.in_features, part.out_features, bias=False, dtype=made.dtype, device=made.device)
        own.weight = nn.Parameter(made.mT.contiguous())
        setattr(parent, name, own)
    return plain


def _linears(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, Any]]:
    """The linear layers of a model's layers, with their parents and names; neither its head nor routers."""
    head = model.get_output_embeddings()
    for parent in [*model.modules()]:
        for name, part in [*parent.named_children()]:
            if isinstance(part, nn.Linear) and part is not head:
                yield parent, name, part


def _bitsandbytes_4bit(model: PreTrainedModel) -> None:
    """NF4 with scales that are quantized too, as for QLoRA."""
    import bitsandbytes as bnb

    for parent, name, part in _linears(model):
        own = bnb.nn.Linear4bit(
            part.in_features, part.out_features, part.bias is not None, compute_dtype=model.dtype, device="meta"
        )
        options = {"requires_grad": False, "quant_type": "nf4", "compress_statistics": True, "module": own}
        own.weight = bnb.nn.Params4bit(part.weight.data, **options).to(part.weight.device)
        own.bias = part.bias
        setattr(parent, name, own)


def _bitsandbytes_8bit(model: PreTrainedModel) -> None:
    """Without a threshold: outliers are found over all tokens of a pass, so that such models run stock."""
    import bitsandbytes as bnb

    for parent, name, part in _linears(model):
        sizes = part.in_features, part.out_features, part.bias is not None
        own = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0, device="meta")
        weight = bnb.nn.Int8Params(part.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
        own.weight, own.bias = weight.to(part.weight.device), part.bias
        setattr(parent, name, own)


def _torchao(name: str, **options: Any) -> Callable[[PreTrainedModel], None]:
    """By a config of `torchao.quantization`; options that are functions make their value."""

    def apply(model: PreTrainedModel) -> None:
        import torchao.quantization as torchao

        given = {key: value(torchao) if callable(value) else value for key, value in options.items()}
        parts = {id(part) for _, _, part in _linears(model)}
        torchao.quantize_(model, getattr(torchao, name)(**given), lambda part, _: id(part) in parts)

    return apply


def _fp8(model: PreTrainedModel) -> None:
    """As FP8 checkpoints: a scale for each block of a weight, and one for each part of a token's activations."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    for parent, name, part in _linears(model):
        sizes = part.in_features, part.out_features, (_BLOCK, _BLOCK)
        with torch.device("meta"):
            own: Any = FP8Linear(*sizes, has_bias=part.bias is not None)
        blocks = _blocks(part.weight.data.float())
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        weight = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        own.weight = nn.Parameter(weight[: part.out_features, : part.in_features].contiguous(), requires_grad=False)
        own.weight_scale_inv, own.bias = nn.Parameter(scales, requires_grad=False), part.bias
        setattr(parent, name, own)


def _blocks(weight: Tensor) -> Tensor:
    """A weight, filled up with zeros, as ``[blocks, rows, blocks, columns]``."""
    rows, columns = (-size % _BLOCK for size in weight.shape)
    return F.pad(weight, (0, columns, 0, rows)).unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))


def _mxfp4(model: PreTrainedModel) -> None:
    """gpt-oss' experts, as its checkpoints have them."""
    from transformers import Mxfp4Config
    from transformers.integrations import mxfp4

    if model.config.model_type != "gpt_oss":
        raise NotAvailableError(f"transformers has experts in MXFP4 for gpt_oss alone, got {model.config.model_type}")
    plain = {name: module.experts for name, module in model.named_modules() if hasattr(module, "experts")}
    try:
        mxfp4.replace_with_mxfp4_linear(model, Mxfp4Config())
    except (ImportError, OSError) as error:  # FileNotFoundError, or what the Hub's client raises offline
        raise NotAvailableError(f"no kernels of the Hub for MXFP4: {str(error).splitlines()[0]}") from error
    hub: Any = mxfp4.triton_kernels_hub
    for name, experts in plain.items():
        own = model.get_submodule(name).experts
        for part in ("gate_up_proj", "down_proj"):
            weight, scales = mxfp4.swizzle_mxfp4(*mxfp4.quantize_to_mxfp4(getattr(experts, part).data, hub), hub)
            precision = hub.matmul_ogs.PrecisionConfig(
                weight_scale=scales, flex_ctx=hub.matmul_ogs.FlexCtx(rhs_data=hub.matmul_ogs.InFlexData())
            )
            del own._parameters[part]
            setattr(own, part, weight)
            setattr(own, f"{part}_precision_config", precision)
            bias = getattr(experts, f"{part}_bias").data
            setattr(own, f"{part}_bias", nn.Parameter(bias.float(), requires_grad=False))
    model.eval()


QUANTIZERS: Final[dict[str, Quantizer]] = {
    "bnb-4bit": Quantizer(_bitsandbytes_4bit, ("bitsandbytes",), in_fp32=True),
    "bnb-8bit": Quantizer(_bitsandbytes_8bit, ("bitsandbytes",)),
    "ao-int4": Quantizer(
        _torchao("Int4WeightOnlyConfig", group_size=128, int4_packing_format="tile_packed_to_4d"), ("torchao",)
    ),
    "ao-int8": Quantizer(_torchao("Int8WeightOnlyConfig"), ("torchao",), in_fp32=True),
    "ao-float8": Quantizer(
        _torchao("Float8DynamicActivationFloat8WeightConfig", granularity=lambda torchao: torchao.PerRow()),
        ("torchao",),
    ),
    "fp8": Quantizer(_fp8, ("kernels",)),
    "mxfp4": Quantizer(_mxfp4, ("kernels",)),
}
