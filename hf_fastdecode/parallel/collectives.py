"""Collectives of contexts that are divided between processes: gathered tokens, and merged attention (Tree Attention).

In each layer of a step, each rank attends to its own tokens, and writes the partial to a flat buffer ``[out | lse]``.
The buffers of all ranks are gathered by one collective, and each rank merges them in the order of ranks: all get the
same bits. The paper reduces a maximum, a numerator and a denominator in three collectives, and leaves the order of
sums to the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.kv import Segment
from ..attention.partial import Partial
from ..kernels.device import interpreted, triton_is_installed
from ..kernels.failures import KernelFailedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_gather(found: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Gather the elements of each process, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(found, own, group=group)


def gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """``[ranks, elements]``: those of each process in order of ranks, as many on all; `own` is contiguous."""
    found = own.new_empty(group.size() * own.numel())
    all_gather(found, own.view(-1), group=group)
    return found.view(group.size(), -1)


def gathered_tokens(own: Segment, longest: int, order: Tensor, group: ProcessGroup) -> Segment:
    """Keys and values ``[kv_heads, tokens, head_dim]`` that all processes have; one collective.

    Args:
        own: Those of this process, ``[kv_heads, own, head_dim]`` each.
        longest: Most tokens of a process.
        order: ``[tokens]`` int64, on the CPU: for each token, rank and index there, as rank * `longest` + index.
    """
    shapes = [(longest, part.shape[0], part.shape[2]) for part in own]
    sizes = list(map(prod, shapes))
    sent = own.keys.new_zeros(sum(sizes))
    for slot, shape, part in zip(sent.split(sizes), shapes, own, strict=True):
        slot.view(shape)[: part.shape[1]] = part.transpose(0, 1)
    by_rank = gathered(sent, group)
    order = order.to(by_rank.device)
    return Segment._make(
        part.reshape(-1, *shape[1:]).index_select(0, order).transpose(0, 1)
        for part, shape in zip(by_rank.split(sizes, dim=1), shapes, strict=True)
    )


class PartialBuffer(NamedTuple):
    """A partial in one piece of memory, to be sent as it is.

    Attributes:
        flat: ``[elements]`` fp32 (fp64 for fp64 partials): all of ``out``, then all of ``lse``.
        partial: Views of it, to be written: ``out`` ``[..., head_dim]`` and ``lse`` ``[...]``.
    """

    flat: Tensor
    partial: Partial


def partial_buffer(
    shape: Sequence[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PartialBuffer:
    """An uninitialized buffer of a partial whose ``out`` has this shape.

    Every element of it must be written, also by a rank without a key: ``(0, -inf)``, see `empty_partial`.
    """
    flat = torch.empty(prod(shape) + prod(shape[:-1]), dtype=dtype, device=device)
    elements = prod(shape)
    return PartialBuffer(flat, Partial(flat[:elements].view(*shape), flat[elements:].view(*shape[:-1])))


def merged(buffers: Tensor, shape: Sequence[int]) -> Partial:
    """The partial over the keys of all ranks: ``lse = logsumexp(lse_r)``, ``out = sum(exp(lse_r - lse) out_r)``.

    The sums are in the order of ranks. An empty shard has weight 0, and all empty ones stay ``(0, -inf)``.

    Args:
        buffers: ``[ranks, elements]`` fp32: the `PartialBuffer.flat` of each rank.
        shape: That of ``out``.
    """
    elements = prod(shape)
    out, lse = buffers[:, :elements].view(-1, *shape), buffers[:, elements:].view(-1, *shape[:-1])
    largest = lse.amax(0).clamp_min(torch.finfo(lse.dtype).min)  # -inf - (-inf) would be nan
    weights = (lse - largest).exp()
    total = weights.sum(0)
    mean = (weights[..., None] * out).sum(0) / total.clamp_min(torch.finfo(lse.dtype).tiny)[..., None]
    return Partial(mean, largest + total.log())


def merge_over(group: ProcessGroup, buffer: PartialBuffer, dtype: torch.dtype | None = None) -> Partial:
    """The partial over the keys of all ranks of a group, bitwise the same on all of them; one collective.

    Args:
        buffer: That over the keys of this rank.
        dtype: Of the result's ``out``; the buffer's when None.
    """
    by_rank, like = gathered(buffer.flat, group), buffer.partial
    if triton_is_installed() and _by_kernel(by_rank):
        from ..kernels.forest_decode.merge import merge_ranks

        found = Partial(torch.empty_like(like.out, dtype=dtype), torch.empty_like(like.lse))
        try:
            merge_ranks(by_rank, found.out, found.lse)
            return found
        except KernelFailedError:  # on this rank alone, whose last bits then differ; rank 0 draws the tokens
            pass
    found = merged(by_rank, like.out.shape)
    return Partial(found.out.to(dtype or like.out.dtype), found.lse)


def _by_kernel(partials: Tensor) -> bool:
    """Whether a kernel merges: alike on all ranks, which would otherwise differ in the last bits."""
    return partials.dtype == torch.float32 and (partials.is_cuda or interpreted())
