"""Parts of vision towers: convolutions of patches run as products, attention gets its lengths on the CPU."""

from __future__ import annotations

import inspect
import re
import warnings
from contextlib import nullcontext
from copy import deepcopy
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

pytest.importorskip("triton")

from hf_fastdecode.generation.fused import vision
from hf_fastdecode.generation.fused.modules import FusedModules

from ...architectures.classes import tiny_model_of
from ...image_inputs import prompts_with_images
from .half_models import DEVICE, counting


def images_of(model: nn.Module) -> dict[str, Tensor]:
    """Two images; found by passes of the model, so before passes that are counted."""
    images, dtype = prompts_with_images(model, (3, (4, 6), 2, (8, 4), 1)), model.dtype
    return {
        "pixel_values": images["pixel_values"].to(DEVICE, dtype),
        "image_grid_thw": images["image_grid_thw"].to(DEVICE),
    }


def features_of(model: nn.Module, images: dict[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return model.base_model.get_image_features(**images, return_dict=True).pooler_output


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
    convolutions = [one for one in FusedModules(model).found if one.kind is vision.PATCHES]
    images = images_of(model)
    fused, products = FusedModules(model, found=convolutions), counting(monkeypatch, vision, "_product")
    expected = torch.cat(features_of(model, images))
    with fused.installed():
        found = torch.cat(features_of(model, images))
    assert products.count >= 1
    images["pixel_values"] = images["pixel_values"].double()
    exact = torch.cat(features_of(deepcopy(model).double(), images))
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()


def attention(kind: type[nn.Module]) -> str:
    """What a kind of attention does with lengths where flash attention is not requested."""
    code = inspect.getsource(inspect.unwrap(kind.forward)).split("else:")[-1]
    return "; ".join(line.strip() for line in code.splitlines() if re.search("seqlens|lengths", line))


def test_which_attention_splits() -> None:
    """In every file of transformers: code that reads lengths for `torch.split` alone."""
    found = set[str]()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        if re.search(r"cu_seqlens[^?]*\.tolist\(\)", path.read_text()) is None:
            continue
        module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        own = (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__)
        kinds = [one for one in own if issubclass(one, nn.Module) and vision.may_split(one)]
        found |= {kind.__name__ for kind in kinds}
        for kind in kinds:
            assert attention(kind) == (
                "lengths = cu_seqlens[1:] - cu_seqlens[:-1]; torch.split(tensor, lengths.tolist(), dim=2) "
                "for tensor in (query_states, key_states, value_states)"
            ), kind
    assert found >= {"VisionAttention", "Glm4vVisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3_5VisionAttention"}


TOWERS = {
    "Qwen2VLForConditionalGeneration": 1,
    "Qwen2_5_VLForConditionalGeneration": 2,  # windows, too
    "Qwen3VLForConditionalGeneration": 1,
    "Qwen3_5ForConditionalGeneration": 1,
    "Glm4vForConditionalGeneration": 1,
}
"""Different lengths in a pass of a tower."""


def splitting(model: nn.Module) -> FusedModules:
    return FusedModules(model, found=[one for one in FusedModules(model).found if one.kind is vision.SPLITS])


@pytest.mark.parametrize("name", TOWERS)
def test_attention_gets_lengths_on_the_host_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features in fp32 are those of the model's own code, bit by bit."""
    model = tiny_model_of(name).to(DEVICE)
    images = images_of(model)
    given, expected = list[Tensor](), features_of(model, images)
    fused = splitting(model)
    assert fused.found
    assert str(fused) == ""
    own = vision.uncompiled_call

    def noting(module: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
        given.append(named["cu_seqlens"])
        return own(module, *args, **named)

    monkeypatch.setattr(vision, "uncompiled_call", noting)
    with fused.installed():
        found = features_of(model, images)
    assert all(map(torch.equal, found, expected))
    assert len(given) == len(fused.found)
    assert len(set(map(id, given))) <= TOWERS[name]
    assert {one.device.type for one in given} == {"cpu"}


def test_flash_attention_gets_lengths_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny_model_of("Qwen3VLForConditionalGeneration"), list[Tensor]()
    fused = splitting(model)
    monkeypatch.setattr(vision, "uncompiled_call", lambda _, cu_seqlens: given.append(cu_seqlens))
    lengths, module = torch.tensor([0, 4, 9], dtype=torch.int32), fused.modules[0]
    with fused.installed():
        for implementation, same in (("sdpa", False), ("flash_attention_2", True), ("sdpa", False)):
            monkeypatch.setattr(module.config, "_attn_implementation_internal", implementation)
            module(cu_seqlens=lengths)
            assert (given[-1] is lengths) == same
        lengths[1] = 3
        module(cu_seqlens=lengths)
    assert given[0] is given[2]
    assert [one.tolist() for one in given[2:]] == [[0, 4, 9], [0, 3, 9]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOWERS)
def test_attention_waits_once(name: str) -> None:
    model = tiny_model_of(name).to("cuda", torch.bfloat16)
    fused, waits, images = splitting(model), list[int](), images_of(model)
    for context in (nullcontext(), fused.installed()):
        features_of(model, images)
        with context, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                features_of(model, images)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(one.message) for one in caught))
    assert waits[0] - waits[1] == 3 * len(fused.found) - TOWERS[name]
