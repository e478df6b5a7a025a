"""Decode modes: the choice of one for a call, and the runners of its steps, eager or by captured graphs."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.forest import Path
from ...attention.launch import plan as own_nodes
from ...attention.overrides import autocast_dtype
from ...cache.shared import SharedContextCache
from ...kernels.device import free_memory
from ...log import logger
from ...parallel.ranks import ALONE, Ranks
from ..autocast import computes_in
from ..call_context import CallContext
from ..forward_pass import forward_pass
from ..routing.choices import Recorder
from ..structure import Structure
from ..support import step_arguments
from .captured_step import CaptureOptions, bucket
from .captures import LONG_COMPLETIONS, STEPS, Captures, LockHolder, capture_reason, reason_of_call
from .graph_capture import has_projections
from .prefill_passes import Failure, PrefillPasses, RowPasses, cannot_run, fall_back

_STEPS_OF_A_CAPTURE = 8
"""Approximate cost of a capture within a call, in steps of 128 rows (H200, 8B: 80 ms)."""

_STEPS_THAT_PAY_A_RECAPTURE = 512
"""Steps with launch parameters for own nodes that save a capture's 80 ms (H200: 0.3 to 0.7 ms each)."""

_ROWS_OF_A_STEP = 256
"""Fixed cost of a step, in rows of arithmetic (H200, 7B)."""


class Steps(Protocol):
    """Runs the decode steps of one batch."""

    cache: SharedContextCache

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append a token to each row, by ids and positions ``[rows]`` int64.

        Returns ``[rows, vocabulary]`` in the model's dtype; the next step may overwrite it.
        """
        ...

    def select(self, rows: list[int]) -> Steps:
        """Compact the batch to these rows and return the runner for it.

        Raises `NoRoomError` on all processes of the model where memory of one does not suffice for the copies.
        """
        ...

    def restart(self, paths: Mapping[int, Path], order: list[int] | None = None) -> Steps:
        """Begin rows anew after their paths, by row, and return the runner for the batch.

        Args:
            order: When given, row ``i`` then becomes row ``order[i]``, for rows of one path to be neighbours.
        """
        ...

    def should_compact(self, rows: int, steps_left: int) -> bool:
        """Whether to compact to `rows` active rows, with at most `steps_left` steps to go."""
        ...


class EagerSteps:
    """Runs steps by the model's eager forward pass, with model arguments beyond tokens, positions and cache."""

    def __init__(
        self, model: PreTrainedModel, cache: SharedContextCache, arguments: dict[str, Any], ranks: Ranks = ALONE
    ):
        self.model, self.cache, self.arguments, self.ranks = model, cache, arguments, ranks

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.feed(ids[:, None], positions[:, None])

    def feed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append several tokens ``[rows, tokens]`` per row; returns the logits after the last one."""
        device = self.model.device
        if device.type != "meta" and ids.device != device:  # prompts may be on the CPU
            ids, positions = ids.to(device), positions.to(device)
        output = forward_pass(self.model, self.cache, positions, input_ids=ids, return_dict=True, **self.arguments)
        return output.logits[:, -1]

    def select(self, rows: list[int]) -> Steps:
        with self.ranks.together():
            self.cache.select_rows(rows)
        return self

    def restart(self, paths: Mapping[int, Path], order: list[int] | None = None) -> Steps:
        self.cache.restart_rows(paths)
        return self if order is None else self.select(order)

    def should_compact(self, rows: int, steps_left: int) -> bool:
        return rows <= 3 * self.cache.rows // 4


class CapturedSteps:
    """Runs steps by captured graphs, one per bucket of rows.

    Args:
        arguments: Model arguments beyond tokens, positions and cache.
        remake: Creates the runner of a batch that was compacted, or whose storage moved. For a compacted batch that
            cannot be captured, it returns the given larger runner if that can go on.
        fused_rows: Maximum rows for which projections of the same input run concurrently.
        recorder: Gets what routers choose.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        arguments: dict[str, Any],
        captures: Captures,
        structure: Structure,
        remake: Callable[[SharedContextCache, CapturedSteps | None], Steps],
        *,
        fused_rows: int,
        recorder: Recorder | None = None,
    ):
        self.cache, self._recorder = cache, recorder
        self._model, self._structure, self._captures, self._remake = model, structure, captures, remake
        given = tuple(sorted(arguments.items()))
        autocast = autocast_dtype(model.device)
        self._options = CaptureOptions(fused_rows, given, records=recorder is not None, autocast=autocast)
        self._oversized = False
        self._instead: Steps | None = None  # where a capture in mid-call failed
        with structure.ranks.together():
            cache.reserve(cache.suffix_length + 1)
        self._step = captures.find(model, cache, structure, self._options)
        report_captured(cache, structure)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self._instead is None:
            self.cache.reserve(self.cache.suffix_length + 1)
            if not self._step.reads(self.cache):
                self._follow_storage()
        if self._instead is not None:
            return self._instead(ids, positions)
        if self.cache.suffix_length % own_nodes.STEP == 0 and self._should_recapture():
            self._recapture()
        logits = self._step(self.cache, ids, positions)
        if self._recorder is not None and self._step.chosen is not None:
            self._recorder.take_step(self.cache.suffix_length, self._step.chosen.clone())
        self.cache.record_captured_step(ids[:, None])
        return logits

    def _should_recapture(self) -> bool:
        """Whether a capture with launch parameters for long completions saves more time than it costs."""
        if self._oversized or self._step.suits(self.cache):
            return False
        if (self.cache.state.max_suffix or 0) - self.cache.suffix_length < _STEPS_THAT_PAY_A_RECAPTURE:
            return False
        # A process forgets failures when it has more free memory than it had then.
        return self._structure.ranks.all(LONG_COMPLETIONS not in self._captures.failures) == [True]

    def _recapture(self) -> None:
        """Capture again; where that fails, go on with this capture."""
        try:
            self._step = self._captures.find(self._model, self.cache, self._structure, self._options)
        except Exception as error:
            reason = Failure.of(error).reason
            self._captures.failures[LONG_COMPLETIONS] = reason
            logger.info("steps for long completions cannot be captured (%s); the captured ones go on", reason)

    def _follow_storage(self) -> None:
        """Capture again after suffixes that were captured in place have moved."""
        made = self._remake(self.cache, None)
        if isinstance(made, CapturedSteps):
            self._step = made._step
        else:
            self._instead = made

    def select(self, rows: list[int]) -> Steps:
        if self._instead is not None:
            return self._instead.select(rows)
        with self._structure.ranks.together():
            self.cache.select_rows(rows)
        return self._remake(self.cache, self)

    def restart(self, paths: Mapping[int, Path], order: list[int] | None = None) -> Steps:
        if self._instead is not None:
            return self._instead.restart(paths, order)
        self.cache.restart_rows(paths)
        if order is not None:
            self.cache.select_rows(order)
        # Suffixes that were captured in place and have moved are followed by the next step.
        return self if self._step.holds(self.cache) else self._remake(self.cache, self)

    def run_with_fewer_rows(self) -> bool:
        """Keep this larger capture for a compacted batch that cannot be captured; whether it fits on all processes."""
        if self._structure.ranks.all(self._step.fits(self.cache)) == [False]:
            return False
        self._oversized = True
        return True

    def should_compact(self, rows: int, steps_left: int) -> bool:
        if self._instead is not None:
            return self._instead.should_compact(rows, steps_left)
        known = self._captures.sizes(self._options, own_dominate=self._step.tables.own_nodes_dominate)
        pay = switch_saves_time(self._step.rows, bucket(rows), steps_left, known)
        return pay and not self._oversized


def report_captured(cache: SharedContextCache, structure: Structure) -> None:
    """Report the operators of a captured step for each layer."""
    for layer in cache.attention_layers:
        nodes, own = f"{len(cache.step_forest.nodes)} node(s)", structure.layout.own.get(layer.index)
        did = f"{nodes} and {cache.rows} suffixes by triton, captured"
        if own is not None:
            did = f"{nodes} by triton, {own.suffixes_read}, captured"
        layer.report("decode", did)
        layer.ran_for = None  # an eager step reports anew


def switch_saves_time(current: int, smaller: int, steps_left: int, known: Set[int]) -> bool:
    """Whether switching to a smaller captured step, one of the `known` sizes or a new one, saves time."""
    if smaller >= current or smaller in known:
        return smaller < current
    return steps_left * (current - smaller) > _STEPS_OF_A_CAPTURE * (128 + _ROWS_OF_A_STEP)


StepsMaker = Callable[[SharedContextCache], Steps]


class CallPasses(NamedTuple):
    """How the passes of a call run in its mode: steps, and captured prefill, packed or by rows, if there is any."""

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
        if cache.state.expanded is None and call.alone:
            cache.state.expand(cache.attention_layers, free_memory)
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
            with call.together():
                refresh()
            expand(cache)
            most = fused_rows(call.options.fuse_projections)
            options: dict[str, Any] = {"fused_rows": most, "recorder": call.recorder}
            return CapturedSteps(model, cache, arguments, captures, structure, again[0], **options)
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
                if call.alone and call.recorder is None:  # which sizes are captured when is not agreed on
                    fused_tokens = fused_rows(call.options.fuse_projections)
                    prefill = PrefillPasses(call, refresh, fused_tokens)
                    passes = passes._replace(prefill=prefill, by_rows=RowPasses(call, refresh))
                yield passes
                if call.returns_cache:
                    captures.release_buffers()
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
    with call.together() as offer:
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
        ("capture", options.backend, autocast_dtype(model.device)),
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
        return options.mode, f"mode={options.mode!r} was requested{_casts(model)}"
    forced = options.needs_capture
    if reason is None and forced is None:
        reason = captures.failure(model.device)
    if reason is not None:
        return "eager", reason
    if steps < pays and forced is None:
        return "eager", f"{steps} steps {which} do not pay for a capture"
    return "graph", f"{steps} steps {which} pay for a capture{_casts(model)}"


def _casts(model: PreTrainedModel) -> str:
    """What a captured step does beside reading weights, for the reason of its mode."""
    stored, computed = (str(dtype).removeprefix("torch.") for dtype in (model.dtype, computes_in(model)))
    return "" if stored == computed else f"; each step casts {stored} weights to {computed}"
