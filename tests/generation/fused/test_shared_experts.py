"""Modules for all rows beside chosen experts: which are further experts in the same launches, and how exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

pytest.importorskip("triton")

from hf_fastdecode.generation.fused import experts, latents, shared_experts
from hf_fastdecode.generation.fused.gated import RowProducts
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.shared_experts import SHARED_EXPERTS
from hf_fastdecode.generation.fused.trial import tried
from hf_fastdecode.kernels.row_products.config import fusing_products

from ...patches.test_latent_attention import model_of
from ...tiny_models import ragged_prompts
from ..calls import as_in_stock
from ..launches import fuse_on_the_cpu
from ..uncaptured import SAMPLING, on_the_cpu
from .half_models import DEVICE, counting, fail


class Halved(DeepseekV2Moe):
    """What is shared counts half."""

    def forward(self, x: Tensor) -> Tensor:
        _, shares, chosen = self.gate(x)
        found = self.experts(x.view(-1, x.shape[-1]), chosen, shares).view(x.shape)
        return found + self.shared_experts(x) / 2


def mixture(kind: type[nn.Module] = DeepseekV2Moe, **fields: Any) -> nn.Module:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = DeepseekV2Config(**sizes, n_shared_experts=2, topk_method="greedy", **fields)
    config._experts_implementation = "batched_mm"  # in any dtype
    torch.manual_seed(0)
    module = kind(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.15)
    return module.to(DEVICE)


def test_which_are_found() -> None:
    module = mixture()
    assert SHARED_EXPERTS.may_be(type(module))
    assert SHARED_EXPERTS.key(module) is not None
    assert tried(SHARED_EXPERTS.form_of, module) is not None
    assert tried(SHARED_EXPERTS.form_of, mixture(Halved)) is None
    module.shared_experts.act_fn = nn.GELU()
    assert tried(SHARED_EXPERTS.form_of, module) is None
    module.bias = nn.Parameter(torch.zeros(1))
    assert SHARED_EXPERTS.key(module) is None


@on_the_cpu
def test_tokens_equal_stock_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the router and the latents' launch beside it."""
    fuse_on_the_cpu(monkeypatch)
    for module in (shared_experts, experts, latents):
        monkeypatch.setattr(module, "runs_fused", lambda x: True)
    counts = [
        counting(monkeypatch, *of) for of in ((shared_experts, "experts"), (experts, "route"), (latents, "absorb"))
    ]
    model = model_of("without-query-ranks", num_hidden_layers=1, first_k_dense_replace=0, n_shared_experts=2)
    call = ragged_prompts(20) | SAMPLING | {"max_new_tokens": 3}
    as_in_stock(model, lambda: model.generate(**call), mode="graph", backend="triton", min_saved_tokens=1)
    assert [one.count for one in counts] == [2, 2, 2]


@pytest.mark.parametrize("case", ["served", "rows", "width", "hook", "failure"])
def test_when_the_kernels_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Error at most 1.1 times that of the module's code; which runs for many rows, other widths and with hooks."""
    launches = counting(monkeypatch, shared_experts, "experts")
    module = mixture()
    if case == "width":
        for name in ("gate_proj", "up_proj"):
            setattr(module.shared_experts, name, nn.Linear(64, 48, bias=False, device=DEVICE))
        module.shared_experts.down_proj = nn.Linear(48, 64, bias=False, device=DEVICE)
    elif case == "failure":
        monkeypatch.setattr(shared_experts, "experts", fail)
    rows = 70 if case == "rows" else 5
    module, router = module.half(), module.gate
    router.float()
    x = torch.randn(rows, 1, 64, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    with torch.no_grad():
        exact, stock = copy.deepcopy(module).float()(x.float()).double(), module(x)
        if case == "hook":
            module.shared_experts.down_proj.register_forward_hook(lambda module, inputs, output: output)
        fused = FusedModules(module)
        with fused.installed(), RowProducts().here(), fusing_products():
            found = module(x)
        assert launches.count == (case == "served")
    assert (found.shape, found.dtype) == (stock.shape, stock.dtype)
    assert float((found - exact).norm()) <= 1.1 * float((stock - exact).norm()) + 1e-6
