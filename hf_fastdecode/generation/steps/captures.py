"""The captured steps and passes of a model, kept between calls, and why there may be none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.overrides import autocast_dtype, own_code_of
from ...cache.captured import storages_in_place
from ...cache.layers.state import StepBuffers
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ...kernels.device import free_memory
from ...kernels.failures import Kernel, failure
from ..autocast import computes_in
from ..foreign_code import is_capturable, is_set_once
from ..interception.switches import own_method
from ..snapshot import ModelWalk, captured_state
from ..structure import Known, Structure
from .captured_prefill import Captured, CapturedPrefill, CapturedPrefills, CapturedRows, PrefillAhead, Scope, size_for
from .captured_step import CapturedStep, CaptureOptions, bucket
from .graph_capture import free_workspaces, used_memory

_MOST_STEPS = 32
"""Maximum captured steps kept per model; up to 1,024 rows there are 18 sizes, the small ones in two variants."""

_MOST_BY_ROWS = 4
"""Maximum first passes with an encoder, which have memory for the keys and values of their inputs."""


STEPS: Final = "decode steps"
LONG_COMPLETIONS: Final = "steps for long completions"


class Captures:
    """The captured steps and prefill passes of one model.

    One call at a time uses them and holds `lock` until it ends. Concurrent calls run eagerly in ``mode="auto"``,
    and wait in forced modes. The 32 most recently used steps are kept. They share one memory pool, including logits,
    so together they hold a few times the memory of the largest one.

    Attributes:
        ahead: The prefill pass that this call has begun.
        compiling: Numbers of rows, and dtypes, of steps whose kernels began to compile while prompts were prefilled.
        prefills: The captured prefill passes.
        by_rows: Captured first passes of decoders with an encoder.
        count: Number of steps captured.
        failures: Why captures failed that are not tried again until `retry`: by `STEPS`, `LONG_COMPLETIONS`,
            options of passes of other loops, and kinds of prefill passes.
        steps_asked: Steps requested by the model's calls so far, including the current one.
    """

    def __init__(self) -> None:
        self.lock = CallLock()
        self.ahead: PrefillAhead | None = None
        self.compiling = set[tuple[int, torch.dtype]]()
        self.prefills = CapturedPrefills[CapturedPrefill]()
        self.by_rows = CapturedPrefills[CapturedRows](_MOST_BY_ROWS, one_of_a_shape=True)
        self.count = 0
        self.steps_asked = 0
        self.failures: dict[Hashable, str] = {}
        self._used = 0  # memory in use at the start of the latest call
        self._free_then: int | None = None  # at the start of the call whose capture ran out of memory
        self._steps: list[CapturedStep] = []  # least recently used first
        self._state: Hashable = None
        self._known: Known | None = None  # about the model in this state
        self._pool: Any = None
        self._buffers = StepBuffers(0, [])  # of the steps' rows
        self._has_workspaces = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Captures:
        return Captures()  # a copy of the model has other weights

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Captures, ()

    @property
    def owner(self) -> int | None:
        """The thread that holds the lock."""
        return None if (holder := self.lock.holder) is None else holder.thread

    @property
    def scope(self) -> object:
        """The call that holds the lock from its start to its end, if one does; see `PrefillAhead`."""
        return None if (holder := self.lock.holder) is None else holder.scope

    @property
    def made(self) -> int:
        """Number of captures made, of every kind."""
        return self.count + self.prefills.count + self.by_rows.count

    def find(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        structure: Structure,
        options: CaptureOptions,
        kind: type[CapturedStep] = CapturedStep,
    ) -> CapturedStep:
        """Get or capture a step for this cache's rows; raises `Unsupported` if the kernels cannot compute it.

        Except for `PassFailedError`, it fails on all processes of the model alike.
        """
        self.join_ahead()
        rows = cache.rows if storages_in_place(cache) else bucket(cache.rows)
        found = self._fitting(rows, cache, options, kind)
        if structure.ranks.all(found is not None) == [True]:  # a capture runs passes, on all processes of the model
            assert found is not None
            self._steps.remove(found)
            self._steps.append(found)
            return found
        # Inference tensors could not be written outside of the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            with structure.ranks.together():
                pool, buffers = self._pool_on(model.device), self._buffers_for(rows, cache)
                step = kind(model, rows, cache, structure, options, pool, buffers)
            step.capture()
        # Those of suffixes that have moved go after the capture, which reuses their memory.
        self._steps = [kept for kept in self._steps if not kept.in_place or kept.reads(cache)]
        self._steps.append(step)
        del self._steps[:-_MOST_STEPS]
        self.count += 1
        return step

    def _fitting(
        self, rows: int, cache: SharedContextCache, options: CaptureOptions, kind: type[CapturedStep]
    ) -> CapturedStep | None:
        for step in self._steps:
            if type(step) is not kind or (step.rows, step.options) != (rows, options):
                continue
            if step.suits(cache) and step.fits(cache):
                return step
        return None

    def _buffers_for(self, rows: int, cache: SharedContextCache) -> StepBuffers:
        """Buffers for `rows` rows; steps that were captured with buffers of fewer go with these, for their memory."""
        layers = cache.state_layers
        if not self._buffers.serve(rows, layers):
            self._steps, self._buffers = [], StepBuffers(0, [])
            self._buffers = StepBuffers(rows, layers)
        return self._buffers

    def release_buffers(self) -> None:
        """Copy what a batch has in the captured steps' memory out of it: its cache outlives the call."""
        self._buffers.release()

    def capture_prefill(
        self, kept: CapturedPrefills[Captured], make: Callable[[Any], Captured], device: torch.device
    ) -> Captured:
        """Capture a prefill pass, which `make` does in the memory pool that it is given, and keep it."""
        self.join_ahead()
        with torch.inference_mode(False), torch.no_grad():
            made = make(self._pool_on(device))
        kept.keep(made)
        return made

    def _pool_on(self, device: torch.device) -> Any:
        """The memory pool of all captures; None where nothing is captured."""
        if self._pool is None and device.type == "cuda":
            self._pool, self._has_workspaces = torch.cuda.graph_pool_handle(), True
        return self._pool

    def sizes(self, options: CaptureOptions, *, own_dominate: bool) -> set[int]:
        """Numbers of rows of the kept steps with these options and launch parameters."""
        kept = (step for step in self._steps if type(step) is CapturedStep and step.options == options)
        return {step.rows for step in kept if step.tables.own_nodes_dominate == own_dominate}

    def refresh(self, model: PreTrainedModel, structure: Structure) -> None:
        """Drop all captures if the weights, modules or configs have changed."""
        if self.are_of(structure):
            return
        state = captured_state(model, structure.configs, structure.walk)
        if state != self._state:
            self.clear()
            self._state = state
        self._known = structure.known

    def are_of(self, structure: Structure) -> bool:
        """Whether the captures are of the model as it is, by what is known without looking through it."""
        return self._known is not None and structure.known is self._known

    def begin_prefill(self, model: PreTrainedModel, inputs: Any, scope: Scope) -> None:
        """Begin the prefill of a call of `generate` with these ``inputs``, where the last call was a right guess.

        The lock is then held until `end_ahead`. Beforehand only a replay must be safe, see `_may_replay`; whether the
        model has changed otherwise, so that the pass is dropped, is found while it runs.
        """
        again, device = self.prefills.again, model.device
        if again is None or not isinstance(inputs, Tensor):
            return
        if inputs.shape[:-1] != (1,) or inputs.dtype != torch.long or inputs.device != device:
            return
        size = size_for(inputs.shape[1]) if inputs.numel() else None
        if size is None or not self._may_replay(device):
            return
        if self.lock.holder is not None:
            return
        scope.callback(self.end_ahead, scope)
        try:
            if not self.lock.acquire(LockHolder(scope), wait=False):
                return
            shape = again[0]._replace(tokens=size, autocast=autocast_dtype(device))
            if (captured := self.prefills.find(shape, None, inputs.shape[1])) is not None:
                self.ahead = PrefillAhead(captured, inputs)
        except Exception:  # such as lack of memory: the call does without it
            self.end_ahead(scope)
        except BaseException:
            self.end_ahead(scope)
            raise

    def _may_replay(self, device: torch.device) -> bool:
        """Whether a replay is safe, though it may be of a model that has changed since: its memory is where it was."""
        if self._known is None:
            return False
        watch = self._known.watch
        return not (watch.moved() if device.type == "cuda" else watch.touched())  # elsewhere it runs the model's code

    def join_ahead(self) -> None:
        """Let what is queued from now on wait for the pass that was begun ahead: all captures share its memory."""
        if self.ahead is not None:
            self.ahead.join()

    def end_ahead(self, scope: Scope | None) -> None:
        """Let go of the captures, if the call of this scope holds them since it began its prefill ahead.

        At the call's end, or once it is known that its passes are not captured: calls within it, or in threads that it
        waits for, may need them.
        """
        if scope is None or self.scope is not scope:
            return
        try:
            if self.ahead is not None and not self.ahead.was_right:
                self.prefills.again = None
            self.join_ahead()
        finally:
            self.ahead = None
            self.lock.release(self.lock.holder)

    def fail(self, key: Hashable, reason: str, device: torch.device) -> None:
        """Record why a capture failed that is not tried again until `retry`."""
        self.failures[key] = reason
        if "out of memory" in reason or "ALLOC_FAILED" in reason:  # of CUDA or cuBLAS, with their own allocations
            self._free_then = free_memory(device) + used_memory(device) - self._used

    def failure(self, device: torch.device) -> str | None:
        """Why steps could not be captured. Reset by `retry`, or for lack of memory when a call starts with more."""
        self._used = used_memory(device)
        if self._free_then is not None and free_memory(device) > self._free_then:
            self.retry()
        return self.failures.get(STEPS)

    def retry(self) -> None:
        """Reset the recorded failures."""
        self._free_then, self.failures = None, {}

    def clear(self) -> None:
        """Drop all captures and their memory."""
        self.join_ahead()
        self._steps, self._pool, self._state = [], None, None
        self._known, self._buffers = None, StepBuffers(0, [])
        self.prefills.clear()
        self.by_rows.clear()
        self.retry()

    def release(self) -> None:
        """Drop all captures and free their device memory where possible. Never raises."""
        self.clear()
        if self._has_workspaces:
            self._has_workspaces = False
            with suppress(RuntimeError):  # reported late for an earlier failed kernel
                free_workspaces()


def capture_reason(model: PreTrainedModel, layout: ModelLayout, walk: ModelWalk, backend: str) -> str | None:
    """Why steps of this model, as it is, cannot be captured; None if no reason is known."""
    reasons = (layer.no_captured_steps for layer in layout.own.values())
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    if (code := own_code_of(type(model))) is not None and code.not_captured is not None:
        return code.not_captured
    devices = {parameter.device for parameter in walk.parameters}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"the model must be on one CUDA device, got {', '.join(sorted(map(str, devices)))}"
    if (dtype := computes_in(model)) not in (torch.float16, torch.bfloat16):
        return f"the kernels take float16 and bfloat16, got {dtype}"
    if backend not in ("auto", "triton"):
        return f"backend={backend!r} was requested"
    for module in walk.with_code:
        own = None if module is model else own_method(module, "forward")
        if own is not None and not is_set_once(own):
            return f"{type(module).__name__} carries a forward of its own, which may change between calls"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(is_capturable, hooks)) or hasattr(module, "_hf_hook"):
            return f"{type(module).__name__} has forward hooks, which a captured step would not call"
    return None


def reason_of_call(model: PreTrainedModel, arguments: dict[str, Any]) -> str | None:
    """Why steps of a call with these model arguments cannot be captured though the model's could be, or None."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            return f"the argument {name!r} is a tensor"
    return failure(Kernel.FOREST, model.device)


_SECONDS = 0.005
"""Between two tries of who waits: for calls of other threads, which take far longer.

No event or condition wakes up who waits: an interruption within its methods may leave taken for ever the lock that it
has itself, which is what `CallLock` is for.
"""


class LockHolder:
    """Holder of a lock: a call, in the thread that makes this object.

    Args:
        scope: The scope of a call that holds it from its start to its end.
    """

    def __init__(self, scope: object = None):
        self.thread, self.scope = threading.get_ident(), scope


class CallLock:
    """A lock of `generate` calls that an interruption (Ctrl-C) at any point of taking it leaves free.

    It is taken by a single operation of the interpreter, which tells who holds it.

    So `release` after an interruption finds whether there is anything to release. A lock of `threading` may be taken
    without its `acquire` having returned.
    """

    def __init__(self) -> None:
        self._holders: dict[str, LockHolder] = {}

    @property
    def holder(self) -> LockHolder | None:
        """The holder, if there is one."""
        return self._holders.get("")

    def acquire(self, holder: LockHolder, *, wait: bool) -> bool:
        """Take it, at once or once it is free; within a ``try`` whose ``finally`` releases it. Whether it is taken."""
        while self._holders.setdefault("", holder) is not holder:
            if not wait:
                return False
            time.sleep(_SECONDS)
        return True

    def release(self, holder: LockHolder | None) -> None:
        """Release it, if this is who holds it."""
        if holder is not None and self.holder is holder:
            del self._holders[""]
