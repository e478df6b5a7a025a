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
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.interface import RowLengths, active
from ...attention.launch.own_nodes import NO_OWN_NODES, choose_own_nodes
from ...attention.launch.plan import HeadShape
from ...attention.launch.step_tables import Alike, TablesByShape
from ...cache.captured import CapturedCache, storages_in_place
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ...kernels.failures import Kernel, failure
from ..foreign_code import is_capturable
from ..forward_pass import forward_pass
from ..fused.sums import WaitingSums
from ..identity import captured_state
from ..instance_patch import own_method
from ..structure import Structure
from .capture_memory import CAPTURING, capture_stream, free_memory, free_workspaces, reserve, unowned
from .compiled_layers import CompiledLayers
from .projections import FusedProjections

_MOST_STEPS = 32
"""Maximum captured steps kept per model; up to 1,024 rows there are 18 sizes, the small ones in two variants."""


class CaptureOptions(NamedTuple):
    """Options of a capture, other than the number of rows.

    Attributes:
        fused_rows: Maximum rows for which projections of the same input run concurrently.
        queries: Tokens of each row.
        planes: Number of planes of positions that are given; () for positions without planes, or with equal ones.
        reordered: Whether suffixes may be reordered, see `SuffixOrigins`.
    """

    compiled: bool
    fused_rows: int
    arguments: tuple[tuple[str, Any], ...]
    queries: int = 1
    planes: tuple[int, ...] = ()
    reordered: bool = False


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
        device, queries = model.device, options.queries
        self.rows, self.options = rows, options
        fused = rows * queries <= options.fused_rows
        self.in_place = storages_in_place(cache)
        self.tables = TablesByShape(rows, self._alike(cache), cache.forest, device)
        self.ids = torch.zeros(rows, queries, dtype=torch.long, device=device)
        self.positions = torch.zeros(*options.planes, rows, queries, dtype=torch.long, device=device)
        view, tensors_of = self._prepare(model, cache)
        self._follow(cache)
        self.lengths = lengths = RowLengths(cache.longest_row(queries))
        self._constants = view.constants

        ids, positions = self.ids, self.positions

        def step() -> list[Tensor]:  # no reference to self, so that memory is freed without a cycle
            view.begin()
            output = forward_pass(model, view, positions, input_ids=ids, return_dict=True, **dict(options.arguments))
            return tensors_of(output)

        @contextmanager
        def ours() -> Iterator[None]:
            with ExitStack() as stack:
                if options.compiled:
                    stack.enter_context(active(structure.configs, lengths))
                    stack.enter_context(compiled.installed(model, options.fused_rows))
                else:
                    stack.enter_context(structure.passing(lengths))
                    if fused:
                        stack.enter_context(FusedProjections(model))
                    if structure.fused is not None:
                        stack.enter_context(WaitingSums())  # last: it computes a sum before any branch of a graph
                yield

        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":  # tests with interpreted kernels run uncaptured
            self._step, self._ours = step, ours
        else:
            # The passes below write keys and values that the first real step overwrites.
            with CAPTURING, ours(), torch.cuda.device(device):
                stream = capture_stream(device)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    size = max(one.nbytes for one in step())  # warm-up: compiles kernels, creates library handles
                torch.cuda.current_stream().wait_stream(stream)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    reserve(size, device)
                    outputs = step()
            self.outputs = [unowned(one) for one in outputs]

    def _prepare(
        self, model: PreTrainedModel, cache: SharedContextCache
    ) -> tuple[CapturedCache, Callable[[Any], list[Tensor]]]:
        """The view of a batch that the capture reads, and what it keeps of the model's output, contiguous."""
        return CapturedCache(self.tables, cache), lambda output: [output.logits[:, -1].contiguous()]

    def fits(self, cache: SharedContextCache) -> bool:
        """Whether this batch can use the captured step: its windows, table sizes, and suffixes captured in place."""
        if not self.reads(cache):
            return False
        same_up_to = self.lengths.same_up_to
        longest = cache.longest_row(self.options.queries)
        return (same_up_to is None or longest <= same_up_to) and self.tables.fits(cache.forest)

    def reads(self, cache: SharedContextCache) -> bool:
        """Whether the suffixes that were captured in place are those of this batch, and have not moved."""
        return self.in_place == storages_in_place(cache)

    def suits(self, cache: SharedContextCache) -> bool:
        """Whether a capture for this batch would have the same launch parameters for own nodes."""
        return self.tables.layers == self._alike(cache)

    def _alike(self, cache: SharedContextCache) -> dict[int, Alike]:
        """For each layer, its heads, and how a capture for this batch would attend to long suffixes."""
        longest, dominate = cache.longest_row(self.options.queries), cache.state.own_nodes_dominate
        found = dict[int, Alike]()
        for layer in cache.attention_layers:
            store = layer.store
            windowed = store.window is not None and longest > store.window
            shape = HeadShape(store.kv_heads, store.group_size, store.head_dim, windowed)
            chosen = choose_own_nodes(self.rows, shape, layer.device, dominate=dominate)
            # Layers that attend to suffixes by themselves would take own nodes for shared ones.
            without = layer.storage.captured_in_place or self.options.reordered
            found[layer.index] = Alike(shape, NO_OWN_NODES if without else chosen)
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
        self._replay()
        return self.outputs[0][:count]

    def _replay(self) -> None:
        """Compute `outputs`."""
        if self.graph is not None:
            self.graph.replay()
        else:
            with self._ours():
                self.outputs = self._step()

    def _follow(self, cache: SharedContextCache) -> None:
        layers = {layer.index: layer for layer in cache.attention_layers}
        suffixes = cache.state.suffixes
        if not (suffixes.in_order or self.options.reordered):
            raise ValueError("captured steps read each suffix from its own row; select rows by copying them first")
        self.tables.follow(cache.forest, suffixes.lengths, layers)


class Captures:
    """The captured steps of one model.

    One call at a time uses them and holds `lock` while it decodes. Concurrent calls run eagerly in ``mode="auto"``,
    and wait in forced modes. The 32 most recently used steps are kept. They share one memory pool, including logits,
    so together they hold a few times the memory of the largest one.

    Attributes:
        owner: The thread that holds the lock.
        count: Number of captures made.
        steps_asked: Steps requested by the model's calls so far, including the current one.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.compiled = CompiledLayers()
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
        kind: type[CapturedStep] = CapturedStep,
    ) -> CapturedStep:
        """Get or capture a step for this cache's rows; raises `Unsupported` if the kernels cannot compute it."""
        rows = cache.rows if storages_in_place(cache) else bucket(cache.rows)
        for index, step in enumerate(self._steps):
            if type(step) is not kind or (step.rows, step.options) != (rows, options):
                continue
            if step.suits(cache) and step.fits(cache):
                self._steps.append(self._steps.pop(index))
                return step
        if self._pool is None and model.device.type == "cuda":
            self._pool, self._has_workspaces = torch.cuda.graph_pool_handle(), True
        # Inference tensors could not be written outside of the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            step = kind(model, rows, cache, structure, options, self.compiled, self._pool)
        # Those of suffixes that have moved go after the capture, which reuses their memory.
        self._steps = [kept for kept in self._steps if not kept.in_place or kept.reads(cache)]
        self._steps.append(step)
        del self._steps[:-_MOST_STEPS]
        self.count += 1
        return step

    def sizes(self, options: CaptureOptions, *, own_dominate: bool) -> set[int]:
        """Numbers of rows of the kept steps with these options and launch parameters."""
        kept = (step for step in self._steps if type(step) is CapturedStep and step.options == options)
        return {step.rows for step in kept if step.tables.own_nodes_dominate == own_dominate}

    def refresh(self, model: PreTrainedModel, configs: list[PreTrainedConfig]) -> None:
        """Drop all captures if the weights, modules or configs have changed."""
        state = captured_state(model, configs)
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
        self.pass_failures = {}

    def clear(self) -> None:
        """Drop all captures and their memory."""
        self._steps, self._pool, self._state = [], None, None
        self.retry()

    def release(self) -> None:
        """Drop all captures and free their device memory where possible. Never raises."""
        self.clear()
        self.compiled = CompiledLayers()
        if self._has_workspaces:
            self._has_workspaces = False
            with suppress(RuntimeError):  # reported late for an earlier failed kernel
                free_workspaces()


def capture_reason(model: PreTrainedModel, layout: ModelLayout, backend: str, arguments: dict[str, Any]) -> str | None:
    """Why this model's steps cannot be captured, or None if no reason is known."""
    reasons = (layer.no_captured_steps for layer in layout.own.values())
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"the model must be on one CUDA device, got {', '.join(sorted(map(str, devices)))}"
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels take float16 and bfloat16, got {model.dtype}"
    if backend not in ("auto", "triton"):
        return f"backend={backend!r} was requested"
    if torch.is_autocast_enabled(model.device.type):  # its weight casts would be kept beyond the graph's replay
        return "torch.autocast is active around the call"
    for module in model.modules():
        if module is not model and own_method(module, "forward") is not None:
            return f"{type(module).__name__} carries a forward of its own, which may change between calls"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(is_capturable, hooks)) or hasattr(module, "_hf_hook"):
            return f"{type(module).__name__} has forward hooks, which a captured step would not call"
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            return f"the argument {name!r} is a tensor"
    return failure(Kernel.FOREST, model.device)
