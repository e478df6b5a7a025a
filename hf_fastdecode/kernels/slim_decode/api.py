"""`slim_decode`: attention of one decode step over a slim cache, before its averages are multiplied by ``W_KV``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..failures import Kernel, launching
from ..forest_decode.arguments import check_table
from ..forest_decode.limits import multiprocessors, shared_memory
from ..forest_decode.node_kernel import LOG2E
from ..installed import interpreted
from .config import SlimConfig, choose_slim_config, padded_heads, rank_block
from .exchange import HEADER
from .merge import merge_pieces
from .partials import AVERAGES, BOTH, SCORES, slim_partials

__all__ = ["SlimConfig", "SlimPartial", "SlimWorkspace", "choose_slim_config", "slim_decode"]

_RING = 8  # tiles of scores that a group exchanges: at least 2 * lag + 4


class SlimPartial(NamedTuple):
    """Attention over a slim cache; merges with attention to other keys by its log-sum-exp.

    Attributes:
        keys: ``[rows, heads, e]`` fp32: averages of the cached keys, less the key offset, over all columns.
        coordinates: ``[rows, heads, r]`` fp32: averages of the V-coordinates.
        lse: ``[rows, heads]`` fp32: natural-log log-sum-exp of the scores; ``-inf`` for rows without tokens.
    """

    keys: Tensor
    coordinates: Tensor
    lse: Tensor


@dataclass(frozen=True)
class SlimWorkspace:
    """Memory of the exchange of scores. Any shapes and layers may share it, but launches that overlap must not.

    Attributes:
        words: int64, zeros at first: the tag that was used last, and words of scores, from `HEADER` on.
    """

    words: Tensor

    @classmethod
    def make(cls, heads: int, config: SlimConfig, device: torch.device) -> SlimWorkspace:
        """Memory for a layer's heads and configuration."""
        return cls(torch.zeros(_words(heads, config, device), dtype=torch.int64, device=device))


def slim_decode(
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    lengths: Tensor,
    config: SlimConfig | None = None,
    *,
    scale: float,
    key_offset: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    starts: Tensor | None = None,
    workspace: SlimWorkspace | None = None,
) -> SlimPartial:
    """Attend with one query per row, and average the cached keys of all heads for each head.

    Slim attention, section 3 and eq. 2.1: values follow from keys, ``V = K W_KV``, so that attention is
    ``(softmax(Q K^T) K) W_KV``; the product with ``W_KV`` is the caller's. ``score[h, t] = scale * query[h] .
    RoPE_t(keys[t, h] + key_offset[h])``. Keys are read from device memory once. Work is split into equal shares of the
    tokens of all rows (LeanAttention, section 4). Results are bitwise reproducible on one device.

    Lengths and starts are read on the device, so that a captured CUDA graph follows growing lengths. Programs wait for
    one another: launches on other streams delay this one, but do not block it as long as they end.

    Args:
        query: ``[rows, heads, 1, head_dim]``, fp32 or the keys' dtype, rotated; the last dimension contiguous.
        keys: ``[rows, slots, heads * head_dim]``, fp16, bf16 or fp32: before RoPE, less `key_offset`; the last
            dimension contiguous, rows and slots at multiples of 16 bytes.
        coordinates: ``[rows, slots, r]``, likewise; r may be 0.
        lengths: ``[rows]`` int32: slots of each row that are filled, at most ``slots``.
        config: Launch parameters; chosen by shape and dtype when None.
        scale: Factor on the scores, positive.
        key_offset: ``[heads * head_dim]`` fp32, when given.
        rotary: ``cos`` and ``sin``, each ``[rows or 1, slots, rotary_dim / 2]`` fp32, contiguous: "rotate half" over
            the first ``rotary_dim`` numbers of a head; None without RoPE.
        starts: ``[rows]`` int32: first slot of each row that is not padding; 0 when None.
        workspace: Memory of the exchange, for CUDA graphs and to save a memset; made when None.

    Returns:
        Averages and log-sum-exp; 0 and ``-inf`` for rows without tokens.

    Raises:
        ValueError: A shape, stride, dtype or number is not as documented.
        KernelFailedError: A kernel cannot be compiled or launched here.
    """
    _check(query, keys, coordinates, lengths, scale, key_offset, rotary, starts)
    rows, heads, _, head_dim = query.shape
    slots, rank = keys.shape[1], coordinates.shape[2]
    device = keys.device
    if config is None:
        config = choose_slim_config(
            heads,
            head_dim,
            rank,
            keys.dtype,
            shared_memory=shared_memory(device),
            fused=not interpreted(),
        )
    members = -(-heads // config.own_heads)
    groups = _groups(heads, config, device)
    _check_config(config, members, groups)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    result = SlimPartial(
        torch.empty(rows, heads, heads * head_dim, **fp32),
        torch.empty(rows, heads, rank, **fp32),
        torch.empty(rows, heads, **fp32),
    )
    if not rows:
        return result
    block_h = padded_heads(heads)
    pieces = groups + rows - 1
    part_out = torch.empty(pieces, heads, heads * head_dim + rank, **fp32)
    part_lse = torch.empty(pieces, heads, **fp32)
    if config.fused:
        workspace = workspace or SlimWorkspace.make(heads, config, device)
        words, scores = workspace.words, part_lse
        if words.numel() < (needed := _words(heads, config, device)) or words.device != device:
            raise ValueError(
                f"the workspace must have {needed} words on {device}, got {words.numel()}, {words.device}"
            )
        launches = [(BOTH.value, config.lag)]
    else:
        words = lengths
        scores = torch.empty(rows * triton.cdiv(slots, config.block_t), block_h, config.block_t, **fp32)
        launches = [(SCORES.value, 0), (AVERAGES.value, config.lag)]
    cos, sin = rotary or (part_lse, part_lse)
    rotary_dim = 2 * cos.shape[2] if rotary else 0
    shared: dict[str, Any] = {
        "HEADS": heads,
        "RANK": rank,
        "STARTS": starts is not None,
        "BLOCK_T": config.block_t,
        "BLOCK_ROWS": triton.next_power_of_2(rows),
        "enable_fp_fusion": True,  # Triton 3.9 warns about the default, which 3.10 changes
    }
    row_starts = lengths if starts is None else starts
    with launching(Kernel.SLIM, device):
        for phase, lag in launches:
            slim_partials[(groups * members,)](
                query,
                keys,
                coordinates,
                part_lse if key_offset is None else key_offset,
                cos,
                sin,
                row_starts,
                lengths,
                words,
                scores,
                part_out,
                part_lse,
                rows,
                groups,
                scale * LOG2E.value,
                *query.stride()[:2],
                *keys.stride()[:2],
                *coordinates.stride()[:2],
                cos.stride(0) if rotary and cos.shape[0] > 1 else 0,
                HEAD_DIM=head_dim,
                ROTARY=rotary_dim,
                OFFSET=key_offset is not None,
                MEMBERS=members,
                OWN=config.own_heads,
                HALF=triton.next_power_of_2(head_dim // 2),
                BLOCK_H=block_h,
                BLOCK_R=rank_block(rank, members),
                LAG=lag,
                RING=_RING,
                KEEP=config.keep,
                PARTS=1 if keys.dtype == torch.float32 else config.parts,
                APART=config.apart,
                TRANSPOSED=config.transposed,
                WIDE=keys.dtype == torch.bfloat16 and interpreted(),  # whose products of bf16 are wrong
                SHIFT=14 if keys.dtype == torch.float16 else 0,
                PACK=max(1, min(4, block_h * config.block_t // (32 * config.warps))),
                PHASE=phase,
                STAGES=config.stages,
                num_warps=config.warps,
                maxnreg=min(255, 65536 // (32 * config.warps)),  # all, as there is one program per multiprocessor
                **shared,
            )
        block = 512
        merge_pieces[(rows * heads, triton.cdiv(heads * head_dim, block) + triton.cdiv(rank, block))](
            part_out,
            part_lse,
            row_starts,
            lengths,
            words,
            *result,
            rows,
            groups,
            KEYS=heads * head_dim,
            BLOCK=block,
            MERGE=4 if not interpreted() else 1,
            TAGS=config.fused,
            num_warps=4,
            **shared,
        )
    return result


def _groups(heads: int, config: SlimConfig, device: torch.device) -> int:
    return (config.programs or multiprocessors(device)) // -(-heads // config.own_heads)


def _words(heads: int, config: SlimConfig, device: torch.device) -> int:
    return int(HEADER.value) + _groups(heads, config, device) * _RING * padded_heads(heads) * config.block_t


def _check(
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    lengths: Tensor,
    scale: float,
    key_offset: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    starts: Tensor | None,
) -> None:
    """Check against out-of-bounds accesses; contents of device tensors are not checked."""
    if query.ndim != 4 or query.shape[2] != 1 or query.shape[3] % 2:
        raise ValueError(f"query must be [rows, heads, 1, head_dim] with an even head_dim, got {list(query.shape)}")
    rows, heads, _, head_dim = query.shape
    if keys.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"keys must be fp16, bf16 or fp32, got {keys.dtype}")
    if query.dtype not in (torch.float32, keys.dtype) or query.stride(3) != 1:
        raise ValueError(
            f"query must be float32 or {keys.dtype}, contiguous in the last dimension, got {query.dtype} with strides "
            f"{query.stride()}"
        )
    slots = keys.shape[1] if keys.ndim == 3 else -1
    for name, part, width in (("keys", keys, heads * head_dim), ("coordinates", coordinates, -1)):
        wanted = width if width >= 0 else part.shape[-1]
        if part.shape != (rows, slots, wanted) or part.dtype != keys.dtype:
            raise ValueError(
                f"{name} must be [{rows}, {slots}, {'r' if width < 0 else width}] {keys.dtype}, got "
                f"{list(part.shape)} {part.dtype}"
            )
        if wanted and part.stride(2) != 1:
            raise ValueError(f"{name} must be contiguous in the last dimension, got strides {part.stride()}")
    size = keys.element_size()
    if any(stride * size % 16 for stride in keys.stride()[:2]) or keys.data_ptr() % 16:
        raise ValueError(f"rows and slots of keys must begin at multiples of 16 bytes, got strides {keys.stride()}")
    check_table("lengths", lengths, (rows,), torch.int32)
    if starts is not None:
        check_table("starts", starts, (rows,), torch.int32)
    if key_offset is not None:
        check_table("key_offset", key_offset, (heads * head_dim,), torch.float32)
    if rotary is not None:
        half = rotary[0].shape[-1]
        if not 0 < half <= head_dim // 2:
            raise ValueError(f"rotary tables must have 1 to {head_dim // 2} columns, got {half}")
        for name, table in zip(("cos", "sin"), rotary):
            of_rows = rows if table.shape[0] != 1 else 1
            check_table(name, table, (of_rows, slots, half), torch.float32)
        if rotary[0].shape != rotary[1].shape:
            raise ValueError(f"cos and sin must have one shape, got {rotary[0].shape} and {rotary[1].shape}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")


def _check_config(config: SlimConfig, members: int, groups: int) -> None:
    for name, value, least in (("own_heads", config.own_heads, 1), ("block_t", config.block_t, 16)):
        if value < least or value & (value - 1):
            raise ValueError(f"{name} must be a power of 2 from {least}, got {value}")
    if config.lag not in (1, 2):
        raise ValueError(f"lag must be 1 or 2, got {config.lag}")
    if config.parts not in (1, 2):
        raise ValueError(f"parts must be 1 or 2, got {config.parts}")
    if not groups:
        raise ValueError(f"a group needs {members} programs that run at the same time; raise own_heads")
    if config.fused and interpreted():
        raise ValueError("fused programs wait for one another, which interpreted ones cannot; choose fused=False")
