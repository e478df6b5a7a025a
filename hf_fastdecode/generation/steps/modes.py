"""Choice of the decode mode: eager, or captured in CUDA graphs."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import ref

import torch

from ...cache.shared import SharedContextCache
from ..call_context import CallContext
from ..support import step_arguments
from .capture_failures import Failure, cannot_run, fall_back
from .captures import STEPS, LockHolder, capture_reason, reason_of_call
from .expansion import expand_nodes
from .prefill_passes import PrefillPasses, RowPasses
from .projections import has_projections
from .runners import CapturedSteps, EagerSteps, Steps

StepsMaker = Callable[[SharedContextCache], Steps]


class CallPasses(NamedTuple):
    """How the passes of a call run in its mode.

    Attributes:
        make_steps: Creates the runner of a batch's decode steps.
        prefill: Runs prefill passes by captured graphs; None if they all run eagerly.
        by_rows: The same of first passes of decoders with an encoder.
    """

    make_steps: StepsMaker
    prefill: PrefillPasses | None = None
    by_rows: RowPasses | None = None


# Break-even step count of capturing, summed over the calls of a model (H200, 7B).
_STEPS_THAT_PAY_A_CAPTURE = 64
# The same for captures that serve one call (H200, slim 7B, one row: 0.3 s, and steps of 6 ms where stock takes 41).
_STEPS_THAT_PAY_A_CAPTURE_FOR_ONE_CALL = 16
# Rows usually end before a large max_length.
_MOST_STEPS_EXPECTED = 1024
# Maximum rows for which projections of the same input run concurrently by default.
_FUSED_ROWS = 64


def fused_rows(option: str | bool) -> int:
    """Maximum rows for which captured steps compute projections of the same input concurrently.

    ``auto`` does where it is faster. H200, 7B, sequential and concurrent: 7.65 and 7.37 ms per step of 16 rows, 9.07
    and 9.12 ms of 128.
    """
    if option == "auto":
        return _FUSED_ROWS
    return sys.maxsize if option else 0


@contextmanager
def holding_captures(call: CallContext) -> Iterator[bool]:
    """Context that keeps the model's captures for this call, if its mode needs them; yields whether it does.

    Where they are in use, on this or another process of the model, the mode becomes eager if ``auto`` chose it; a
    forced one waits for another thread, and raises ValueError inside another call of this thread.
    """
    captures, forced = call.state.captures, call.options.needs_capture
    if call.mode == "eager":
        captures.end_ahead(call.scope)
        yield False
        return
    if captures.scope is not None and captures.scope is call.scope:
        before = captures.made
        try:
            yield True
        finally:
            call.report.captures = captures.made - before
        return
    if captures.owner == threading.get_ident():
        if forced:
            raise cannot_run(forced, "it is inside another generate call of this model")
        call.set_mode("eager", "it runs inside another generate call of this model")
        yield False
        return
    holder, before = LockHolder(), captures.made
    try:
        acquired = captures.lock.acquire(holder, wait=forced is not None)
        if call.ranks.all(acquired) == [False]:
            captures.lock.release(holder)
            whose = "another process of the model cannot use its captured steps now"
            call.set_mode("eager", whose if acquired else "another thread is using this model's captured steps")
            yield False
            return
        before = captures.made
        yield True
    finally:
        if captures.lock.holder is holder:
            call.report.captures = captures.made - before
            captures.lock.release(holder)


@contextmanager
def call_passes(call: CallContext) -> Iterator[CallPasses]:
    """Context of prefill and decode steps, in the call's mode; captured ones belong to one call at a time.

    Where a capture that ``auto`` chose fails, steps run eagerly. A forced mode that cannot run raises ValueError.

    Processes that compute the model together allocate a capture's memory, agree, run its first passes and capture:
    where one fails, all do, except within those passes (`PassFailedError`), in which the others wait.
    """
    model, arguments = call.model, step_arguments(call.arguments)

    with_expanded: list[ref[SharedContextCache]] = []  # the caches of earlier waves go before the next one's are made

    def expand(cache: SharedContextCache) -> None:
        """Make keys and values of nodes with latents, for the steps of this call alone."""
        if cache.state.expanded is None and call.ranks.alone:
            expand_nodes(cache)
            with_expanded.append(ref(cache))

    def eager(cache: SharedContextCache) -> Steps:
        expand(cache)
        return EagerSteps(model, cache, arguments, call.ranks)

    captures, structure = call.state.captures, call.structure
    checked = False  # whether earlier captures were checked against the model's state

    def refresh() -> None:
        nonlocal checked
        if not checked:
            captures.refresh(model, structure)
            checked = True

    # `captured` itself, by a reference that ends with the call: a cycle would keep the model until it is collected.
    again: list[Callable[[SharedContextCache, CapturedSteps | None], Steps]] = []

    def captured(cache: SharedContextCache, larger: CapturedSteps | None = None) -> Steps:
        try:
            with call.ranks.together():
                refresh()
            expand(cache)
            most = fused_rows(call.options.fuse_projections)
            return CapturedSteps(model, cache, arguments, captures, structure, again[0], fused_rows=most)
        except Exception as error:
            failure = Failure.of(error)
            if larger is not None and larger.run_with_fewer_rows():
                call.state.log_once(f"steps of fewer rows cannot be captured ({failure.reason})", logging.INFO)
                return larger
            if failure.out_of_memory:
                captures.clear()
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise torch.OutOfMemoryError(str(error)) from error
            what = "decode steps of this model run eagerly: they cannot be captured"
            reason = fall_back(call, what, failure, STEPS, lasts=not failure.unsupported, raises=True)
        call.set_mode("eager", reason)
        return eager(cache)

    again.append(captured)
    try:
        with holding_captures(call) as held:
            if held:
                passes = CallPasses(captured)
                if call.ranks.alone:  # which sizes are captured when is not agreed on between processes
                    fused_tokens = fused_rows(call.options.fuse_projections)
                    prefill = PrefillPasses(call, refresh, fused_tokens)
                    passes = passes._replace(prefill=prefill, by_rows=RowPasses(call, refresh))
                yield passes
                if call.returns_cache:
                    captures.release_states()
            else:
                yield CallPasses(eager)
    finally:
        again.clear()
        for expanded in with_expanded:
            if (cache := expanded()) is not None:
                cache.state.expanded = None


_SIMPLEST_FIRST = ("eager", "graph")


def choose_mode(call: CallContext, new_tokens: int) -> tuple[str, str]:
    """Choose the mode of a call's decode steps, with the reason; raises ValueError if a forced mode cannot run.

    Processes that compute the model together choose the simplest one that any of them would run.
    """
    with call.ranks.together() as offer:
        mode, reason = _choose_mode(call, new_tokens)
        offer.numbers = [_SIMPLEST_FIRST.index(mode)]
    if (simplest := _SIMPLEST_FIRST[offer.numbers[0]]) != mode:
        return simplest, "another process of the model runs them so"
    return mode, reason


def _choose_mode(call: CallContext, new_tokens: int) -> tuple[str, str]:
    model, structure, options, captures = call.model, call.structure, call.options, call.state.captures
    captures.steps_asked += min(new_tokens, _MOST_STEPS_EXPECTED)
    per_call = bool(structure.layout.own)  # whose suffixes are captured in place
    steps, which, pays = captures.steps_asked, "so far", _STEPS_THAT_PAY_A_CAPTURE
    if per_call:
        steps, which = min(new_tokens, _MOST_STEPS_EXPECTED), "of this call"
        pays = _STEPS_THAT_PAY_A_CAPTURE_FOR_ONE_CALL
    if options.mode == "eager":
        return "eager", "mode='eager' was requested"
    reason = structure.kept(
        ("capture", options.backend),
        lambda: capture_reason(model, structure.layout, structure.walk, options.backend),
    ) or reason_of_call(model, step_arguments(call.arguments))
    if reason is not None and (forced := options.needs_capture):
        raise cannot_run(forced, reason)
    if options.fuse_projections is True and not has_projections(model):
        raise cannot_run(
            "fuse_projections=True",
            f"{type(model).__name__} has no projections of one input side by side that are plain linear layers",
        )
    if options.mode != "auto":
        return options.mode, f"mode={options.mode!r} was requested"
    forced = options.needs_capture
    if reason is None and forced is None:
        reason = captures.failure(model.device)
    if reason is not None:
        return "eager", reason
    if steps < pays and forced is None:
        return "eager", f"{steps} steps {which} do not pay for a capture"
    return "graph", f"{steps} steps {which} pay for a capture"
