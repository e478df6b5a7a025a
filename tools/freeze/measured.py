"""Records of calls: digests of tokens and scores, reports, passes, and requests to the host and the device."""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any, Final
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel as Model

import hf_fastdecode as fd
from hf_fastdecode.generation.steps import captured_prefill
from tests.architectures.classes import generating_classes
from tests.architectures.compare import verdict_on
from tests.architectures.processes import verdicts_of
from tests.interpreter import make_faster, merging_two_at_once
from tests.parallel.scenarios import capturing
from tests.tiny_models import seeded

from .calls import Call, calls

PACKAGE: Final = f"{Path(fd.__file__).parent}{os.sep}"
MORE_STEPS: Final = 8
"""By which a call on a GPU is longer, to count what a step does."""
ON_DEVICE: Final = {"launches": "LaunchKernel", "graphs": "GraphLaunch", "waits": "Synchronize", "copies": "Memcpy"}
"""Kinds of requests to CUDA, by a part of the names of its functions."""


class Watch:
    """Counts the package's functions that are called, and passes of one model, while it is entered."""

    def __init__(self, model: Model) -> None:
        self.calls, self.marks, self.files = 0, list[int](), set[str]()
        self._model, self._forward = model, inspect.unwrap(type(model).forward).__code__
        self._counted: dict[CodeType, bool] = {}

    def __enter__(self) -> Watch:
        gc.collect()
        gc.disable()  # finalizers would be counted at any time
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        counted = self._counted.get(code)
        if counted is None:
            counted = code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<"
            self._counted[code] = counted
        if counted:
            self.calls += 1
            self.files.add(code.co_filename)
        elif code is self._forward and frame.f_locals.get("self") is self._model:
            self.marks.append(self.calls)

    def per_layer(self, layers: int | None) -> float | None:
        """The median number of calls from one pass to the next, divided by the layers."""
        between = [after - before for before, after in zip(self.marks, self.marks[1:])]
        return round(median(between) / layers, 2) if between and layers else None


def digest(*values: Any) -> str:
    """A digest of all tensors in the values."""
    found = hashlib.sha256()
    for one in values:
        if isinstance(one, tuple | list):
            found.update(digest(*one).encode())
        elif one is not None:
            found.update(repr((tuple(one.shape), one.dtype)).encode())
            found.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def on_device(run: Callable[[int], Any]) -> dict[str, int]:
    """The number of requests to CUDA in a call, and how many more a call of more steps makes."""
    counts = []
    for more in (0, MORE_STEPS):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            run(more)
        events = [(one.key, one.count) for one in profiled.key_averages() if one.key.startswith("cu")]
        counts.append({kind: sum(n for key, n in events if part in key) for kind, part in ON_DEVICE.items()})
    call, longer = counts
    return call | {f"{kind} of {MORE_STEPS} steps": longer[kind] - call[kind] for kind in call}


def entry(call: Call, device: torch.device, mode: str | None) -> dict[str, Any]:
    """The record of one call."""
    model = call.make()
    if device.type == "cuda":
        model = model.to(device, torch.bfloat16)

    def placed(one: Any) -> Any:
        return one.to(device, model.dtype if one.is_floating_point() else None) if isinstance(one, Tensor) else one

    prompts = call.prompts(model) if callable(call.prompts) else call.prompts
    prompts = {name: placed(one) for name, one in prompts.items()}

    def run(more: int = 0) -> Any:
        given = call.arguments(model) if callable(call.arguments) else call.arguments
        return seeded(lambda: model.generate(**prompts, **given | {"max_new_tokens": given["max_new_tokens"] + more}))

    with fd.enabled(model, **{"min_saved_tokens": 1, **call.options, **({"mode": mode} if mode else {})}):
        with Watch(getattr(model, "get_base_model", lambda: model)()) as watch:  # the model within PEFT's
            outputs = [run() for _ in range(call.times)]
        report = fd.explain(model)
        found: dict[str, Any] = {
            "tokens": digest([one if isinstance(one, Tensor) else one.sequences for one in outputs]),
            **{"report": str(report).splitlines(), "passes": len(watch.marks)},
        }
        if not isinstance(outputs[-1], Tensor):
            names = ("scores", "logits", "sequences_scores", "hidden_states")
            found["scores"] = digest([one.get(name) for one in outputs for name in names])
        if device.type == "cuda":
            found["device"] = on_device(run)
    host = {
        "calls": watch.calls,
        "files": len(watch.files),
        "calls a layer and step": watch.per_layer(report.layer_count),
    }
    return found | {"host": host}


@contextmanager
def uncaptured() -> Iterator[None]:
    """Captured steps run uncaptured here, by interpreted kernels; so do prefill passes, from the first call on."""
    pays = mock.patch.object(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 1, False: 1})
    with capturing(), merging_two_at_once(), pays:
        yield


def measure(classes: list[str] | None = None) -> dict[str, Any]:
    """Entries of all calls by name, what they were made on, and verdicts of `tests.architectures` if asked for.

    Args:
        classes: The classes; all if empty. The verdicts `shared` and `stock` say that tokens are stock's.
    """
    on_gpu, device = torch.cuda.is_available(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "torch": torch.__version__}
    on |= {"transformers": transformers.__version__, "triton": str(find_spec("triton") is not None)}
    on["device"] = torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability()
    found: dict[str, Any] = {"made on": on}
    torch.set_num_threads(1)  # sums of several threads may differ
    make_faster()
    for name, call in calls().items():
        for mode in ("eager", "graph") if on_gpu else (call.options.get("mode"),):
            key = f"{name}, {mode}" if on_gpu else name
            print(key, file=sys.stderr, flush=True)
            try:
                with uncaptured() if mode == "graph" and not on_gpu else nullcontext():
                    found[key] = entry(call, device, mode)
            except ModuleNotFoundError as error:
                print(f"left out: {error}", file=sys.stderr)
            except Exception as error:  # as where a forced mode cannot run
                found[key] = {"error": f"{type(error).__name__}: {error}"}
    if classes is not None:
        for name, verdict, _ in verdicts_of(classes or list(generating_classes()), verdict_on):
            found[f"architectures: {name}"] = asdict(verdict)
    return found
