"""Decode steps captured in CUDA graphs, kept between calls.

A captured step reads all per-step and per-call state from device tables (`StepTables`), so one capture serves other
prompts, lengths and sample counts in its bucket of rows. Another capture is needed only for more rows, more nodes or
levels than the tables hold, a widest node that needs other launch parameters, completions that have outgrown what rows
share, rows that outgrow a sliding window, or changes of the model's state.

Suffixes of layers that attend by themselves are captured in place: such a capture serves one call, until their storage
moves.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.forest import Forest
from ...attention.interface import RowLengths
from ...attention.launch.own_nodes import NO_OWN_NODES, choose_own_nodes
from ...attention.launch.plan import HeadShape
from ...attention.launch.step_tables import Alike, TablesByShape
from ...cache.captured import CapturedCache, storages_in_place
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ...kernels.failures import Kernel, failure
from ..foreign_code import only_requires_grad
from ..forward_pass import forward_pass
from ..identity import captured_state
from ..instance_patch import own_method
from ..model_walk import ModelWalk
from ..structure import Structure
from .capture_memory import free_memory, free_workspaces
from .captured_prefill import CapturedPrefill, CapturedPrefills, PrefillShape
from .compiled_layers import CompiledLayers
from .graph_capture import CapturedGraph, pass_context

_MOST_STEPS = 32
"""Maximum captured steps kept per model; up to 1,024 rows there are 18 sizes, the small ones in two variants."""


class CaptureOptions(NamedTuple):
    """Options of a capture, other than the number of rows.

    Attributes:
        fused_rows: Maximum rows for which projections of the same input run concurrently.
    """

    compiled: bool
    fused_rows: int
    arguments: tuple[tuple[str, Any], ...]


def bucket(rows: int) -> int:
    """Round up to a captured number of rows: powers of two, with sizes in between above 128."""
    power = 1 << max(0, rows - 1).bit_length()
    if power <= 128:
        return power
    spacing = max(64, power // 8)  # a matrix product of up to 63 fewer rows takes as long
    return -(-rows // spacing) * spacing


class CapturedStep:
    """One decode step of a model for up to `rows` rows.

    Args:
        cache: The batch to capture with; other batches can be loaded later.
        pool: Memory pool shared by all captures, including outputs; they never run concurrently.

    Attributes:
        in_place: Versions of the storages whose suffixes are captured in place; () if there are none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        cache: SharedContextCache,
        structure: Structure,
        options: CaptureOptions,
        compiled: CompiledLayers,
        pool: Any,
    ):
        device = model.device
        self.rows, self.options = rows, options
        self.in_place = storages_in_place(cache)
        self.tables = TablesByShape(rows, self._alike(cache), cache.forest, device)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._follow(cache)
        self.lengths = lengths = RowLengths(cache.longest_row(1))
        view = CapturedCache(self.tables, cache)
        self._constants = view.constants

        ids, positions = self.ids, self.positions

        # The passes of a capture write keys and values that the first real step overwrites.
        def step() -> tuple[Tensor]:  # no reference to self, so that memory is freed without a cycle
            view.begin()
            output = forward_pass(model, view, positions, input_ids=ids, return_dict=True, **dict(options.arguments))
            return (output.logits[:, -1].contiguous(),)

        ours = partial(
            pass_context,
            model,
            structure,
            lengths,
            rows=rows,
            fused_rows=options.fused_rows,
            compiled=compiled if options.compiled else None,
        )
        self._graph = CapturedGraph(step, ours, device, pool)

    def fits(self, cache: SharedContextCache) -> bool:
        """Whether this batch can use the captured step: its windows, table sizes, and suffixes captured in place."""
        if not self.reads(cache):
            return False
        same_up_to = self.lengths.same_up_to
        longest = cache.longest_row(1)
        return (same_up_to is None or longest <= same_up_to) and self.tables.fits(cache.forest)

    def reads(self, cache: SharedContextCache) -> bool:
        """Whether the suffixes that were captured in place are those of this batch, and have not moved."""
        return self.in_place == storages_in_place(cache)

    def suits(self, cache: SharedContextCache) -> bool:
        """Whether a capture for this batch would have the same launch parameters for own nodes."""
        return self.tables.layers == self._alike(cache)

    def _alike(self, cache: SharedContextCache) -> dict[int, Alike]:
        """For each layer, its heads, and how a capture for this batch would attend to long suffixes."""
        longest, dominate, found = cache.longest_row(1), cache.state.own_nodes_dominate, dict[int, Alike]()
        for layer in cache.attention_layers:
            store = layer.store
            windowed = store.window is not None and longest > store.window
            shape = HeadShape(store.kv_heads, store.group_size, store.head_dim, windowed)
            chosen = choose_own_nodes(self.rows, shape, layer.device, dominate=dominate)
            # Layers that attend to suffixes by themselves would take own nodes for shared ones.
            found[layer.index] = Alike(shape, NO_OWN_NODES if layer.storage.captured_in_place else chosen)
        return found

    def __call__(self, cache: SharedContextCache, ids: Tensor, positions: Tensor) -> Tensor:
        """Run one step.

        Args:
            cache: The batch, for which `fits` holds, with capacity for the step in its suffixes.
            ids: ``[batch]`` int64, batch up to `rows`.
            positions: ``[batch]`` int64.

        Returns:
            ``[batch, vocabulary]``, overwritten by the next step.
        """
        count = len(ids)
        self._follow(cache)
        self.ids[:count, 0].copy_(ids)
        self.positions[:count, 0].copy_(positions)
        (logits,) = self._graph.replay()
        return logits[:count]

    def _follow(self, cache: SharedContextCache) -> None:
        layers = {layer.index: layer for layer in cache.attention_layers}
        suffixes = cache.state.suffixes
        if not suffixes.in_order:
            raise ValueError("captured steps read each suffix from its own row; select rows by copying them first")
        self.tables.follow(cache.forest, suffixes.lengths, layers)


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
        self._failure: str | None = None
        self._free = 0  # free memory at the start of the latest call
        self._free_then: int | None = None  # at the start of the call whose capture ran out of memory
        self._steps: list[CapturedStep] = []  # least recently used first
        self._state: Hashable = None
        self._pool: Any = None
        self._has_workspaces = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Captures:
        return Captures()  # a copy of the model has other weights

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Captures, ()

    def find(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        structure: Structure,
        options: CaptureOptions,
    ) -> CapturedStep:
        """Get or capture a step for this cache's rows; raises `Unsupported` if the kernels cannot compute it."""
        rows = cache.rows if storages_in_place(cache) else bucket(cache.rows)
        for index, step in enumerate(self._steps):
            if (step.rows, step.options) == (rows, options) and step.suits(cache) and step.fits(cache):
                self._steps.append(self._steps.pop(index))
                return step
        # Inference tensors could not be written outside of the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            pool = self._pool_on(model.device)
            step = CapturedStep(model, rows, cache, structure, options, self.compiled, pool)
        # Those of suffixes that have moved go after the capture, which reuses their memory.
        self._steps = [kept for kept in self._steps if not kept.in_place or kept.reads(cache)]
        self._steps.append(step)
        del self._steps[:-_MOST_STEPS]
        self.count += 1
        return step

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

    def sizes(self, options: CaptureOptions, *, own_dominate: bool) -> set[int]:
        """Numbers of rows of the kept steps with these options and launch parameters."""
        kept = (step for step in self._steps if step.options == options)
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

    def clear(self) -> None:
        """Drop all captures and their memory."""
        self._steps, self._pool, self._state = [], None, None
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
        if module is not model and own_method(module, "forward") is not None:
            return f"{type(module).__name__} carries a forward of its own, which may change between calls"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(only_requires_grad, hooks)) or hasattr(module, "_hf_hook"):
            return f"{type(module).__name__} has forward hooks, which a captured step would not call"
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            return f"the argument {name!r} is a tensor"
    return failure(Kernel.FOREST, model.device)
