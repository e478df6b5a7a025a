"""Mixtures of experts within steps: which gates are found, when kernels run, and that captured steps are as exact."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

pytest.importorskip("triton")

import hf_fastdecode as fd
from hf_fastdecode.generation.fused import experts
from hf_fastdecode.generation.fused.experts import Form, LargestOfFew, form_of, key
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.trial import tried
from hf_fastdecode.kernels.experts.config import MOST_OF_AN_EXPERT, Gate
from hf_fastdecode.kernels.pointwise.api import Activation
from hf_fastdecode.kernels.row_products.config import fusing_products

from ...tiny_models import ragged_prompts, tiny_model
from .half_models import DEVICE, Counted, counting, fail, half, logits

CONFIG = SimpleNamespace(
    num_local_experts=4, hidden_size=64, intermediate_size=32, hidden_act="silu", _experts_implementation="grouped_mm"
)


class Limited(MixtralExperts):
    """As of DeepSeek V4."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.swiglu_limit = 2

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=2)) * up.clamp(-2, 2)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            row, place = torch.where(chosen == expert)
            hidden = self._apply_gate(x[row] @ self.gate_up_proj[expert].T)
            out.index_add_(0, row, hidden @ self.down_proj[expert].T * shares[row, place, None])
        return out


class Squared(Limited):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.relu().square() * up


class Normed(Limited):
    """Adds what the kernels do not compute, with the gate of a known form."""

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return nn.functional.normalize(super().forward(x, chosen, shares))


@pytest.mark.parametrize(
    ("of", "form"),
    [
        (MixtralExperts, Form(False, False, Gate(Activation.SILU))),
        (Limited, Form(False, False, Gate(Activation.SILU, limit=2))),
        (Squared, None),
        (Normed, None),
    ],
)
def test_gates(of: type[nn.Module], form: Form | None) -> None:
    module = of(CONFIG)
    assert key(module) is not None
    assert tried(form_of, module) == form


def test_other_modules_are_left_alone() -> None:
    module = MixtralExperts(CONFIG)
    for name, value in (("has_post_expert_norm", True), ("_is_expert_parallel", True), ("has_gate", False)):
        other = deepcopy(module)
        setattr(other, name, value)
        assert key(other) is None
    module.extra = nn.Parameter(torch.ones(3))
    assert key(module) is None
    assert not experts.may_be(nn.Linear)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return counting(monkeypatch, experts, "experts")


def test_an_implementation_that_was_asked_for_runs(launches: Counted) -> None:
    model = half("mixtral-window")
    model.set_experts_implementation("eager")
    with FusedModules(model).installed(), fusing_products():
        logits(model)
        assert launches.count == 0
        model.set_experts_implementation("batched_mm")
        logits(model)
    assert launches.count == 2


def test_products_that_are_left_to_pytorch(launches: Counted) -> None:
    model = half("mixtral-window")
    with FusedModules(model).installed():
        logits(model)
    assert launches.count == 0


def test_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are not captured, unless transformers has changed to another implementation."""
    grouped = counting(monkeypatch, experts, "grouped_experts")
    monkeypatch.setattr(experts, "grouped_refusal", lambda *_: None)
    model = half("mixtral-window")
    expected = logits(model)
    with FusedModules(model).installed():
        found = logits(model)
        assert grouped.count == 2
        model.set_experts_implementation("batched_mm")
        logits(model)
    model.set_experts_implementation("grouped_mm")
    logits(model)
    assert grouped.count == 2
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_many_pairs_keep_the_models_code(launches: Counted) -> None:
    model = half("mixtral-window")
    most = MOST_OF_AN_EXPERT * 4 // 2  # rows, of which each has two of four experts
    x = torch.ones(most + 1, 64, dtype=torch.float16, device=DEVICE)
    block = model.model.layers[0].mlp
    with torch.no_grad(), FusedModules(model).installed(), fusing_products():
        block(x[None])
        assert launches.count == 0
        block(x[None, :most])
    assert launches.count == 1


def test_failed_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half("mixtral-window")
    block, x = model.model.layers[0].mlp, torch.ones(1, 3, 64, dtype=torch.float16, device=DEVICE)
    monkeypatch.setattr(experts, "experts", fail)
    with torch.no_grad():
        expected = block(x)
        with FusedModules(model).installed(), fusing_products():
            torch.testing.assert_close(block(x), expected, rtol=0, atol=0)


def test_routers_look_for_few_of_short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counting(monkeypatch, experts, "largest")
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with LargestOfFew():
        found = [torch.topk(scores, 2), scores.topk(k=2, dim=1), torch.topk(scores, 2, dim=-1, sorted=False)]
        assert counted.count == 3
        others = scores.topk(2, dim=0), scores.topk(2, largest=False), scores[0].topk(2), scores.mT.topk(2)
    assert counted.count == 3
    for one in found:
        assert torch.equal(one.values, scores.topk(2).values)
        assert torch.equal(one.indices, scores.topk(2).indices)
    assert torch.equal(others[0].values, scores.topk(2, dim=0).values)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral-window", "qwen2_moe"])
def test_captured_steps(name: str, launches: Counted) -> None:
    """Logits of captured steps, against fp32, at most twice as far off as those of the model's own code."""
    model = tiny_model(name, hidden_size=256).bfloat16().cuda()
    prompt = {key: value.cuda() for key, value in ragged_prompts(40, 30, 40, shared=20).items()}
    options = {"do_sample": False, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    with fd.enabled(model, mode="graph"):
        found = model.generate(**prompt, **options)
        report = fd.explain(model).last_call
        assert (report.mode, "mixtures of experts" in report.fused) == ("graph", True)
    assert launches.count > 0
    tokens, length = found.sequences, prompt["input_ids"].shape[1]
    mask = torch.cat([prompt["attention_mask"], torch.ones_like(tokens[:, length:])], 1)

    def own(model: Any) -> Tensor:
        with torch.no_grad():
            return model(tokens, attention_mask=mask).logits[:, length - 1 : -1].double()

    def error(logits: Tensor) -> Tensor:
        """Of most tokens: few are sent to other experts, which rounding decides where scores are close."""
        return (logits - exact).norm(dim=-1).median()

    exact = own(deepcopy(model).float())
    assert error(torch.stack(found.logits, 1).double()) <= 2 * error(own(model))
