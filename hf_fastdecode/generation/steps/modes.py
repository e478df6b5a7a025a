"""Which way a call's decode steps run: eagerly, by captured graphs, or by captured graphs of compiled layers."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...cache.shared import SharedContextCache
from ..options import Options
from ..prompts.kept_prefixes import ReusedPrefixes
from ..report import CallReport
from .compiled_layers import decoder_layers
from .cuda_graph import Captures, capture_reason
from .projections import has_projections
from .runners import CapturedSteps, EagerSteps, Steps

StepsMaker = Callable[[SharedContextCache], Steps]

# A capture takes about as long as this many eager steps lose to captured ones, a compilation as long as so many
# captured steps lose to compiled ones (H200, 7B; both counted over the calls of a model).
_STEPS_THAT_PAY_A_CAPTURE = 64
_STEPS_THAT_PAY_A_COMPILATION = 4096
# A bound on the length says little about where rows end.
_MOST_STEPS_EXPECTED = 1024


class State(Protocol):
    """What of an enabled model's state decoding needs."""

    options: Options
    captures: Captures
    reused: ReusedPrefixes

    def log_once(self, message: str, level: int = logging.WARNING) -> None: ...


def _fused_rows(option: str | bool, *, compiled: bool) -> int:
    """Most rows of a captured step that computes projections of one input concurrently.

    With ``auto`` where it gains. H200, 7B, one by one and concurrently: 7.65 and 7.37 ms a step of 16 rows, 9.07 and
    9.12 of 128; compiled, 4.94 and 4.95 of 16.
    """
    if option == "auto":
        return 0 if compiled else 64
    return sys.maxsize if option else 0


@contextmanager
def steps_maker(
    model: PreTrainedModel, state: State, call: CallReport, arguments: dict[str, Any]
) -> Iterator[StepsMaker]:
    """Within, the function makes what runs the decode steps of a cache's rows, in the mode that the report names.

    Args:
        model: The model.
        state: Its options and captures.
        call: The report, with the mode chosen; what becomes of it is filled in.
        arguments: What the model's forward takes beside tokens, positions and cache.

    Raises:
        ValueError: The mode that the options force cannot run.
    """

    def eager(cache: SharedContextCache) -> Steps:
        return EagerSteps(model, cache, arguments)

    if call.mode == "eager":
        yield eager
        return
    captures, configs, forced = state.captures, configs_of(model), state.options.needs_capture
    if captures.owner == threading.get_ident():
        if forced:
            raise _cannot_run(forced, "it is inside another generate call of this model")
        call.mode, call.mode_reason = "eager", "it runs inside another generate call of this model"
        yield eager
        return
    if not captures.lock.acquire(blocking=forced is not None):
        call.mode, call.mode_reason = "eager", "another thread decodes with this model's captured steps"
        yield eager
        return

    checked = False  # whether what was captured before is still of this model

    def captured(cache: SharedContextCache, larger: CapturedSteps | None = None) -> Steps:
        nonlocal checked
        compiled = call.mode == "compile"
        fused_rows = _fused_rows(state.options.fuse_projections, compiled=compiled)
        try:
            if not checked:
                captures.refresh(model, configs)
                checked = True
            return CapturedSteps(
                model, cache, arguments, captures, configs, captured, compiled=compiled, fused_rows=fused_rows
            )
        except Exception as error:  # no memory, or whatever a model does that a capture forbids
            if larger is not None and larger.run_with_fewer_rows():
                state.log_once(f"steps of fewer rows cannot be captured ({error})", logging.INFO)
                return larger
            if _ran_out_of_memory(error):
                captures.clear()
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise torch.OutOfMemoryError(str(error)) from error
            if forced:
                raise _cannot_run(forced, str(error)) from error
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        captures.fail(reason, of_memory=_is_memory_failure(reason))
        state.log_once(f"decode steps of this model run eagerly: they cannot be captured ({reason})")
        call.mode, call.mode_reason = "eager", reason
        return eager(cache)

    before, captures.owner = captures.count, threading.get_ident()
    try:
        yield captured
    finally:
        call.captures = captures.count - before
        captures.owner = None
        captures.lock.release()


def _cannot_run(forced: str, reason: str) -> ValueError:
    return ValueError(f"{forced} cannot run: {reason}; use {forced.partition('=')[0]}='auto'")


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is of PyTorch's allocator: ending a capture that ran out of memory raises another over it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_memory_failure(reason: str) -> bool:
    """Whether CUDA or cuBLAS, which allocate for themselves, found too little memory."""
    return "out of memory" in reason or "ALLOC_FAILED" in reason


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The distinct config objects of the model and its modules."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if isinstance(config, PreTrainedConfig)]


def choose_mode(model: PreTrainedModel, state: State, arguments: dict[str, Any], new_tokens: int) -> tuple[str, str]:
    """How a call's decode steps run, and why.

    Args:
        model: The model.
        state: Its options and captures.
        arguments: What the model's forward takes beside tokens, positions and cache.
        new_tokens: Most tokens that a row will draw.

    Raises:
        ValueError: The mode that the options force cannot run.
    """
    options, captures = state.options, state.captures
    captures.steps_asked += min(new_tokens, _MOST_STEPS_EXPECTED)
    if options.mode == "eager":
        return "eager", "mode='eager' was asked for"
    reason = capture_reason(model, options.backend, arguments)
    if options.mode == "compile" and reason is None and not decoder_layers(model):
        reason = f"{type(model).__name__} has no list of decoder layers to compile"
    if reason is not None and (forced := options.needs_capture):
        raise _cannot_run(forced, reason)
    if options.fuse_projections is True and not has_projections(model):
        raise _cannot_run(
            "fuse_projections=True", f"{type(model).__name__} has no projections of one input side by side"
        )
    if options.mode != "auto":
        return options.mode, f"mode={options.mode!r} was asked for"
    forced = options.needs_capture
    if reason is None and forced is None:
        reason = captures.failure(model.device)
    if reason is not None:
        return "eager", reason
    if captures.steps_asked < _STEPS_THAT_PAY_A_CAPTURE and forced is None:
        return "eager", f"{captures.steps_asked} steps so far do not pay for a capture"
    if captures.steps_asked >= _STEPS_THAT_PAY_A_COMPILATION and decoder_layers(model):
        return "compile", f"{captures.steps_asked} steps so far pay for compiling the layers"
    return "graph", f"{captures.steps_asked} steps so far pay for a capture"
