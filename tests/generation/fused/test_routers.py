"""Routers within steps: which are found, and when the kernel runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

pytest.importorskip("triton")

from hf_fastdecode.generation.fused import experts
from hf_fastdecode.generation.fused.experts import ROUTERS
from hf_fastdecode.generation.fused.gated import RowProducts
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.trial import tried
from hf_fastdecode.kernels.experts.config import MOST_ROUTED, Routing
from hf_fastdecode.kernels.row_products.config import fusing_products

from .half_models import DEVICE, counting

COUNT, HIDDEN = 6, 64


def config(**more: Any) -> Any:
    fields = {"num_experts_per_tok": 2, "num_local_experts": COUNT, "num_experts": COUNT, "hidden_size": HIDDEN}
    return SimpleNamespace(**fields, **more)


def latents(method: str) -> nn.Module:
    """DeepSeek-V2's router, whose weights are in fp32."""
    return DeepseekV2TopkRouter(config(routed_scaling_factor=1.5, topk_method=method, n_group=3, topk_group=1))


def corrected(groups: int, *, norm: bool) -> nn.Module:
    """DeepSeek-V3's router, of sigmoids."""
    fields = {"routed_scaling_factor": 1.5, "n_group": groups, "topk_group": 1, "norm_topk_prob": norm}
    return DeepseekV3TopkRouter(config(**fields))


class Sigmoid(MixtralTopKRouter):
    """Shares are no softmax."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.linear(x, self.weight)
        values, chosen = torch.topk(scores.sigmoid(), self.top_k)
        return scores, values, chosen


@pytest.mark.parametrize(
    ("router", "routing"),
    [
        (GptOssTopKRouter(config()), Routing(2, first=False, whole=False)),
        (MixtralTopKRouter(config()), Routing(2, first=False, whole=True)),
        (Qwen3MoeTopKRouter(config(norm_topk_prob=True)), Routing(2, first=False, whole=False)),
        (Qwen3MoeTopKRouter(config(norm_topk_prob=False)), Routing(2, first=True, whole=False)),
        (latents("greedy"), Routing(2, first=True, whole=True, wide=True, scale=1.5)),
        (latents("group_limited_greedy"), Routing(2, True, True, wide=True, scale=1.5, groups=3)),
        (corrected(1, norm=False), Routing(2, True, True, wide=True, scale=1.5, corrected=True)),
        (corrected(2, norm=True), Routing(2, True, True, True, 1.5, groups=2, corrected=True, normed=True)),
        (Sigmoid(config()), None),
    ],
    ids=[
        "gpt-oss",
        "mixtral",
        "qwen3, normed",
        "qwen3",
        "deepseek-v2",
        "deepseek-v2, in groups",
        "deepseek-v3",
        "deepseek-v3, in groups",
        "sigmoid",
    ],
)
def test_which_are_found(router: nn.Module, routing: Routing | None) -> None:
    assert ROUTERS.may_be(type(router))
    assert ROUTERS.key(router) is not None
    assert tried(ROUTERS.form_of, router) == routing


def test_others_are_left_alone() -> None:
    assert not ROUTERS.may_be(nn.Linear)
    router = MixtralTopKRouter(config())
    router.correction = nn.Parameter(torch.zeros(COUNT))
    assert ROUTERS.key(router) is None


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v2", "deepseek-v3"])
def test_when_the_kernel_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = counting(monkeypatch, experts, "route")
    if name == "gpt-oss":
        router = GptOssTopKRouter(config()).to(DEVICE, torch.float16)
    else:
        router = (latents("group_limited_greedy") if name == "deepseek-v2" else corrected(2, norm=True)).to(DEVICE)
    nn.init.normal_(router.weight, std=0.2)
    x = torch.randn(2 * MOST_ROUTED, HIDDEN, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    few = x[:MOST_ROUTED]
    with torch.no_grad():
        expected = router(few)
        with FusedModules(router).installed(), RowProducts().here():
            router(few)  # not captured
            assert launches.count == 0
            with fusing_products():
                router(x)
                assert launches.count == 0
                found = router(few)
                assert launches.count == 1
        router(few)
    assert launches.count == 1
    found, expected = (experts._in_order(*one) for one in (found, expected))
    torch.testing.assert_close(found[0], expected[0], rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=2e-3)
    assert (found[2] == expected[2]).float().mean() > 0.9
