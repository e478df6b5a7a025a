"""Sums that wait for the norm behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton")

from hf_fastdecode.generation.fused import norms
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.norms import WaitingSums, waiting_sums
from hf_fastdecode.generation.steps.graph_capture import FusedProjections
from hf_fastdecode.kernels.experts.api import ExpertSums, Norm
from hf_fastdecode.kernels.failures import KernelFailedError

from ...tiny_models import ONE_OF_EACH_TYPE
from .half_models import DEVICE, half, logits


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each norm that ran as a kernel, whether it took a sum along."""
    seen = []
    run = norms.rms_norm

    def recorded(x: Tensor, weight: Tensor, eps: float, form: object, plus: object = None) -> Tensor:
        seen.append(plus is not None)
        return run(x, weight, eps=eps, form=form, plus=plus)

    monkeypatch.setattr(norms, "rms_norm", recorded)
    return seen


def test_taken_along(taken: list[bool]) -> None:
    """All norms of a Llama but the first follow a sum."""
    model = half()
    with FusedModules(model).installed():
        expected = logits(model)
        taken.clear()
        with WaitingSums():
            found = logits(model)
    assert torch.equal(found, expected)
    assert taken == [False, True, True, True, True]


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE)
def test_same_logits(name: str) -> None:
    model = half(name)
    fused = FusedModules(model)
    with fused.installed():
        expected = logits(model)
        with torch.no_grad(), FusedProjections(model), WaitingSums():
            assert torch.equal(logits(model), expected)


def test_every_other_operation_sees_the_sum() -> None:
    first, second = random(1, 2, 8), random(2, 2, 8)
    expected = first + second
    uses = {
        "a function": lambda total: total * 1,
        "a list": lambda total: torch.stack([first, total])[1],
        "a keyword": lambda total: torch.add(input=total, other=torch.zeros_like(first)),
        "in place": lambda total: total.mul_(1),
        "memory": lambda total: total if total.data_ptr() else None,
        "another sum": lambda total: (total + second) - second,
        "an attribute": lambda total: total.T.T.clone(),
        "nothing": lambda total: total,
    }
    for name, use in uses.items():
        with torch.no_grad(), WaitingSums():
            total = first + second
            assert total.shape == (2, 8)
            found = use(total)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 if name == "another sum" else 0)


def expert_sums() -> ExpertSums:
    products, shares = random(1, 6, 8).float(), random(2, 2, 3).softmax(-1)
    chosen = torch.tensor([[0, 1, 2], [3, 1, 0]], device=DEVICE)
    return ExpertSums(products, chosen, shares, 4, torch.empty(2, 8, dtype=torch.float16, device=DEVICE))


def test_every_other_operation_sees_the_sums_of_experts() -> None:
    addend, sums = random(3, 1, 2, 8), expert_sums()
    expected = sums.added_up().clone().view(1, 2, 8)
    uses = {
        "a function": lambda rows: rows.view(1, 2, 8) * 1,
        "a view of other columns": lambda rows: rows.view(-1).clone().reshape(1, 2, 8),
        "an older view": lambda rows: (rows.reshape(1, 2, 8), rows.clone().view(1, 2, 8))[1],
        "both terms": lambda rows: (rows + rows).view(1, 2, 8) / 2,
        "a sum that is used": lambda rows: (rows.view(1, 2, 8), (addend + rows.view(1, 2, 8)).mul(1) - addend)[1],
        "a sum, and what was added": lambda rows: (view := rows.view(1, 2, 8), addend + view, view.clone())[2],
        "nothing": lambda rows: rows.view(1, 2, 8),
    }
    for name, use in uses.items():
        with torch.no_grad(), WaitingSums() as waiting:
            found = use(waiting.leave(sums._replace(out=torch.full_like(sums.out, torch.nan))))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 if name == "a sum that is used" else 0)


@pytest.mark.parametrize("first", [False, True])
def test_sums_of_experts_that_a_norm_takes_along(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those whose kernel fails then, and later fails again."""
    norm, addend, sums = LlamaRMSNorm(8).half().to(DEVICE), random(3, 1, 2, 8), expert_sums()
    rows = sums.added_up().clone().view(1, 2, 8)
    given: list[Norm | None] = []
    added_up = ExpertSums.added_up

    def fail_at(failing: int) -> Callable[..., Tensor]:
        def run(self: ExpertSums, norm: Norm | None = None) -> Tensor:
            given.append(norm)
            if len(given) >= failing:
                raise KernelFailedError
            return added_up(self, norm)

        return run

    module = nn.ModuleList([norm])
    for failing, calls in ((3, 1), (1, 2)):
        given.clear()
        monkeypatch.setattr(ExpertSums, "added_up", fail_at(failing))
        with torch.no_grad(), FusedModules(module).installed(), WaitingSums() as waiting:
            left = waiting.leave(sums._replace(out=torch.full_like(sums.out, torch.nan))).view(1, 2, 8)
            total = left + addend if first else addend + left
            found = norm(total)
        assert len(given) == calls
        assert given[0] is not None
        torch.testing.assert_close(left, rows, rtol=1e-3, atol=1e-3)
        assert torch.equal(total, left + addend)
        torch.testing.assert_close(found, norm(total), rtol=2e-3, atol=0)


def test_changed_terms() -> None:
    """A term that is changed in place afterwards counts with what it was."""
    first, second = random(1, 2, 8), random(2, 2, 8)
    expected = first + second
    with torch.no_grad(), WaitingSums():
        total = first + second
        first.zero_()
    assert torch.equal(total, expected)


@pytest.mark.parametrize("other", [random(3, 8), random(3, 2, 8).float(), 2, random(3, 8, 2).T, "gradients"])
def test_sums_that_do_not_wait(other: Any) -> None:
    first = random(1, 2, 8)
    with torch.set_grad_enabled(isinstance(other, str)), WaitingSums() as sums:
        second = random(2, 2, 8).requires_grad_() if isinstance(other, str) else other
        total = first + second
        assert not sums.waits(total)
    assert torch.equal(total, first + second)


def test_error_within() -> None:
    """The sum is computed, and later ones do not wait."""
    first, second = random(1, 2, 8), random(2, 2, 8)
    totals = []

    def fail() -> None:
        with torch.no_grad(), WaitingSums():
            totals.append(first + second)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(totals[0], first + second)
    assert waiting_sums() is None
