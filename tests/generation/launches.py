"""Launches of a captured step, where kernels are interpreted: PyTorch's operators and Triton's, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.generation.fused import gated
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.steps import graph_capture, modes
from hf_fastdecode.generation.structure import Structure
from hf_fastdecode.kernels.device import MOST_COUNTERS
from hf_fastdecode.kernels.limits import HALF_PRECISION

_WITHOUT_LAUNCH = {
    *("view", "_unsafe_view", "expand", "transpose", "t", "permute", "slice", "select", "split", "split_with_sizes"),
    *("unsqueeze", "squeeze", "alias", "detach", "as_strided", "_reshape_alias", "unbind", "view_as_real"),
    *("view_as_complex", "empty", "empty_like", "empty_strided", "new_empty", "unfold"),
}


class _Launches(TorchDispatchMode):
    """Lists launches within, but for those of a kernel's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if not self._inside and name not in _WITHOUT_LAUNCH:
            self.found.append(name)
        return function(*args, **(kwargs or {}))

    @contextmanager
    def counting_kernels(self) -> Iterator[None]:
        from triton.runtime.interpreter import GridExecutor

        run = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.found.append(executor.fn.__name__)
            self._inside = True
            try:
                return run(executor, *args, **kwargs)
            finally:
                self._inside = False

        with patch.object(GridExecutor, "__call__", launch), self:
            yield


def fuse_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modules and products of captured steps run as on a Hopper GPU."""

    def refusal(inputs: Any, weights: Any, biases: Any) -> str | None:
        rows, width = inputs.shape[:-1].numel(), inputs.shape[-1]
        served = all(part.dtype == inputs.dtype in HALF_PRECISION for part in weights)
        return None if served and rows <= 32 and width % 64 == 0 and len(weights) <= 3 else "as on a GPU"

    fused = cached_property(lambda self: FusedModules(self._model, self.walk.modules))
    fused.__set_name__(Structure, "fused")
    monkeypatch.setattr(Structure, "fused", fused)
    monkeypatch.setattr(gated, "refusal", refusal)
    counters = torch.zeros(MOST_COUNTERS, dtype=torch.int32)  # a capture's own
    monkeypatch.setattr(gated.RowProducts, "counters", lambda self, device: counters)
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)


def launches_of_a_step(model: PreTrainedModel, call: dict[str, Any]) -> list[str]:
    """The launches of the last captured step of a call, after `fuse_on_the_cpu`."""
    steps = list[list[str]]()

    def counted(graph: Any) -> Any:
        launches = _Launches()
        with graph._context(), launches.counting_kernels():
            outputs = graph._run()
        steps.append(launches.found)
        return outputs

    counting = patch.object(graph_capture.CapturedGraph, "replay", counted)
    with counting, fd.enabled(model, mode="graph", backend="triton"):
        model.generate(**call)
    return steps[-1]
