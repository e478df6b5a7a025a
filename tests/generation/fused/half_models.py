"""Models in fp16 whose modules run as kernels, their logits, and counts of launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.kernels.failures import KernelFailedError

from ...tiny_models import tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def half(name: str = "llama-gqa") -> PreTrainedModel:
    """A model in fp16, whose norms have weights other than one."""
    model = tiny_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.4, 0.4, len(parameter)))
    return model.half().to(DEVICE)


def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(3, 13, device=DEVICE).view(2, 5)
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def check_fused(model: PreTrainedModel, *contexts: AbstractContextManager[Any], atol: float = 2e-2) -> None:
    """Require that a model whose modules run as kernels, within these contexts, gives the logits of its own code."""
    expected = logits(model)
    with FusedModules(model).installed(), ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        found = logits(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


class Counted:
    """Counts the launches of a kernel."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.count = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


def counting(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> Counted:
    """Count the launches of a module's kernel from now on."""
    counted = Counted(getattr(module, name))
    monkeypatch.setattr(module, name, counted)
    return counted


def fail(*args: Any, **kwargs: Any) -> Any:
    """A kernel that cannot be launched."""
    raise KernelFailedError("no compiler")
