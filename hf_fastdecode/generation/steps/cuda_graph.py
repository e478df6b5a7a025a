"""Decode steps captured in CUDA graphs, kept between calls.

A captured step reads everything that differs between steps and calls from tables on the device (`StaticTables`), so
one capture serves other prompts, lengths and samples within its bucket of rows. It is captured again only for more
rows, more nodes or levels than its tables hold, a widest node that needs other launch parameters, rows that outgrow a
sliding window it left out, or when the model's own state has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.interface import RowLengths, active
from ...attention.launch.own_nodes import may_have_own_nodes
from ...attention.launch.static_tables import LayerStorage, StaticTables
from ...cache.captured import CapturedCache
from ...cache.fingerprint import adapter_state, addresses, module_state
from ...cache.shared import SharedContextCache
from ...kernels.failures import Kernel, failure
from ..foreign_code import only_requires_grad
from ..forward_pass import forward_pass
from ..instance_patch import own_method
from .capture_memory import CAPTURING, capture_stream, free_memory, free_workspaces, reserve, unowned
from .compiled_layers import CompiledLayers
from .projections import FusedProjections

_MOST_STEPS = 32
"""Captured steps that a model keeps: one of each size up to 1,024 rows is 18."""


class How(NamedTuple):
    """What a captured step is captured with, beside its number of rows.

    Attributes:
        compiled: Whether layers are compiled.
        fused_rows: Most rows of a step that computes projections of one input concurrently.
        arguments: What else the model's forward takes, by name.
    """

    compiled: bool
    fused_rows: int
    arguments: tuple[tuple[str, Any], ...]


def bucket(rows: int) -> int:
    """Rows of the captured step that decodes `rows` rows: powers of two, and above 128 sizes between them."""
    power = 1 << max(0, rows - 1).bit_length()
    if power <= 128:
        return power
    apart = max(64, power // 8)  # a product of up to 63 rows fewer takes as long
    return -(-rows // apart) * apart


class CapturedStep:
    """One decode step of a model for up to `rows` rows.

    Args:
        model: The model.
        rows: Rows of the step.
        cache: The batch to capture with; others may follow.
        configs: The model's config objects, see `attention.interface.active`.
        how: What it is captured with.
        compiled: The model's compiled layers.
        pool: Memory pool that captures share, for their outputs too; they never run at the same time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        cache: SharedContextCache,
        configs: list[PreTrainedConfig],
        how: How,
        compiled: CompiledLayers,
        pool: Any,
    ):
        device = model.device
        self.rows, self.how = rows, how
        fused = rows <= how.fused_rows
        stored = _storage(cache)
        kv_heads = stored[0].suffix.keys.shape[1]
        heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", kv_heads)
        own_nodes = may_have_own_nodes(rows, kv_heads, heads // kv_heads, device)
        self.tables = StaticTables(rows, len(stored), cache.forest, device, own_nodes=own_nodes)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.load(cache)
        self.lengths = lengths = RowLengths(cache.longest_row(1))
        view = CapturedCache(self.tables, len(cache.layers))

        ids, positions = self.ids, self.positions

        def step() -> Tensor:  # without a reference to this object, whose memory is then freed with it
            output = forward_pass(
                model,
                input_ids=ids,
                position_ids=positions,
                past_key_values=view,
                return_dict=True,
                **dict(how.arguments),
            )
            return output.logits[:, -1].contiguous()

        @contextmanager
        def ours() -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(active(configs, lengths))
                if how.compiled:
                    stack.enter_context(compiled.installed(model, fused=fused))
                elif fused:
                    stack.enter_context(FusedProjections(model))
                yield

        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":  # kernels are interpreted, in tests: the step runs uncaptured
            self._step, self._ours = step, ours
        else:
            # A pass writes the rows' new keys and values, at a place that the first real step writes again.
            with CAPTURING, ours(), torch.cuda.device(device):
                stream = capture_stream(device)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    size = step().nbytes  # compiles kernels and creates library handles, which a capture cannot
                torch.cuda.current_stream().wait_stream(stream)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    reserve(size, device)
                    logits = step()
            self.logits = unowned(logits)

    def fits(self, cache: SharedContextCache) -> bool:
        """Whether this batch can use the step as it was captured: with its windows, and what its tables hold."""
        same_up_to = self.lengths.same_up_to
        longest = cache.longest_row(1)
        return (same_up_to is None or longest <= same_up_to) and self.tables.fits(cache.forest)

    def load(self, cache: SharedContextCache) -> None:
        """Decode this batch from now on."""
        self.tables.load(cache.forest, _storage(cache), cache.suffix_length)

    def load_suffixes(self, cache: SharedContextCache) -> None:
        """The batch's suffixes have moved."""
        self.tables.load_suffixes(_storage(cache))

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One token for each row; the suffixes must have room for it.

        Args:
            ids: ``[batch]`` int64, batch up to `rows`.
            positions: ``[batch]`` int64.

        Returns:
            ``[batch, vocabulary]``, overwritten by the next step.
        """
        count = len(ids)
        self.ids[:count, 0].copy_(ids)
        self.positions[:count, 0].copy_(positions)
        if self.graph is not None:
            self.graph.replay()
        else:
            with self._ours():
                self.logits = self._step()
        self.tables.grow()
        return self.logits[:count]


def _storage(cache: SharedContextCache) -> list[LayerStorage]:
    return [
        LayerStorage(layer.stored.segments, layer.storage.keys_and_values(layer.storage.suffix))
        for layer in cache.layers
        if layer.storage.suffix is not None
    ]


class Captures:
    """The captured steps of one model.

    One call at a time uses them: `lock` is held while it decodes. In ``mode="auto"`` calls of other threads run
    eagerly meanwhile, in others they wait. The 32 steps that were used last are kept. They share one memory pool, also
    for their logits, so that all of them hold a few times as much as the largest one.

    Attributes:
        owner: The thread that holds the lock.
        count: Captures made.
        steps_asked: Most steps that the model's calls may have taken so far, this one included.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.compiled = CompiledLayers()
        self.count = 0
        self.steps_asked = 0
        self._failure: str | None = None
        self._free = 0  # memory, at the beginning of the latest call
        self._free_then: int | None = None  # and of the call whose capture failed, if it was for lack of memory
        self._steps: list[CapturedStep] = []  # in the order of their last use
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
        configs: list[PreTrainedConfig],
        how: How,
    ) -> CapturedStep:
        """A step that decodes this cache's rows, captured now when there is none; loaded with the cache.

        Raises:
            KernelRefusalError: The kernels cannot compute the model's attention.
        """
        rows = bucket(cache.rows)
        for index, step in enumerate(self._steps):
            if (step.rows, step.how) == (rows, how) and step.fits(cache):
                step.load(cache)
                self._steps.append(self._steps.pop(index))
                return step
        if self._pool is None and model.device.type == "cuda":
            self._pool, self._has_workspaces = torch.cuda.graph_pool_handle(), True
        # Tensors made in a caller's inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            step = CapturedStep(model, rows, cache, configs, how, self.compiled, self._pool)
        self._steps.append(step)
        del self._steps[:-_MOST_STEPS]
        self.count += 1
        return step

    def sizes(self, how: How) -> set[int]:
        """Buckets of rows whose steps were captured before, and kept."""
        return {step.rows for step in self._steps if step.how == how}

    def refresh(self, model: PreTrainedModel, configs: list[PreTrainedConfig]) -> None:
        """Drop what was captured when the weights, modules or configs are no longer those."""
        state = captured_state(model, configs)
        if state != self._state:
            self.clear()
            self._state = state

    def fail(self, reason: str, *, of_memory: bool) -> None:
        """Note why a capture failed, and whether for lack of memory."""
        self._failure, self._free_then = reason, self._free if of_memory else None

    def failure(self, device: torch.device) -> str | None:
        """Why a capture failed, until `retry`, or until a call begins with more free memory where it lacked memory."""
        self._free = free_memory(device)
        if self._free_then is not None and self._free > self._free_then:
            self.retry()
        return self._failure

    def retry(self) -> None:
        """Forget that a capture failed."""
        self._failure = self._free_then = None

    def clear(self) -> None:
        """Drop all captures and their memory."""
        self._steps, self._pool, self._state = [], None, None
        self.retry()

    def release(self) -> None:
        """Drop all captures, and give back what the device holds for them, as far as it can. Never raises."""
        self.clear()
        self.compiled = CompiledLayers()
        if self._has_workspaces:
            self._has_workspaces = False
            with suppress(RuntimeError):  # of an earlier kernel that failed
                free_workspaces()


def captured_state(model: nn.Module, configs: Iterable[PreTrainedConfig]) -> Hashable:
    """What a capture bakes in of a model: where its tensors lie, and what its modules and configs say on the host.

    Args:
        model: The model.
        configs: The config objects of its modules.
    """
    return (
        addresses(model.parameters()),
        addresses(model.buffers()),
        adapter_state(model),
        module_state(model),
        id(vars(model).get("forward")),
        tuple(map(_config_state, configs)),
    )


def _config_state(config: PreTrainedConfig) -> Hashable:
    return tuple(
        (name, _config_state(value) if isinstance(value, PreTrainedConfig) else repr(value))
        for name, value in vars(config).items()
        if name != "_attn_implementation_internal"  # another thread's pass may have it switched just now
    )


def capture_reason(model: PreTrainedModel, backend: str, arguments: dict[str, Any]) -> str | None:
    """Why this model's steps cannot be captured, or None when nothing is known against it."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"the model must lie on one CUDA device, got {', '.join(sorted(map(str, devices)))}"
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels take float16 and bfloat16, got {model.dtype}"
    if backend not in ("auto", "triton"):
        return f"backend={backend!r} was asked for"
    if torch.is_autocast_enabled(model.device.type):  # its casts of weights would be kept beyond the graph's replay
        return "torch.autocast is active around the call"
    for module in model.modules():
        if module is not model and own_method(module, "forward") is not None:
            return f"{type(module).__name__} carries a forward of its own, which may change between calls"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(only_requires_grad, hooks)) or hasattr(module, "_hf_hook"):
            return f"{type(module).__name__} has forward hooks, which a captured step would not call"
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            return f"the argument {name!r} is a tensor"
    return failure(Kernel.FOREST, model.device)
