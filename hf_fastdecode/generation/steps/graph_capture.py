"""Captures a forward pass in a CUDA graph: the context in which it runs, its streams and its memory.

cuBLAS keeps one workspace per stream, 32 MiB on Hopper, which PyTorch does not free by itself. All captures of a
device therefore use the same few streams, one capture at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import free_cublas_workspaces
from ...attention.active_passes import RowLengths
from ...kernels.ahead import compiled_ahead
from ...kernels.row_products.config import MOST_ROWS, fusing_products
from ...parallel.ranks import ALONE, Ranks
from ..fused.experts import LargestOfFew
from ..fused.norms import WaitingSums
from ..structure import Structure
from .projections import FusedProjections


@contextmanager
def pass_context(
    model: PreTrainedModel,
    structure: Structure,
    lengths: RowLengths,
    *,
    rows: int,
    fused_rows: int,
) -> Iterator[None]:
    """Context of a pass over `rows` rows of hidden states, before and during its capture.

    Layers run with fused modules. Unless `fused_rows` is 0, products are those of `FusedProjections`, and own layers
    are within `fusing_products`.
    """
    with ExitStack() as stack:
        stack.enter_context(structure.captured_overrides.installed())
        if fused_rows:
            stack.enter_context(fusing_products())
        stack.enter_context(structure.passing(lengths))
        if fused_rows and rows <= max(fused_rows, MOST_ROWS):
            stack.enter_context(FusedProjections(model, concurrent=rows <= fused_rows))
        if fused_rows and structure.fused is not None and structure.fused.has_experts:
            stack.enter_context(LargestOfFew())
        if structure.fused is not None:
            stack.enter_context(WaitingSums())  # last: it computes a sum before any branch of a graph
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
        with CAPTURING, context(), torch.cuda.device(device):
            stream = capture_stream(device)
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


def capture_first_pass(
    run: Callable[[], tuple[Tensor, ...]],
    model: PreTrainedModel,
    structure: Structure,
    lengths: RowLengths,
    pool: Any,
    *,
    rows: int,
    fused_rows: int,
) -> CapturedGraph:
    """Capture a pass over prompts, whose first run finds the shapes of its buffers.

    Args:
        rows: Tokens that the pass computes, and so the rows of its products.
        fused_rows: See `pass_context`.
    """
    context = partial(pass_context, model, structure, lengths, rows=rows, fused_rows=fused_rows)
    if model.device.type != "cuda":  # where a capture runs it first
        with context():
            run()
    return CapturedGraph(run, context, model.device, pool)


CAPTURING = threading.RLock()
"""Held during a capture: all models share a device's capture streams."""


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Stream for capturing steps."""
    return torch.cuda.Stream(device)


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


def free_memory(device: torch.device) -> int:
    """Free bytes on a CUDA device, including PyTorch's cached memory; 0 on other devices."""
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached  # which asks the driver: up to some milliseconds


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
