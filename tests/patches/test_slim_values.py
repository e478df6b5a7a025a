"""Values from averaged keys, against each token's values in fp64, with TF32 as on a GPU; quantized linear layers."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.kernels.device import triton_is_installed
from hf_fastdecode.patches.layers import slim_values
from hf_fastdecode.patches.layers.slim_attention import CachedTokens, KeyProjection, SlimTokens
from hf_fastdecode.patches.layers.slim_values import (
    Product,
    SlimValues,
    StoredMatrix,
    from_halves,
    in_halves,
    sum_of_products,
)

from ..tiny_models import ragged_prompts
from .encoder_decoder_models import encoder_decoder, encoder_decoder_pair
from .family_models import family_model
from .slim_models import TEXT, pair, relative


def tf32(x: Tensor) -> Tensor:
    """Rounded to 11 bits, as TF32's products take their factors."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def random_values() -> SlimValues:
    generator = torch.Generator().manual_seed(0)
    values = SlimValues(48, 48, 48, 4, torch.float16)
    for name, buffer in values.named_buffers():
        if "scales" in name:
            buffer.copy_(torch.exp2(torch.randint(-3, 9, buffer.shape, generator=generator)))
        else:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return values


def test_averages_of_keys_give_averages_of_values() -> None:
    values, generator = random_values(), torch.Generator().manual_seed(1)
    keys = torch.randn(2, 1, 30, 48, generator=generator).half()
    coordinates = torch.randn(2, 1, 30, 4, generator=generator).half()
    probabilities = torch.randn(2, 4, 3, 30, generator=generator, dtype=torch.float64).softmax(-1)
    per_token = values.per_token(keys.double(), coordinates.double())
    assert per_token.dtype == torch.float64
    expected = probabilities @ per_token.unflatten(-1, (4, 12)).transpose(1, 2)
    exact = values.averaged(probabilities, keys.double(), coordinates.double())
    assert relative(exact, expected) < torch.finfo(torch.float32).eps
    found = values.averaged(probabilities.float(), keys, coordinates)
    assert relative(found, expected) < 48 * torch.finfo(torch.float32).eps  # of a product of 48 terms


def product(x: Tensor, matrix: StoredMatrix, heads: int | None = None, *, in_range: bool = False) -> Tensor:
    return sum_of_products([matrix.product(x)], None, heads, in_range=in_range)


def test_averages_in_halves_withstand_tf32() -> None:
    """Whole they would be rounded to 11 bits, as coarsely as cached keys."""
    generator = torch.Generator().manual_seed(2)
    matrix = StoredMatrix(48, 48, torch.float16)
    matrix.values.copy_(torch.randn(48, 48, generator=generator))
    average = torch.randn(2, 4, 3, 48, generator=generator) * 100
    oracle = product(average.double(), matrix, 4)
    whole = relative(product(tf32(average), matrix, 4), oracle)
    parts = from_halves(torch.stack([product(tf32(part), matrix, 4) for part in in_halves(average, in_range=True)[0]]))
    assert relative(parts, oracle) < 2 * torch.finfo(torch.float32).eps * 48**0.5 < whole / 10


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 100.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_halves_of_any_size(dtype: torch.dtype, size: float) -> None:
    """Remainders of rounding small numbers to fp16 are below its normal numbers, unless they are scaled."""
    x = (size * torch.randn(2, 4, 3, 48, generator=torch.Generator().manual_seed(3))).to(dtype)
    x[0, 0, 0] = 0
    parts, factor = in_halves(x)
    assert parts.dtype == torch.float16
    found = from_halves(parts.float()) * (1 if factor is None else factor)
    bound = 2.0**-20 if dtype == torch.float32 else 0
    if dtype != torch.float16:
        assert relative(found, x) <= bound
    assert torch.equal(found[0, 0, 0], torch.zeros(48))
    if 1e-4 <= size <= 100:
        assert relative(from_halves(in_halves(x, in_range=True)[0].float()), x) <= max(bound, 2.0**-11)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose products take halves; a CPU's operators have no `out_dtype`."""
    if request.param == "cpu":
        mm, bmm = torch.mm, torch.bmm
        monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)))
        monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype: bmm(a.to(out_dtype), b.to(out_dtype)))
        monkeypatch.setattr(slim_values, "takes_halves", lambda x, matrix: x.dtype != torch.float64)
    device: str = request.param
    return device


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_by_halves(
    dtype: torch.dtype, heads: int | None, by_kernel: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows are multiplied by PyTorch's operators, few by the kernel."""
    if not by_kernel:
        monkeypatch.setattr(slim_values, "_by_kernel", lambda *_: None)
    elif not triton_is_installed():
        pytest.skip("needs Triton")
    generator = torch.Generator().manual_seed(4)
    products = []
    for width in (256, 40):
        matrix = StoredMatrix(width, 128, torch.float16)
        matrix.values.copy_(torch.randn(width, 128, generator=generator))
        matrix.scales.copy_(torch.exp2(torch.randint(-3, 9, (128,), generator=generator)))
        products.append(matrix.product(torch.randn(2, 4, 3, width, generator=generator).to(dtype)))
    constant = torch.randn(128, generator=generator)
    oracle = sum_of_products([Product(one.factor.double(), *one[1:]) for one in products], constant, heads)
    moved = [Product(*(part.to(device) for part in one)) for one in products]
    for in_range in (False, True):
        found = sum_of_products(moved, constant.to(device), heads, in_range=in_range)
        assert (found.dtype, found.shape) == (torch.float32, oracle.shape)
        assert relative(found.cpu(), oracle) < 256**0.5 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_averages_beyond_the_range_of_fp16(stored: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(6)
    values = SlimValues(48, 48, 32, 0, torch.float16)
    values.from_keys.values.copy_(torch.randn(48, 32, generator=generator))
    keys = 1e6 * torch.randn(2, 4, 1, 48, generator=generator)
    oracle = values.of_averages(keys.double(), keys[..., :0].double(), stored)
    keys = keys.to(device)
    found = values.to(device).of_averages(keys, keys[..., :0], stored)
    assert relative(found.cpu(), oracle) < 2.0**-20


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("sizes", [(0, 4, 3), (2, 4, 0)])
def test_products_of_nothing(sizes: tuple[int, ...], heads: int | None, device: str) -> None:
    product = StoredMatrix(48, 32, torch.float16).to(device).product(torch.empty(*sizes, 48, device=device))
    assert sum_of_products([product], None, heads).shape == (*sizes, 32 // (heads or 1))


@pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
def test_other_numbers_of_rows_are_not_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slim_values, "takes_halves", lambda x, matrix: x.dtype != torch.float64)
    torch._dynamo.reset()
    matrix, graphs = StoredMatrix(64, 32, torch.float16), CompileCounter()
    compiled = torch.compile(lambda x: sum_of_products([matrix.product(x * 1.5)]), backend=graphs)
    for rows in range(3, 8):
        assert compiled(torch.randn(rows, 64)).shape == (rows, 32)
    assert graphs.frame_count == 2  # of three rows, and of any number


@pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
@pytest.mark.skipif(which("g++") is None, reason="inductor compiles for the CPU with g++")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_products_are_as_exact(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile leaves out roundings, without which the parts of a number are itself and 0."""
    if device == "cpu":
        monkeypatch.setattr(slim_values, "takes_halves", lambda x, matrix: x.dtype != torch.float64)
    generator = torch.Generator().manual_seed(5)
    matrix = StoredMatrix(64, 32, torch.float16)
    matrix.values.copy_(torch.randn(64, 32, generator=generator))
    matrix.to(device)
    x = torch.randn(3, 64, generator=generator).to(device)
    found = torch.compile(lambda x: sum_of_products([matrix.product(x * 1.5)]))(x)
    assert relative(found, sum_of_products([matrix.product(x.double() * 1.5)])) < 8 * torch.finfo(torch.float32).eps


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_projections_keep_their_accumulators(device: str) -> None:
    """A quantizer's weights, whose products are rounded, are told from parameters in compiled code too."""
    generator = torch.Generator().manual_seed(6)
    projection = KeyProjection(64, 32, bias=False)
    projection.weight.copy_(torch.randn(32, 64, generator=generator))
    projection.bfloat16().to(device)
    x = torch.randn(3, 64, generator=generator).bfloat16().to(device)
    found = torch.compile(projection.forward, backend="aot_eager" if device == "cpu" else "inductor")(x)
    assert found.dtype == torch.float32
    assert relative(found, x.double() @ projection.weight.double().mT) < 8 * torch.finfo(torch.float32).eps


class Operators(TorchDispatchMode):
    """Counts operators, each of which is a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def test_sums_begin_with_the_first_product() -> None:
    values, keys = random_values(), torch.randn(3, 48)
    assert values.directions is not None
    with Operators() as seen:
        values.from_keys(keys)
    assert seen.counts["aten.mm"] == 1
    assert seen.counts["aten.add"] == 0
    with Operators() as seen:
        sum_of_products([values.from_keys.product(keys), values.directions.product(keys[:, :4])], values.constant)
    assert seen.counts["aten.mm"] == seen.counts["aten.add"] == 2


def test_keys_without_rope_are_scored_as_they_are_cached() -> None:
    """Not by way of fp32, from which ordinary nodes would be rounded again."""
    layers = [one for one in encoder_decoder_pair("t5", "k")[1].modules() if isinstance(one, SlimTokens)]
    for layer in layers:
        cached = torch.randn(1, 1, 7, layer.heads * layer.head_dim).bfloat16()
        tokens = CachedTokens(cached, cached[..., :0], None)
        with Operators() as seen:
            scored = layer.scored_keys(tokens)
        assert seen.counts["aten._to_copy"] == 0
        expected = cached.float()[:, 0].unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        query = torch.randn(1, layer.heads, 3, layer.head_dim)
        assert torch.equal(layer.score_operands(query, tokens)[1], expected)
        assert torch.equal(scored.float(), expected)
    assert layers


@pytest.mark.gpu
def test_training_keeps_gradients() -> None:
    x = torch.randn(3, 48, device="cuda", requires_grad=True)
    StoredMatrix(48, 48, torch.float16).cuda()(x).sum().backward()
    assert x.grad is not None


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
    found, expected = (one.generate(**PROMPTS, max_new_tokens=8, do_sample=False) for one in (model, dequantized))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_dtypes_of_quantized_weights_are_refused(name: str, dtype: torch.dtype) -> None:
    """Parameters are plain tensors, as layerwise casting leaves them."""
    model = family_model(name) if name == "gpt2" else encoder_decoder(name)
    place, parameter = next(one for one in model.named_parameters() if "1.layer.0" in one[0] or "h.1.mlp" in one[0])
    module, _, own = place.rpartition(".")
    setattr(model.get_submodule(module), own, nn.Parameter(parameter.to(dtype), requires_grad=False))
    with pytest.raises(ValueError, match=f"{place} is of dtype {str(dtype).removeprefix('torch.')}, as quantized"):
        to_slim(model, TEXT)
