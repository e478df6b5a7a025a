"""Parts of vision towers: convolutions whose inputs are as large as their kernels run as products."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from hf_fastdecode.generation.fused import vision
from hf_fastdecode.generation.fused.modules import FusedModules

from ...architectures.classes import tiny_model_of
from ...image_inputs import prompts_with_images
from .half_models import DEVICE, counting

CONVOLUTIONS = {
    "Qwen3-VL": nn.Conv3d(3, 64, (2, 16, 16), (2, 16, 16)),
    "Qwen2-VL": nn.Conv3d(3, 63, (2, 14, 14), (2, 14, 14), bias=False),
    "GLM-4V's last": nn.Conv2d(48, 40, 2, 2),
}
OTHERS = {
    "padded": nn.Conv2d(3, 8, 4, 4, padding=1),
    "in groups": nn.Conv2d(4, 8, 4, 4, groups=2),
    "with gaps": nn.Conv2d(3, 8, 4, 4, dilation=2),
}


def of(module: nn.Module, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, module.in_channels, *module.kernel_size, generator=generator).to(DEVICE, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_errors_on_a_gpu(name: str) -> None:
    assert DEVICE == "cuda"
    check_errors(name)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_errors(name: str) -> None:
    check_errors(name)


def check_errors(name: str) -> None:
    """Error against fp64 at most twice that of PyTorch's convolution."""
    module = deepcopy(CONVOLUTIONS[name]).to(DEVICE, torch.bfloat16)
    exact, fused = deepcopy(module).double(), FusedModules(module)
    assert fused.modules == [module]
    with torch.no_grad():
        for rows in (1, 63, 1000):
            x = of(module, rows)
            own, oracle = module(x), exact(x.double())
            with fused.installed():
                found = module(x)
            assert (found.shape, found.dtype) == (own.shape, own.dtype)
            assert (found - oracle).abs().max() <= 2 * (own - oracle).abs().max()


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_are_left_alone(name: str) -> None:
    assert not FusedModules(OTHERS[name]).found


def test_whole_images_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of several patches, fp32, and passes without `FusedModules`, run as PyTorch has it."""
    module, products = deepcopy(CONVOLUTIONS["GLM-4V's last"]).to(DEVICE), counting(monkeypatch, vision, "_product")
    x = torch.randn(2, 48, 4, 6, device=DEVICE)
    fused = FusedModules(module)
    products.count = 0  # that of the trial
    with fused.installed():
        assert torch.equal(module(x), type(module).forward(module, x))
        assert module(x[..., :2, :2]).shape == (2, 40, 1, 1)
        assert module.bfloat16()(x.bfloat16()).shape == (2, 40, 2, 3)
        assert products.count == 0
        module(input=x[..., :2, :2].bfloat16())
    module(x[..., :2, :2].bfloat16())
    assert products.count == 1


@pytest.mark.parametrize("name", ["Qwen3VLForConditionalGeneration", "Glm4vForConditionalGeneration"])
def test_features_of_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tower whose other modules run their own code."""
    model = tiny_model_of(name).to(DEVICE, torch.bfloat16)
    images = prompts_with_images(model, (3, (4, 6), 2, (8, 4), 1))
    own = {key: images[key].to(DEVICE) for key in ("pixel_values", "image_grid_thw")}
    convolutions = [one for one in FusedModules(model).found if one.kind is vision.PATCHES]
    fused, products = FusedModules(model, found=convolutions), counting(monkeypatch, vision, "_product")

    def features(one: nn.Module) -> Tensor:
        with torch.no_grad():
            return torch.cat(one.base_model.get_image_features(**own, return_dict=True).pooler_output)

    expected = features(model)
    with fused.installed():
        found = features(model)
    assert products.count >= 1
    exact = features(deepcopy(model).double())
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()
