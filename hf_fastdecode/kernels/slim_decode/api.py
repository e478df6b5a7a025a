"""`slim_decode`: attention of one decode step over a slim cache, before its averages are multiplied by ``W_KV``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..cuda_module import cuda_bindings_are_installed
from ..failures import Kernel, launching
from ..forest_decode.arguments import check_table
from ..forest_decode.limits import compute_capability, multiprocessors, shared_memory
from ..forest_decode.node_kernel import LOG2E
from ..installed import interpreted
from .cluster import ClusterConfig, ClusterShape, cluster_kernel
from .config import SlimConfig, choose_cluster_config, choose_slim_config, padded_heads, rank_block
from .merge import merge_pieces
from .partials import AVERAGES, SCORES, slim_partials
from .tables import TURNS, RotaryTables

__all__ = [
    "ClusterConfig",
    "RotaryTables",
    "SlimConfig",
    "SlimPartial",
    "choose_config",
    "slim_decode",
]


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


def choose_config(
    heads: int,
    head_dim: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rotary: RotaryTables | None = None,
    offset: bool = False,
) -> SlimConfig | ClusterConfig:
    """Launch parameters for a layer on a device: on clusters where the GPU has them and the kernel takes the shape."""
    memory = shared_memory(device)
    if rotary is None or rotary.turns is not None:
        rotary_dim = 2 * rotary.cos.shape[-1] if rotary else 0
        config = choose_cluster_config(
            heads, head_dim, rank, rotary_dim=rotary_dim, offset=offset and rotary is not None, shared_memory=memory
        )
        if config is not None and dtype != torch.float32 and _has_clusters(device):
            return config
    return choose_slim_config(heads, head_dim, rank, dtype, shared_memory=memory)


def _has_clusters(device: torch.device) -> bool:
    return not interpreted() and compute_capability(device) >= (9, 0) and cuda_bindings_are_installed()


def slim_decode(
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    lengths: Tensor,
    config: SlimConfig | ClusterConfig | None = None,
    *,
    scale: float,
    key_offset: Tensor | None = None,
    rotary: RotaryTables | None = None,
    starts: Tensor | None = None,
) -> SlimPartial:
    """Attend with one query per row, and average the cached keys of all heads for each head.

    Slim attention, section 3 and eq. 2.1: values follow from keys, ``V = K W_KV``, so that attention is
    ``(softmax(Q K^T) K) W_KV``; the product with ``W_KV`` is the caller's. ``score[h, t] = scale * query[h] .
    RoPE_t(keys[t, h] + key_offset[h])``. On thread block clusters keys are read from device memory once, in two
    launches twice. Work is split into equal shares of the tokens of all rows (LeanAttention, section 4). Results
    are bitwise reproducible on one device.

    Lengths and starts are read on the device, so that a captured CUDA graph follows growing lengths.

    Args:
        query: ``[rows, heads, 1, head_dim]``, fp32 or the keys' dtype, rotated; the last dimension contiguous.
        keys: ``[rows, slots, heads * head_dim]``, fp16, bf16 or fp32: before RoPE, less `key_offset`; the last
            dimension contiguous, rows and slots at multiples of 16 bytes.
        coordinates: ``[rows, slots, r]``, for clusters likewise; r may be 0.
        lengths: ``[rows]`` int32: slots of each row that are filled, at most ``slots``.
        config: Launch parameters; chosen by shape and dtype when None.
        scale: Factor on the scores, positive.
        key_offset: ``[heads * head_dim]`` fp32, when given.
        rotary: Tables of RoPE; None without it. Clusters need ``turns``.
        starts: ``[rows]`` int32: first slot of each row that is not padding; 0 when None.

    Returns:
        Averages and log-sum-exp; 0 and ``-inf`` for rows without tokens.

    Raises:
        ValueError: A shape, stride, dtype or number is not as documented.
        KernelFailedError: A kernel cannot be compiled or launched here.
    """
    _check(query, keys, coordinates, lengths, scale, key_offset, rotary, starts)
    rows, heads, _, head_dim = query.shape
    rank = coordinates.shape[2]
    device = keys.device
    if config is None:
        options: dict[str, Any] = {"rotary": rotary, "offset": key_offset is not None}
        config = choose_config(heads, head_dim, rank, keys.dtype, device, **options)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    result = SlimPartial(
        torch.empty(rows, heads, heads * head_dim, **fp32),
        torch.empty(rows, heads, rank, **fp32),
        torch.empty(rows, heads, **fp32),
    )
    if not rows:
        return result
    if isinstance(config, SlimConfig):
        _check_config(config, *_groups(config, heads, device))
    else:
        _check_alignment("coordinates", coordinates)
        if rotary is not None and (rotary.turns is None or 2 * rotary.cos.shape[2] != head_dim):
            raise ValueError("clusters need tables of RoPE with turns, of whole heads; pass a SlimConfig")
    inputs = _Inputs(query, keys, coordinates, lengths, scale, key_offset, rotary, starts)
    with launching(Kernel.SLIM, device):
        if isinstance(config, ClusterConfig):
            groups, tile, parts = _on_clusters(inputs, config)
        else:
            groups, tile, parts = _in_two_launches(inputs, config)
        block = 512
        merge_pieces[(rows * heads, triton.cdiv(heads * head_dim, block) + triton.cdiv(rank, block))](
            *parts,
            inputs.first_slots,
            lengths,
            *result,
            rows,
            groups,
            KEYS=heads * head_dim,
            BLOCK=block,
            MERGE=4 if not interpreted() else 1,
            HEADS=heads,
            RANK=rank,
            STARTS=starts is not None,
            BLOCK_T=tile,
            BLOCK_ROWS=triton.next_power_of_2(rows),
            num_warps=4,
        )
    if isinstance(config, ClusterConfig) and rotary is None and key_offset is not None:
        # Without RoPE the offset adds one number to all scores of a head.
        heads_of_offset = key_offset.view(heads, head_dim)
        result.lse.add_((query[:, :, 0].float() * heads_of_offset).sum(-1), alpha=scale)
    return result


class _Inputs(NamedTuple):
    """Checked arguments of `slim_decode`."""

    query: Tensor
    keys: Tensor
    coordinates: Tensor
    lengths: Tensor
    scale: float
    key_offset: Tensor | None
    rotary: RotaryTables | None
    starts: Tensor | None

    @property
    def first_slots(self) -> Tensor:
        """Starts, or any table of this type where kernels do not read them."""
        return self.lengths if self.starts is None else self.starts

    @property
    def table_row_stride(self) -> int:
        """Numbers between the tables of two rows; 0 for tables of all rows."""
        return self.rotary.cos.stride(0) if self.rotary is not None and self.rotary.cos.shape[0] > 1 else 0

    def parts(self, groups: int) -> tuple[Tensor, Tensor]:
        """Memory for the pieces: averages ``[pieces, heads, e + r]``, and base-2 log-sum-exp ``[pieces, heads]``."""
        pieces, heads = groups + self.query.shape[0] - 1, self.query.shape[1]
        width = self.keys.shape[2] + self.coordinates.shape[2]
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": self.keys.device}
        return torch.empty(pieces, heads, width, **fp32), torch.empty(pieces, heads, **fp32)


_Launched = tuple[int, int, tuple[Tensor, Tensor]]
"""Groups, tokens per tile, and what their pieces hold."""


def _on_clusters(inputs: _Inputs, config: ClusterConfig) -> _Launched:
    query, keys, coordinates, rotary = inputs.query.float(), inputs.keys, inputs.coordinates, inputs.rotary
    rows, heads, _, head_dim = query.shape
    device, size = keys.device, keys.element_size()
    offset = inputs.key_offset if rotary is not None else None
    shape = ClusterShape(
        heads,
        head_dim,
        coordinates.shape[2],
        rotary is not None,
        offset is not None,
        inputs.starts is not None,
        keys.dtype == torch.bfloat16,
        config,
    )
    kernel, clusters = cluster_kernel(shape, device)
    groups = min(clusters, config.clusters or clusters)
    averages, lse = parts = inputs.parts(groups)
    cos, sin, turns = (lse, lse, lse) if rotary is None else (rotary.cos, rotary.sin, rotary.turns)
    kernel.launch(
        groups * config.members,
        [
            query,
            keys,
            coordinates,
            lse if offset is None else offset,
            cos,
            sin,
            turns if turns is not None else lse,
            inputs.first_slots,
            inputs.lengths,
            averages,
            lse,
            rows,
            keys.shape[1],
            inputs.scale * LOG2E.value,
            *query.stride()[:2],
            *(stride * size for stride in keys.stride()[:2]),
            *(stride * size for stride in coordinates.stride()[:2]),
            inputs.table_row_stride,
        ],
        device,
    )
    return groups, config.tile, parts


def _groups(config: SlimConfig, heads: int, device: torch.device) -> tuple[int, int]:
    """Programs per group, and groups."""
    members = -(-heads // config.own_heads)
    return members, (config.programs or multiprocessors(device)) // members


def _in_two_launches(inputs: _Inputs, config: SlimConfig) -> _Launched:
    query, keys, coordinates, rotary = inputs.query, inputs.keys, inputs.coordinates, inputs.rotary
    rows, heads, _, head_dim = query.shape
    rank, device = coordinates.shape[2], keys.device
    members, groups = _groups(config, heads, device)
    block_h = padded_heads(heads)
    averages, lse = parts = inputs.parts(groups)
    tiles = rows * triton.cdiv(keys.shape[1], config.block_t)
    scores = torch.empty(tiles, block_h, config.block_t, dtype=torch.float32, device=device)
    cos, sin = (lse, lse) if rotary is None else rotary[:2]
    for phase in (SCORES, AVERAGES):
        slim_partials[(groups * members,)](
            query,
            keys,
            coordinates,
            lse if inputs.key_offset is None else inputs.key_offset,
            cos,
            sin,
            inputs.first_slots,
            inputs.lengths,
            scores,
            averages,
            lse,
            rows,
            groups,
            inputs.scale * LOG2E.value,
            *query.stride()[:2],
            *keys.stride()[:2],
            *coordinates.stride()[:2],
            inputs.table_row_stride,
            HEADS=heads,
            HEAD_DIM=head_dim,
            ROTARY=2 * cos.shape[2] if rotary is not None else 0,
            RANK=rank,
            OFFSET=inputs.key_offset is not None,
            STARTS=inputs.starts is not None,
            MEMBERS=members,
            OWN=config.own_heads,
            HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_H=block_h,
            BLOCK_R=rank_block(rank, members),
            BLOCK_T=config.block_t,
            BLOCK_ROWS=triton.next_power_of_2(rows),
            PARTS=1 if keys.dtype == torch.float32 else config.parts,
            APART=config.apart,
            TRANSPOSED=config.transposed,
            WIDE=keys.dtype == torch.bfloat16 and interpreted(),  # whose products of bf16 are wrong
            SHIFT=14 if keys.dtype == torch.float16 else 0,
            PHASE=phase.value,
            STAGES=config.stages,
            num_warps=config.warps,
            maxnreg=min(255, 65536 // (32 * config.warps)),  # all, as there is one program per multiprocessor
            enable_fp_fusion=True,  # Triton 3.9 warns about the default, which 3.10 changes
        )
    return groups, config.block_t, parts


def _check(
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    lengths: Tensor,
    scale: float,
    key_offset: Tensor | None,
    rotary: RotaryTables | None,
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
    _check_alignment("keys", keys)
    check_table("lengths", lengths, (rows,), torch.int32)
    if starts is not None:
        check_table("starts", starts, (rows,), torch.int32)
    if key_offset is not None:
        check_table("key_offset", key_offset, (heads * head_dim,), torch.float32)
    if rotary is not None:
        half = rotary[0].shape[-1]
        if not 0 < half <= head_dim // 2:
            raise ValueError(f"rotary tables must have 1 to {head_dim // 2} columns, got {half}")
        if rotary.turns is not None:
            check_table("turns", rotary.turns, (TURNS, 2, half), torch.float32)
        for name, table in zip(("cos", "sin"), rotary[:2]):
            of_rows = rows if table.shape[0] != 1 else 1
            check_table(name, table, (of_rows, slots, half), torch.float32)
        if rotary[0].shape != rotary[1].shape:
            raise ValueError(f"cos and sin must have one shape, got {rotary[0].shape} and {rotary[1].shape}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")


def _check_alignment(name: str, part: Tensor) -> None:
    size = part.element_size()
    if part.numel() and (any(stride * size % 16 for stride in part.stride()[:2]) or part.data_ptr() % 16):
        raise ValueError(f"rows and slots of {name} must begin at multiples of 16 bytes, got strides {part.stride()}")


def _check_config(config: SlimConfig, members: int, groups: int) -> None:
    for name, value, least in (("own_heads", config.own_heads, 1), ("block_t", config.block_t, 16)):
        if value < least or value & (value - 1):
            raise ValueError(f"{name} must be a power of 2 from {least}, got {value}")
    if config.parts not in (1, 2):
        raise ValueError(f"parts must be 1 or 2, got {config.parts}")
    if not groups:
        raise ValueError(f"a group needs {members} programs; raise own_heads or programs")
