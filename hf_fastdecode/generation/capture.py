"""Decode steps captured in CUDA graphs, kept between calls.

A captured step reads everything that differs between steps and calls from tables on the device (`StaticTables`), so
one capture serves other prompts, lengths and samples within its bucket of rows. It is captured again only for more
rows, more nodes or levels than its tables hold, a widest node that needs other launch parameters, rows that outgrow a
sliding window it left out, or when the model's own state has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.interface import RowLengths, active
from ..attention.own_nodes import may_have_own_nodes
from ..attention.static_tables import LayerStorage, StaticTables
from ..cache.captured import CapturedCache
from ..cache.fingerprint import adapter_state, addresses, module_state
from ..cache.shared import SharedContextCache
from ..kernels.failures import Kernel, failure
from .compiled import CompiledLayers, decoder_layers
from .foreign import only_requires_grad
from .joined import JoinedWeights, multiplying_once
from .passes import forward_pass
from .wrapping import own_method

_Key = tuple[int, bool, Hashable]
"""Of captured steps: bucket of rows, whether compiled, arguments."""


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
        arguments: What else the model's forward takes.
        compiled: When given, the layers are compiled.
        pool: Memory pool that captures share; they never run at the same time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        cache: SharedContextCache,
        configs: list[PreTrainedConfig],
        arguments: dict[str, Any],
        compiled: CompiledLayers | None,
        pool: Any,
    ):
        device = model.device
        self.rows = rows
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
                model, input_ids=ids, position_ids=positions, past_key_values=view, return_dict=True, **arguments
            )
            return output.logits[:, -1]

        @contextmanager
        def ours() -> Iterator[None]:
            layers = compiled.installed(model) if compiled is not None else nullcontext()
            with active(configs, lengths), multiplying_once(decoder_layers(model)), layers:
                yield

        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":  # kernels are interpreted, in tests: the step runs uncaptured
            self._step, self._ours = step, ours
        else:
            # A pass writes the rows' new keys and values, at a place that the first real step writes again.
            with ours(), torch.cuda.device(device):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step()  # compiles kernels and creates library handles, which a capture cannot
                torch.cuda.current_stream().wait_stream(stream)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                    self.logits = step()

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
    eagerly meanwhile, in others they wait.

    Attributes:
        owner: The thread that holds the lock.
        count: Captures made.
        steps_asked: Most steps that the model's calls may have taken so far, this one included.
        failure: Why a capture failed, when one did.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.compiled = CompiledLayers()
        self.weights = JoinedWeights()
        self.count = 0
        self.steps_asked = 0
        self.failure: str | None = None
        self._steps: dict[_Key, list[CapturedStep]] = {}
        self._state: Hashable = None
        self._pool: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Captures:
        return Captures()  # a copy of the model has other weights

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Captures, ()

    def find(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        configs: list[PreTrainedConfig],
        arguments: dict[str, Any],
        *,
        compiled: bool,
    ) -> CapturedStep:
        """A step that decodes this cache's rows, captured now when there is none; loaded with the cache.

        Raises:
            KernelRefusalError: The kernels cannot compute the model's attention.
        """
        rows = bucket(cache.rows)
        key = _key(rows, arguments, compiled)
        for step in self._steps.setdefault(key, []):
            if step.fits(cache):
                step.load(cache)
                return step
        if self._pool is None and model.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        layers = self.compiled if compiled else None
        # Tensors made in a caller's inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            step = CapturedStep(model, rows, cache, configs, arguments, layers, self._pool)
        self._steps[key].append(step)
        self.count += 1
        return step

    def sizes(self, arguments: dict[str, Any], *, compiled: bool) -> set[int]:
        """Buckets of rows whose steps were captured before."""
        return {key[0] for key, steps in self._steps.items() if steps and key == _key(key[0], arguments, compiled)}

    def refresh(self, model: PreTrainedModel, configs: list[PreTrainedConfig]) -> None:
        """Join weights, and drop what was captured when the weights, modules or configs are no longer those."""
        self.weights.join(decoder_layers(model))
        state = model_state(model, configs)
        if state != self._state:
            self.clear()
            self._state = state

    def clear(self) -> None:
        """Drop all captures and their memory."""
        self._steps, self._pool, self._state, self.failure = {}, None, None, None


def _key(rows: int, arguments: dict[str, Any], compiled: bool) -> _Key:
    return rows, compiled, tuple(sorted(arguments.items()))


def model_state(model: nn.Module, configs: Iterable[PreTrainedConfig]) -> Hashable:
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
