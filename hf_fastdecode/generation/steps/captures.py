"""The captured steps and passes of a model, kept between calls, and why there may be none."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.forest import Forest
from ...cache.captured import storages_in_place
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ...kernels.failures import Kernel, failure
from ..foreign_code import is_capturable, splits_module
from ..identity import captured_state
from ..instance_patch import own_method
from ..model_walk import ModelWalk
from ..structure import Structure
from .capture_memory import free_memory, free_workspaces
from .captured_prefill import CapturedPrefill, CapturedPrefills, PrefillShape
from .compiled_layers import CompiledLayers
from .cuda_graph import CapturedStep, CaptureOptions, bucket

_MOST_STEPS = 32
"""Maximum captured steps kept per model; up to 1,024 rows there are 18 sizes, the small ones in two variants."""


class Captures:
    """The captured steps and prefill passes of one model.

    One call at a time uses them and holds `lock` until it ends. Concurrent calls run eagerly in ``mode="auto"``,
    and wait in forced modes. The 32 most recently used steps are kept. They share one memory pool, including logits,
    so together they hold a few times the memory of the largest one.

    Attributes:
        owner: The thread that holds the lock.
        prefills: The captured prefill passes.
        count: Number of steps captured.
        steps_asked: Steps requested by the model's calls so far, including the current one.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.compiled = CompiledLayers()
        self.prefills = CapturedPrefills()
        self.count = 0
        self.steps_asked = 0
        self.own_nodes_failure: str | None = None  # why steps for long completions could not be captured
        self.compile_failure: str | None = None  # why layers could not be compiled, where they can be captured
        self.pass_failures: dict[CaptureOptions, str] = {}  # why passes of other loops could not be captured
        self._failure: str | None = None
        self._free = 0  # free memory at the start of the latest call
        self._free_then: int | None = None  # at the start of the call whose capture ran out of memory
        self._steps: list[CapturedStep] = []  # least recently used first
        self._state: Hashable = None
        self._pool: Any = None
        self._has_workspaces = False
        self._gains_by_compiling: bool | None = None  # None if not known

    def __deepcopy__(self, memo: dict[int, Any]) -> Captures:
        return Captures()  # a copy of the model has other weights

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Captures, ()

    @property
    def made(self) -> int:
        """Number of captures made, of every kind."""
        return self.count + self.prefills.count

    def find(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        structure: Structure,
        options: CaptureOptions,
        kind: type[CapturedStep] = CapturedStep,
    ) -> CapturedStep:
        """Get or capture a step for this cache's rows; raises `Unsupported` if the kernels cannot compute it."""
        rows = cache.rows if storages_in_place(cache) else bucket(cache.rows)
        known = self._known(rows, cache, options, kind)
        if structure.ranks.all(known is not None) == [True]:  # a capture runs passes, on all processes of the model
            assert known is not None
            self._steps.remove(known)
            self._steps.append(known)
            return known
        # Inference tensors could not be written outside of the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            pool = self._pool_on(model.device)
            step = kind(model, rows, cache, structure, options, self.compiled, pool)
        # Those of suffixes that have moved go after the capture, which reuses their memory.
        self._steps = [kept for kept in self._steps if not kept.in_place or kept.reads(cache)]
        self._steps.append(step)
        del self._steps[:-_MOST_STEPS]
        self.count += 1
        return step

    def _known(
        self, rows: int, cache: SharedContextCache, options: CaptureOptions, kind: type[CapturedStep]
    ) -> CapturedStep | None:
        for step in self._steps:
            if type(step) is not kind or (step.rows, step.options) != (rows, options):
                continue
            if step.suits(cache) and step.fits(cache):
                return step
        return None

    def capture_prefill(
        self,
        model: PreTrainedModel,
        shape: PrefillShape,
        cache: SharedContextCache,
        forest: Forest | None,
        longest: int,
        structure: Structure,
    ) -> CapturedPrefill:
        """Capture a prefill pass over the cache's current items, and keep it; see `CapturedPrefill`."""
        with torch.inference_mode(False), torch.no_grad():
            pool = self._pool_on(model.device)
            made = CapturedPrefill(model, shape, cache, forest, longest, structure, pool)
        self.prefills.keep(made)
        return made

    def _pool_on(self, device: torch.device) -> Any:
        """The memory pool of all captures; None where nothing is captured."""
        if self._pool is None and device.type == "cuda":
            self._pool, self._has_workspaces = torch.cuda.graph_pool_handle(), True
        return self._pool

    def gains_by_compiling(self, structure: Structure) -> bool:
        """Whether compiled layers are faster than captured ones: not where kernels do what compilers would fuse.

        Modules are tried once for all calls, until the model changes.
        """
        if self._gains_by_compiling is None:
            self._gains_by_compiling = structure.fused is None or not structure.fused.of_every_kind
        return self._gains_by_compiling

    def sizes(self, options: CaptureOptions, *, own_dominate: bool) -> set[int]:
        """Numbers of rows of the kept steps with these options and launch parameters."""
        kept = (step for step in self._steps if type(step) is CapturedStep and step.options == options)
        return {step.rows for step in kept if step.tables.own_nodes_dominate == own_dominate}

    def refresh(self, model: PreTrainedModel, configs: list[PreTrainedConfig], walk: ModelWalk) -> None:
        """Drop all captures if the weights, modules or configs have changed."""
        state = captured_state(model, configs, walk)
        if state != self._state:
            self.clear()
            self._state = state

    def fail(self, reason: str, *, of_memory: bool) -> None:
        """Record why a capture failed, and whether it ran out of memory."""
        self._failure, self._free_then = reason, self._free if of_memory else None

    def failure(self, device: torch.device) -> str | None:
        """Why a capture failed. Reset by `retry`, or for lack of memory when a call starts with more of it."""
        self._free = free_memory(device)
        if self._free_then is not None and self._free > self._free_then:
            self.retry()
        return self._failure

    def retry(self) -> None:
        """Reset the recorded failures."""
        self._failure = self._free_then = self.own_nodes_failure = self.compile_failure = None
        self.prefills.failures.clear()
        self.pass_failures = {}

    def clear(self) -> None:
        """Drop all captures and their memory."""
        self._steps, self._pool, self._state, self._gains_by_compiling = [], None, None, None
        self.prefills.clear()
        self.retry()

    def release(self) -> None:
        """Drop all captures and free their device memory where possible. Never raises."""
        self.clear()
        self.compiled = CompiledLayers()
        if self._has_workspaces:
            self._has_workspaces = False
            with suppress(RuntimeError):  # reported late for an earlier failed kernel
                free_workspaces()


def capture_reason(
    model: PreTrainedModel, layout: ModelLayout, walk: ModelWalk, backend: str, arguments: dict[str, Any]
) -> str | None:
    """Why this model's steps cannot be captured, or None if no reason is known."""
    reasons = (layer.no_captured_steps for layer in layout.own.values())
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    devices = {parameter.device for parameter in walk.parameters}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"the model must be on one CUDA device, got {', '.join(sorted(map(str, devices)))}"
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels take float16 and bfloat16, got {model.dtype}"
    if backend not in ("auto", "triton"):
        return f"backend={backend!r} was requested"
    if torch.is_autocast_enabled(model.device.type):  # its weight casts would be kept beyond the graph's replay
        return "torch.autocast is active around the call"
    for module in walk.with_code:
        own = None if module is model else own_method(module, "forward")
        if own is not None and not splits_module(own):
            return f"{type(module).__name__} carries a forward of its own, which may change between calls"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(is_capturable, hooks)) or hasattr(module, "_hf_hook"):
            return f"{type(module).__name__} has forward hooks, which a captured step would not call"
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            return f"the argument {name!r} is a tensor"
    return failure(Kernel.FOREST, model.device)
