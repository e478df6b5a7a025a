"""Reference (the specification): attention of the queries of a schedule in fp64, over whole paths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .schedule import Queries


def attend(
    query: Tensor,
    runs: Sequence[tuple[Tensor, Tensor]],
    queries: Sequence[Queries],
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``out`` ``[queries, heads, head_dim]`` and ``lse`` ``[heads, queries]``, fp64; see `api.attend`."""
    outs, lses, done = [], [], 0
    for one in queries:
        keys, values = (torch.cat([runs[run][part] for run in one.path], 1).double() for part in (0, 1))
        own = query[done : done + one.count].double().transpose(0, 1)
        group = len(own) // len(keys)
        age = (one.position + torch.arange(one.count))[:, None] - torch.arange(keys.shape[1])
        hidden = (age < 0) | (age >= (keys.shape[1] if window is None else window))
        scores = (own @ keys.repeat_interleave(group, 0).mT * scale).masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ values.repeat_interleave(group, 0)).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
        done += one.count
    return torch.cat(outs), torch.cat(lses, 1)
