"""Counts what a process sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_fastdecode.parallel import shards


@contextmanager
def counted_sends(ranks: int) -> Iterator[list[int]]:
    """Within, the bytes that this process sends by collectives and to neighbours are added to the list.

    An all-gather sends what a rank gives to each of the others, an all-reduce its part and its sums to all:
    ``2 (p - 1) / p`` of its bytes (the paper's equation 12).
    """
    sent: list[int] = []
    all_gather, all_reduce, batch = shards.all_gather, dist.all_reduce, dist.batch_isend_irecv

    def gather(out: torch.Tensor, given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        sent.append((ranks - 1) * given.nbytes)
        return all_gather(out, given, *rest, **named)

    def reduce(given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        sent.append(2 * (ranks - 1) * given.nbytes // ranks)
        return all_reduce(given, *rest, **named)

    def send(operations: list[Any]) -> Any:
        sent.extend(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return batch(operations)

    with (
        patch.object(shards, "all_gather", gather),
        patch.object(dist, "all_reduce", reduce),
        patch.object(dist, "batch_isend_irecv", send),
    ):
        yield sent
