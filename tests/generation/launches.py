"""Launches where kernels are interpreted: of a captured step, in order, and the variants that Triton would compile."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.generation.fused import gated
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.steps import graph_capture, modes
from hf_fastdecode.generation.structure import Structure
from hf_fastdecode.kernels import ahead
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


class Variants:
    """Kernels as Triton would compile them, of launches that are left out, but for those that draw tokens.

    Attributes:
        seen: Of each, its name and what it is compiled for.
    """

    everything = True  # for `compiled_ahead`

    def __init__(self) -> None:
        self.seen = set[tuple[Any, ...]]()

    @contextmanager
    def new(self) -> Iterator[list[str]]:
        """Within, launches are left out; at the end, the names of the variants that had not been seen, in order."""
        before, names = set(self.seen), list[str]()
        token = ahead._left_out.set(self)  # type: ignore[arg-type]
        try:
            yield names
        finally:
            ahead._left_out.reset(token)
            names += sorted(variant[0] for variant in self.seen - before)

    def covers(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        signature = inspect.signature(kernel.fn)
        given = signature.bind(*arguments, **{name: options[name] for name in options if name in signature.parameters})
        parts = {name: self._specialized(kernel.kwargs, name, value) for name, value in given.arguments.items()}
        launched = {name: value for name, value in options.items() if name not in parts}
        self.seen.add((kernel.__name__, *parts.items(), *sorted(launched.items())))
        return kernel.__name__ != "sample_rows"

    @staticmethod
    def _specialized(kernel: dict[str, Any], name: str, value: Any) -> Any:
        """What a variant knows of an argument."""
        whole, aligned = (name not in (kernel[f"do_not_specialize{on}"] or ()) for on in ("", "_on_alignment"))
        if isinstance(value, Tensor):
            return value.dtype, whole and aligned and value.data_ptr() % 16 == 0
        if isinstance(value, int) and name.islower():  # names of compile-time arguments are in capitals
            return value.bit_length() > 31, whole and value == 1, whole and aligned and value % 16 == 0
        return type(value) if isinstance(value, float) else value
