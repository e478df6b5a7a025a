"""Captures a forward pass in a CUDA graph: its context, streams, memory and matrix products.

cuBLAS keeps one workspace per stream, 32 MiB on Hopper, which PyTorch does not free by itself. All captures of a
device therefore use the same few streams, one capture at a time.

A decode step's matrix product takes as long as reading its weights, plus some microseconds in which memory is idle.
Query, key and value projections have the same input, and so do gate and up projections. Where `RowProducts` serves
them they are one launch, as is each other product; otherwise they are parallel branches of the captured graph, where
one product starts while another drains. Parameters keep their memory and modules stay in place for every value of
``fuse_projections``. Only passes of the capturing thread are affected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..._compat import LINEAR, free_cublas_workspaces, tensor_version
from ...attention.overrides import RowLengths
from ...instance_methods import is_linear
from ...kernels.ahead import compiled_ahead
from ...kernels.device import stream_for
from ...kernels.row_products.config import MOST_ROWS, fusing_products
from ...parallel.ranks import ALONE, Ranks
from ..autocast import casting_anew
from ..fused.experts import LargestOfFew
from ..fused.gated import RowProducts
from ..fused.head_norms import WaitingHeadNorms
from ..fused.norms import WaitingSums
from ..structure import Structure


@contextmanager
def pass_context(
    model: PreTrainedModel, structure: Structure, lengths: RowLengths, *, rows: int, fused_rows: int
) -> Iterator[None]:
    """Context of a pass over `rows` rows of hidden states, before and during its capture.

    Layers run with fused modules. Unless `fused_rows` is 0, products are those of `FusedProjections`, and own layers
    are within `fusing_products`.
    """
    with ExitStack() as stack:
        stack.enter_context(casting_anew(model))
        stack.enter_context(structure.captured_overrides.installed())
        if fused_rows:
            stack.enter_context(fusing_products())
        stack.enter_context(structure.passing(lengths))
        if fused_rows and rows <= max(fused_rows, MOST_ROWS):
            stack.enter_context(FusedProjections(model, concurrent=rows <= fused_rows))
        if fused_rows and structure.fused is not None and structure.fused.has_experts:
            stack.enter_context(LargestOfFew())
        if structure.fused is not None:
            stack.enter_context(WaitingHeadNorms())  # last: they compute what waits before any branch of a graph
            stack.enter_context(WaitingSums())
        yield


def _on_any(ranks: Ranks, holds: bool) -> bool:
    return ranks.all(not holds) == [False]


class CapturedGraph:
    """A pass in a CUDA graph; on other devices it runs again at every replay, for tests with interpreted kernels.

    Args:
        run: The pass, which returns its outputs; it must not refer to the owner of this object, so that memory is
            freed without a cycle. Its first, uncaptured run compiles kernels and creates library handles.
        context: Makes the context in which the pass runs.
        pool: Memory pool shared by all captures, including outputs; they never run concurrently.
        ranks: The processes that compute the pass. A failure of its first run, which communicates, raises
            `PassFailedError` where there are several; one of the capture itself is raised on all.
    """

    def __init__(
        self,
        run: Callable[[], tuple[Tensor, ...]],
        context: Callable[[], AbstractContextManager[None]],
        device: torch.device,
        pool: Any,
        ranks: Ranks = ALONE,
    ):
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            self._run, self._context = run, context
            return
        with _CAPTURING, context(), torch.cuda.device(device):
            stream = stream_for(device, "captures")
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), ranks.pass_before_capture():
                sizes = [output.nbytes for output in compiled_ahead(run, device, partial(_on_any, ranks))]
            torch.cuda.current_stream().wait_stream(stream)
            with ranks.together():  # what is recorded communicates at replays only
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    for size in sizes:
                        reserve(size, device)
                    outputs = run()
        self._graph = graph
        self._outputs = tuple(map(unowned, outputs))
        ranks.watchdog.frees(self)

    def clear(self) -> None:
        """Free the graph, whoever refers to it; no replay follows. A communicator closes once no graph holds it."""
        if self._graph is not None:
            self._graph.reset()

    def replay(self) -> tuple[Tensor, ...]:
        """The pass's outputs, valid until the next replay of any graph of the pool."""
        if self._graph is None:
            with self._context():
                return self._run()
        self._graph.replay()
        return self._outputs


def captured_graph(
    run: Callable[[], tuple[Tensor, ...]],
    model: PreTrainedModel,
    structure: Structure,
    lengths: RowLengths,
    pool: Any,
    *,
    rows: int,
    fused_rows: int,
    runs_first: bool = False,
) -> CapturedGraph:
    """Capture a pass over `rows` rows of hidden states in `pass_context`.

    With `runs_first`, its first run finds the shapes of its buffers, also where nothing is captured.
    """
    context = partial(pass_context, model, structure, lengths, rows=rows, fused_rows=fused_rows)
    if runs_first and model.device.type != "cuda":  # where a capture runs it first
        with context():
            run()
    return CapturedGraph(run, context, model.device, pool, structure.ranks)


_CAPTURING = threading.RLock()
"""Held during a capture: all models share a device's capture streams."""


class _Address:
    """Exposes a tensor's memory by ``__cuda_array_interface__``, without ownership."""

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": None,
            "typestr": f"<i{tensor.itemsize}",  # no typestr for bfloat16
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def unowned(tensor: Tensor) -> Tensor:
    """Non-owning view of a contiguous CUDA tensor, so that the pool can reuse its memory for other captures.

    Its contents are valid from a replay of the graph that writes it until the next replay of any graph in the pool.
    """
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)


def reserve(size: int, device: torch.device) -> None:
    """Grow the pool of the graph under capture by a block of the next power of two of `size` bytes.

    Later captures reuse blocks for outputs up to that size, so captures of growing sizes hold twice the largest output
    rather than the sum of all.
    """
    torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device=device)


def used_memory(device: torch.device) -> int:
    """Bytes of PyTorch's tensors on a CUDA device; 0 on other devices."""
    if device.type != "cuda":
        return 0
    of_sizes = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {})  # no flat copy of all
    return int(of_sizes.get("all", {}).get("current", 0))


def free_workspaces() -> None:
    """Free cached memory, and cuBLAS workspaces unless a remaining CUDA graph might use them."""
    torch.cuda.empty_cache()  # frees pools of deleted graphs
    if all(segment["segment_pool_id"] == (0, 0) for segment in torch.cuda.memory_snapshot()):
        free_cublas_workspaces()
        torch.cuda.empty_cache()


_BRANCHES = 2
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    # Of layers with latents.
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    # Of gated delta nets, as many as one launch takes.
    ("in_proj_qkv", "in_proj_z", "in_proj_b"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("a_proj", "b_proj", "g_proj"),
)
"""Names of sibling modules that are applied to the same input."""


def linears(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`F.linear` of one input by several weights, on CUDA concurrently."""
    if not inputs.is_cuda:
        return [F.linear(inputs, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    main = torch.cuda.current_stream(inputs.device)
    branches = min(_BRANCHES, len(weights) - 1)
    streams = [main, *(stream_for(inputs.device, f"branch {number} of a capture") for number in range(branches))]
    for stream in streams[1:]:
        stream.wait_stream(main)
    outputs = []
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        with torch.cuda.stream(streams[index % len(streams)]):
            outputs.append(F.linear(inputs, weight, bias))
    # Branch memory is reused only by branches, each of which first waits for all earlier work of `main`.
    for stream in streams[1:]:
        main.wait_stream(stream)
    return outputs


class _Group:
    """Projections of the same input; caches the outputs for the latest input until each has been read."""

    def __init__(self, parts: Sequence[nn.Linear], products: RowProducts, *, concurrent: bool):
        self._concurrent = concurrent
        self.weights = [part.weight for part in parts]
        self.biases = [part.bias for part in parts]
        self._products = products
        self._inputs: Tensor | None = None
        self._version: int | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, inputs: Tensor, part: int) -> Tensor:
        """The output of one projection."""
        version = tensor_version(inputs)
        if inputs is not self._inputs or version != self._version or part not in self._outputs:
            outputs = self._products.linears(inputs, self.weights, self.biases)
            if outputs is None and not self._concurrent:
                return F.linear(inputs, self.weights[part], self.biases[part])
            self._inputs, self._version = inputs, version
            self._outputs = dict(enumerate(outputs or linears(inputs, self.weights, self.biases)))
        output = self._outputs.pop(part)
        if not self._outputs:
            self._inputs = None
        return output


class FusedProjections(TorchFunctionMode):
    """Context in which this thread computes products of few rows by a kernel, and projections of one input together.

    A function mode is thread-local and replaces no module, so passes of other threads are unaffected. Modules that the
    user has compiled keep their products: tracing this code would break their graphs. If `concurrent`, projections of
    one input run concurrently where the kernel does not serve them.
    """

    def __init__(self, model: nn.Module, *, concurrent: bool = True):
        super().__init__()
        self._products = RowProducts()
        groups = (_Group(parts, self._products, concurrent=concurrent) for parts in _groups(model))
        self._parts = {id(weight): (group, part) for group in groups for part, weight in enumerate(group.weights)}

    def __enter__(self) -> Any:
        self._here = self._products.here()
        self._here.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._here.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is LINEAR and not kwargs and not torch.compiler.is_compiling():
            inputs, weight, bias = args if len(args) > 2 else (*args, None)
            group, part = self._parts.get(id(weight), (None, 0))
            if group is not None and bias is group.biases[part]:  # modules that share a weight may not share it
                return group.output(inputs, part)
            if (outputs := self._products.linears(inputs, [weight], [bias])) is not None:
                return outputs[0]
        return func(*args, **(kwargs or {}))


def has_projections(model: nn.Module) -> bool:
    """Whether the model has projections of the same input to compute concurrently."""
    return next(_groups(model), None) is not None


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for parent in model.modules():
        for names in _TOGETHER:
            parts = [part for name in names if is_linear(part := parent._modules.get(name))]
            if len(parts) == len(names):
                yield parts
