"""Which way a call's decode steps run: eagerly, by captured graphs, or by captured graphs of compiled layers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.shared import SharedContextCache
from .capture import Captures, capture_reason
from .compiled import decoder_layers
from .options import Options
from .report import CallReport
from .reuse import ReusedPrefixes
from .steps import CapturedSteps, EagerSteps, Steps

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

    def tell_once(self, message: str, level: int = logging.WARNING) -> None: ...


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
    captures, configs, forced = state.captures, configs_of(model), state.options.mode != "auto"
    if captures.owner == threading.get_ident():
        if forced:
            raise ValueError(f"mode={call.mode!r} cannot run inside another generate call; use mode='auto'")
        call.mode, call.mode_reason = "eager", "it runs inside another generate call of this model"
        yield eager
        return
    if not captures.lock.acquire(blocking=forced):
        call.mode, call.mode_reason = "eager", "another thread decodes with this model's captured steps"
        yield eager
        return

    checked = False  # whether what was captured before is still of this model

    def captured(cache: SharedContextCache, of_more: CapturedSteps | None = None) -> Steps:
        nonlocal checked
        compiled = call.mode == "compile"
        try:
            if not checked:
                captures.refresh(model, configs)
                checked = True
            return CapturedSteps(model, cache, arguments, captures, configs, captured, compiled=compiled)
        except Exception as error:  # no memory, or whatever a model does that a capture forbids
            if of_more is not None and of_more.go_on():
                state.tell_once(f"steps of fewer rows cannot be captured ({error})", logging.INFO)
                return of_more
            if isinstance(error, torch.OutOfMemoryError):
                captures.clear()
                raise
            if forced:
                raise ValueError(f"mode={call.mode!r} cannot run: {error}; use mode='auto'") from error
            captures.failure = str(error).splitlines()[0] if str(error) else type(error).__name__
        state.tell_once(f"decode steps of this model run eagerly: they cannot be captured ({captures.failure})")
        call.mode, call.mode_reason = "eager", captures.failure
        return eager(cache)

    before, captures.owner = captures.count, threading.get_ident()
    try:
        yield captured
    finally:
        call.captures = captures.count - before
        captures.owner = None
        captures.lock.release()


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
    if options.mode != "auto":
        if reason is not None:
            raise ValueError(f"mode={options.mode!r} cannot run: {reason}; use mode='auto'")
        return options.mode, f"mode={options.mode!r} was asked for"
    if reason is None:
        reason = captures.failure
    if reason is not None:
        return "eager", reason
    if captures.steps_asked < _STEPS_THAT_PAY_A_CAPTURE:
        return "eager", f"{captures.steps_asked} steps so far do not pay for a capture"
    if captures.steps_asked >= _STEPS_THAT_PAY_A_COMPILATION and decoder_layers(model):
        return "compile", f"{captures.steps_asked} steps so far pay for compiling the layers"
    return "graph", f"{captures.steps_asked} steps so far pay for a capture"
