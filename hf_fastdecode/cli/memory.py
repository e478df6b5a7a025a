"""Whether the rows of a call fit into memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hf_fastdecode.cache.accounting import KVSizes

from ..errors import InputError
from .console import bytes_text
from .sampling import Sampling

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def check_memory(model: Any, input_ids: Tensor, sampling: Sampling, *, shared: bool) -> None:
    """Refuse rows that the memory cannot hold.

    On a GPU only what the first step takes is counted, since rows that end early make room. On the CPU all keys and
    values count: there the system ends a process that takes too much, without an error. `input_ids` are
    ``[prompts, length]``; with `shared`, prompts are stored once.
    """
    prompts, length = input_ids.shape
    rows = prompts * sampling.n
    vocabulary = model.get_input_embeddings().weight.shape[0]
    needed = rows * (8 * (length + sampling.max_new_tokens) + 4 * vocabulary)  # token ids, and float32 logits
    if model.device.type == "cpu":
        needed += _kv_bytes(model, prompts, length, sampling, shared)
    if needed > (memory := _memory(model.device)):
        raise InputError(
            f"{_rows(rows, sampling)} need up to {bytes_text(needed)} of memory, {model.device} has "
            f"{bytes_text(memory)}; lower --n or --max-new-tokens"
        )


def memory_error(rows: int, sampling: Sampling, device: torch.device) -> InputError:
    """The error for a call whose allocation failed."""
    return InputError(f"{_rows(rows, sampling)} do not fit in the memory of {device}; lower --n or --max-new-tokens")


def _rows(rows: int, sampling: Sampling) -> str:
    return f"{rows:,} completion{'' if rows == 1 else 's'} of up to {sampling.max_new_tokens:,} tokens"


def _kv_bytes(model: Any, prompts: int, length: int, sampling: Sampling, shared: bool) -> int:
    try:
        shape = KVSizes.from_config(model.config)
    except ValueError:  # not a cache of keys and values alone
        return 0
    stored = shape.kv_bytes(sampling.n, length, sampling.max_new_tokens, model.dtype.itemsize)
    return prompts * (stored.shared if shared else stored.stock)


def _memory(device: torch.device) -> int:
    """Bytes that there are, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        return total
