"""What trials of modules tell apart: formulas, epsilons, settings of a layer, and which numbers rotate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

pytest.importorskip("triton")

from hf_fastdecode.generation.fused import rotary
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.trial import _Casts, fused_here

from .half_models import DEVICE, half


def test_class_patched_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half()
    FusedModules(model)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x) - self.up_proj(x)))
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: x * self.weight)
    found = FusedModules(model).modules
    assert not any(isinstance(module, LlamaMLP | LlamaRMSNorm) for module in found)


class EpsOutsideNorm(LlamaRMSNorm):
    """Adds its epsilon behind the root, which only small numbers show."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        normalized = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        return self.weight * normalized.to(hidden_states.dtype)


class InDtypeOfWeightNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * normalized).to(self.weight.dtype)


def test_epsilon_elsewhere() -> None:
    model = half()
    model.model.norm.__class__ = EpsOutsideNorm
    assert model.model.norm not in FusedModules(model).modules


def test_dtype_of_the_weight() -> None:
    model = half()
    model.model.norm.__class__ = InDtypeOfWeightNorm
    model.model.norm.float()
    x = torch.ones(2, 64, dtype=torch.float16, device=DEVICE)
    with torch.no_grad(), FusedModules(model).installed():
        assert model.model.norm(x).dtype == torch.float32


class WidenedNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def test_what_autocast_casts() -> None:
    """Norms by PyTorch's function come to be in fp32, and routers in fp32 in half precision: both keep their code."""
    model = half()
    model.model.norm.__class__ = WidenedNorm
    fused = FusedModules(model)
    casts = {module for module, one in zip(fused.modules, fused.found, strict=True) if one.casts}
    assert casts == {model.model.norm}
    assert len(fused.modules) > 4
    routers = {
        name: [one.casts for one in FusedModules(half(name)).found if one.kind.what == "routers"]
        for name in ("mimo_v2_flash", "qwen2_moe")
    }
    assert routers == {"mimo_v2_flash": [True], "qwen2_moe": [False, False]}
    x = torch.ones(2, 64, dtype=torch.float16, device=DEVICE)
    weight = model.model.norm.weight
    with torch.no_grad(), fused.installed(), torch.autocast(DEVICE, torch.float16):
        expected = torch.nn.functional.rms_norm(x, weight.shape, weight, model.model.norm.variance_epsilon)
        found = model.model.norm(x)
    assert found.dtype == expected.dtype  # fp32 on a GPU
    assert torch.equal(found, expected)


@contextmanager
def autocast_on_cuda() -> Iterator[None]:
    """Autocast as on a GPU, where there may be none, over tensors without numbers."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.square(),
    lambda x: x**2,
    lambda x: 1 / x,
    lambda x: F.normalize(x, dim=-1),
    lambda x: torch.linalg.vector_norm(x, dim=-1),
    lambda x: torch.linalg.norm(x, dim=-1),
    lambda x: x.norm(dim=-1),
    lambda x: F.softmin(x, dim=-1),
    lambda x: torch.special.softmax(x, -1),
    lambda x: x.softmax(-1),
    lambda x: x.softmax(-1, dtype=torch.float32),
    lambda x: F.softplus(x) + torch.log1p(x).exp(),
    lambda x: x.mean(-1) + x.var(-1) + x.amax(-1),
    lambda x: x * torch.sigmoid(x) + F.silu(x) + F.gelu(x) + x.tanh() + x.sqrt() + x / 2,
    lambda x: torch.tensordot(x, x, dims=1) + torch.inner(x, x),
    lambda x: torch.linalg.vecdot(x, x),
    lambda x: F.linear(x, x) + x @ x + torch.einsum("ij,jk->ik", x, x),
    lambda x: F.prelu(x, x.amax(0)),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_names_of_what_autocast_casts(function: Callable[[Tensor], Tensor]) -> None:
    """Also of functions that call others which it casts: autocast sees these, and modes do not."""
    for dtype in (torch.bfloat16, torch.float32):
        with _Casts() as casts:
            plain = function(torch.ones(4, 4, dtype=dtype)).dtype
        with autocast_on_cuda():
            found = function(torch.ones(4, 4, dtype=dtype, device="cuda")).dtype
        assert casts.seen == (found != plain), dtype


class ByTensor(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.factor.to(x))


class ByLayer(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * (1 + self.layer_idx)


class ByPrivate(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self._factor


class Clamped(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=30) * self.up_proj(x))


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (ByTensor, "factor", (torch.tensor(1.0), torch.tensor(1.5))),
        (ByLayer, "layer_idx", (0, 1)),
        (ByPrivate, "_factor", (1.0, 1.5)),
        (Clamped, "unused", (1, 1)),
    ],
)
def test_settings_of_a_layer(kind: type[LlamaMLP], name: str, values: tuple[Any, Any]) -> None:
    model = half()
    for layer, value in zip(model.model.layers, values, strict=True):
        layer.mlp.__class__ = kind
        setattr(layer.mlp, name, value)
    found = FusedModules(model).modules
    assert model.model.layers[1].mlp not in found


def test_rotation_by_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half()
    layer = model.model.layers[0].self_attn
    forms = rotary.form_of(layer)
    assert forms is not None
    queries, angles = torch.rand(1, 2, 3, 16).half(), torch.rand(1, 3, 16).half()
    expected = modeling_llama.apply_rotary_pos_emb(q=queries, k=queries, cos=angles, sin=angles)
    found = rotary._rotate(modeling_llama.apply_rotary_pos_emb, forms, q=queries, k=queries, cos=angles, sin=angles)
    assert torch.equal(found[0], expected[0])


def test_partial_rotation_of_the_last_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_llama.apply_rotary_pos_emb

    def behind(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        kept = q.shape[-1] - cos.shape[-1]
        turned = original(q[..., kept:], k[..., kept:], cos, sin)
        return tuple(torch.cat((x[..., :kept], y), -1) for x, y in zip((q, k), turned, strict=True))

    model = half()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", behind)
    forms = rotary.form_of(model.model.layers[0].self_attn)
    queries, angles = torch.rand(1, 2, 3, 16).half(), torch.rand(1, 3, 8).half()
    with torch.no_grad(), fused_here():
        found = rotary._rotate(behind, forms, queries, queries, angles, angles)
    assert torch.equal(found[0], behind(queries, queries, angles, angles)[0])


def test_activations_without_a_hash() -> None:
    class Swish:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Tensor) -> Tensor:
            return torch.nn.functional.silu(x)

    model = half()
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = Swish()
    assert not any(isinstance(module, LlamaMLP) for module in FusedModules(model).modules)
