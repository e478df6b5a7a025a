"""Passes that share rows in half precision: norms, rotary embeddings and gated activations run as kernels."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import hf_fastdecode as fd
from hf_fastdecode.generation.fused import norms, rotary
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.structure import Structure

from ..generation.fused.half_models import DEVICE, counting, half
from .comparison import checkpoint


@pytest.fixture(autouse=True)
def fused_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted on a CPU, where passes would leave them out."""
    monkeypatch.setattr(Structure, "fused", property(lambda self: FusedModules(self._model)))


def gradients(model: nn.Module, ids: Tensor) -> Tensor:
    model.zero_grad()
    found = model(ids, use_cache=False).logits.float().log_softmax(-1)[:, -9:-1].gather(-1, ids[:, -8:, None])
    found.mean().backward()
    return torch.cat([weight.grad.float().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "checkpointed", "reentrant"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_gradients(name: str, reentrant: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Error against fp32 at most twice that of the model's own code, also where layers are recomputed."""
    model = half(name).train()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(3, 90, (4, 40), generator=generator)
    ids = torch.cat([drawn[:1, :32].expand(4, -1), drawn[:, 32:]], 1).to(DEVICE)
    exact = gradients(deepcopy(model).float(), ids)
    if reentrant is not None:
        checkpoint(model, use_reentrant=reentrant)
        model.enable_input_require_grads()
    own = gradients(model, ids)
    launches = [counting(monkeypatch, norms, "rms_norm"), counting(monkeypatch, rotary, "rotate")]
    fd.enable(model, min_saved_tokens=1)
    found = gradients(model, ids)
    assert fd.explain(model).last_forward.computed == 32 + 4 * 8
    assert all(one.count > 0 for one in launches)
    assert (found - exact).norm() <= 2 * (own - exact).norm()
