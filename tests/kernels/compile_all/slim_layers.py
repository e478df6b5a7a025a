"""Launches of the kernels of slim layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.cached_numbers import stored_bytes
from hf_fastdecode.kernels.slim_append import append_token
from hf_fastdecode.kernels.slim_decode.api import RotaryTables, Scales, slim_decode
from hf_fastdecode.kernels.slim_decode.config import choose_two_launch_config
from hf_fastdecode.kernels.slim_decode.inputs import FP8_CAPABILITY
from hf_fastdecode.kernels.stored_product import MOST_ROWS, Term, stored_product

from .pretended import CUDA, Claimed, made


def attend_to_slim_caches() -> None:
    """A slim layer's step at many shapes, in two launches."""
    layouts = product(
        ((4, 64), (32, 64), (3, 80), (12, 128), (32, 128), (40, 128), (16, 256)),  # heads, head_dim
        (0, 16, 512),  # V-coordinates
        (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn),
    )
    features = cycle(product((0.0, 0.5, 1.0), (False, True), (1, 9)))
    takes_fp8 = torch.cuda.get_device_capability(CUDA) >= FP8_CAPABILITY
    memory = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    for ((heads, head_dim), rank, dtype), (rotated, more, rows) in zip(layouts, features):
        if dtype == torch.float8_e4m3fn and not takes_fp8:
            continue
        columns, tables = heads * head_dim, int(rotated * head_dim) // 2

        table, query = made(rows if more else 1, 4096, tables), made(rows, heads, 1, head_dim)
        numbers = made(rows, dtype=torch.int32)
        (keys, of_keys), (coordinates, of_coordinates) = (
            slim_part(rows, width, head_dim, dtype) for width in (columns, rank)
        )
        config = choose_two_launch_config(heads, head_dim, rank, dtype, shared_memory=memory)
        for changes in ({}, {"parts": 1}):
            slim_decode(
                query,
                keys,
                coordinates,
                numbers,
                replace(config, **changes),
                scale=0.1,
                key_offset=made(columns) if more else None,
                rotary=RotaryTables(table, table) if tables else None,
                starts=numbers if more else None,
                scales=Scales(of_keys, of_coordinates) if dtype.itemsize == 1 else None,
            )


def append_to_slim_caches() -> None:
    """One token of each row, whose query is rotated."""
    layouts = product(((32, 128, 128), (12, 80, 32)), (0, 512), (1, 5), (torch.float16, torch.bfloat16))
    for (heads, head_dim, rotary), rank, rows, dtype in layouts:
        columns = heads * head_dim
        fp32 = {width: made(rows, width) for width in (columns, rank, rotary)}
        stored = [made(rows, 4096, width, dtype=dtype) for width in (columns, rank)]
        slots = made(rows, dtype=torch.int64)
        query = fp32[columns].view(rows, heads, head_dim)
        offset, tables = fp32[columns][0].as_subclass(Claimed), (fp32[rotary], fp32[rotary])
        append_token(query, fp32[columns], fp32[rank], offset, tables, slots, tuple(stored))


def multiply_by_stored_matrices() -> None:
    """Values of averages, and V-coordinates of inputs."""
    shapes = product((1, 5, 33, MOST_ROWS), ((1, 512), (32, 128), (3, 80)), (torch.float32, torch.bfloat16))
    for (rows, (groups, columns), dtype), second, in_range in product(shapes, (0, 48), (False, True)):
        terms = [
            Term(
                made(rows, groups, width, dtype=dtype),
                made(width, groups * columns, dtype=torch.float16),
                made(groups * columns),
            )
            for width in (4096, second)
            if width
        ]
        for result in (torch.float32, torch.bfloat16):
            stored_product(terms, terms[0].scales if second else None, in_range=in_range, dtype=result)


def slim_part(rows: int, width: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of a slim cache, and the scales behind those of 8 bits."""
    size = stored_bytes(width, dtype, head_dim) // dtype.itemsize
    stored = made(rows, 4096, size, dtype=dtype)
    scales = stored[..., width:].view(torch.uint8)[..., : 2 * -(-width // head_dim)]  # behind which there may be room
    return stored[..., :width].as_subclass(Claimed), scales.as_subclass(Claimed)
