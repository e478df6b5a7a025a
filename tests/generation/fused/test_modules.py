"""Modules that run as kernels: which are found, that they compute the same, and when they run."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton")

from hf_fastdecode.generation.fused import gated, norms
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.norms import WaitingSums
from hf_fastdecode.kernels.row_products.config import fusing_products

from ...tiny_models import ONE_OF_EACH_TYPE
from .half_models import DEVICE, Counted, check_fused, counting, fail, half, logits

FOUND = {
    "llama-gqa": "LlamaAttention 2, LlamaMLP 2, LlamaRMSNorm 5",
    "qwen3": "Qwen3Attention 2, Qwen3MLP 2, Qwen3RMSNorm 9",
    "gemma2": "Gemma2Attention 2, Gemma2MLP 2, Gemma2RMSNorm 9",
    "gemma3_text": "Gemma3Attention 2, Gemma3MLP 2, Gemma3RMSNorm 13",
    "olmo3": "Olmo3Attention 2, Olmo3MLP 2, Olmo3RMSNorm 9",
    "phi3": "Phi3Attention 2, Phi3MLP 2, Phi3RMSNorm 5",
    "gpt_neox": "GPTNeoXAttention 2",
    "cohere2": "Cohere2MLP 2",
    "gpt_oss": "GptOssAttention 2, GptOssExperts 2, GptOssRMSNorm 5, GptOssTopKRouter 2",
    "gpt2": "",
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return counting(monkeypatch, norms, "rms_norm")


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    fused = FusedModules(half(name))
    counts = Counter(type(module).__name__ for module in fused.modules)
    assert ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) == FOUND[name]


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE)
def test_same_logits(name: str) -> None:
    """Error against fp32 at most twice that of the model's own code, in every architecture."""
    model = half(name)
    own, fused = logits(model), FusedModules(model)
    with fused.installed(), fusing_products():
        found = logits(model)
    exact = logits(deepcopy(model).float())
    assert (found - exact).abs().max() <= 2 * (own - exact).abs().max()
    assert torch.equal(logits(model), own)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma2", "phi3", "gpt_neox"])
def test_same_gradients(name: str) -> None:
    """Error against fp32 at most twice that of the model's own code, of the gradients of all weights together."""
    model, ids = half(name), torch.arange(1, 13, device=DEVICE).view(2, 6)

    def gradients(one: nn.Module) -> Tensor:
        one.zero_grad()
        one(ids, use_cache=False).logits.float().log_softmax(-1)[..., 3].sum().backward()
        return torch.cat([weight.grad.float().flatten() for weight in one.parameters()])

    own, fused = gradients(model), FusedModules(model)
    with fused.installed():
        found = gradients(model)
    exact = gradients(deepcopy(model).float())
    assert (found - exact).norm() <= 2 * (own - exact).norm()


def test_every_attribute_is_restored() -> None:
    model = half()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    fused = FusedModules(model)
    with fused.installed(), pytest.raises(RuntimeError, match="must match"), fused.installed():
        model.model.norm(torch.ones(2, 63, dtype=torch.float16, device=DEVICE))
    with fused.installed():
        assert "_compiled_call_impl" in vars(fused.modules[0])
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_contexts_that_overlap(launches: Counted) -> None:
    """The first to enter leaves first: the other goes on with kernels, and the last restores."""
    model = half()
    one, two = FusedModules(model), FusedModules(model)
    first, second = ExitStack(), ExitStack()
    first.enter_context(one.installed())
    second.enter_context(two.installed())
    first.close()
    with torch.no_grad():
        model.model.norm(torch.ones(1, 64, dtype=torch.float16, device=DEVICE))
    second.close()
    assert "_compiled_call_impl" not in vars(model.model.norm)


def test_norms_of_transposed_heads(launches: Counted) -> None:
    """Gemma 3 transposes queries and keys of many tokens before their norms."""
    model = half("gemma3_text")
    norm = model.model.layers[0].self_attn.q_norm
    x = torch.randn(2, 13, 4, norm.weight.shape[0], device=DEVICE).half().transpose(1, 2)
    with torch.no_grad(), FusedModules(model).installed():
        found = norm(x)
        assert launches.count == 1
        assert torch.equal(found, norm(x.contiguous()))
        logits(model)
        assert launches.count == 2 + 13
    assert found.stride() == norm(x).stride()


def test_other_threads_and_dtypes_keep_the_models_code(launches: Counted) -> None:
    model = half()
    with FusedModules(model).installed(), ThreadPoolExecutor(1) as pool:
        pool.submit(logits, model).result()
        assert launches.count == 0
        logits(model)
        assert launches.count == 5
        logits(model.float())
    assert launches.count == 5


@pytest.mark.parametrize("sums", [nullcontext, WaitingSums])
def test_failed_kernels(sums: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own code runs where a kernel cannot."""
    monkeypatch.setattr(norms, "rms_norm", fail)
    monkeypatch.setattr(gated, "gated", fail)
    monkeypatch.setattr("hf_fastdecode.generation.fused.rotary.rotate", fail)
    check_fused(half(), sums(), atol=0)


class ShiftedNorm(LlamaRMSNorm):
    """A norm that computes something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1


def test_other_formulas_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half()
    model.model.norm.__class__ = ShiftedNorm
    before = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args, **kwargs: before(*args, **kwargs)[::-1])
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *args: None)
    model.model.layers[1].input_layernorm.forward = lambda x: x
    found = FusedModules(model).modules
    layers = model.model.layers
    assert found == [layers[0].post_attention_layernorm, layers[1].mlp, layers[1].post_attention_layernorm]


def test_scaled_products_are_not_found() -> None:
    """A module that reads a number of its own: what differs between two of a class is tried for each."""

    class Scaled(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    model = half()
    for layer, scale in zip(model.model.layers, (1.0, 1.5), strict=True):
        layer.mlp.__class__ = Scaled
        layer.mlp.scale = scale
    found = [module for module in FusedModules(model).modules if isinstance(module, Scaled)]
    assert found == [model.model.layers[0].mlp]


def test_what_the_user_compiled_stays(launches: Counted) -> None:
    model, called = half(), []
    vars(model.model.norm)["_compiled_call_impl"] = lambda x: called.append(x) or x
    with FusedModules(model).installed():
        logits(model)
    assert (len(called), launches.count) == (1, 4)
    assert "_compiled_call_impl" in vars(model.model.norm)


def test_trials_leave_generators_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    FusedModules(half())
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_changed_settings_are_tried_again() -> None:
    """A norm with another epsilon computes with it."""
    model = half()
    FusedModules(model)
    model.model.norm.variance_epsilon = 3.0
    expected = logits(model)
    with FusedModules(model).installed():
        found = logits(model)
    exact = logits(deepcopy(model).float())
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()
