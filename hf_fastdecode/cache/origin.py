"""Which weights a cache's keys and values were made with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_EACH = 4
"""Numbers remembered of each parameter, spread over it."""


class Origin:
    """A model's weights as they were when it filled a cache, by a few numbers of each of its parameters.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        self._numbers = _numbers_of(model)

    def differs(self, model: nn.Module) -> bool:
        """Whether a model's weights are others, more or fewer; one moved or converted as a whole is not compared."""
        now, then = _numbers_of(model), self._numbers
        if now.keys().isdisjoint(then):
            return False
        return now.keys() != then.keys() or not all(torch.equal(now[kind], then[kind]) for kind in now)


@torch.no_grad()
def _numbers_of(model: nn.Module) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """The numbers of plain parameters that have any here, by where and what they are."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.device.type != "meta" and parameter.numel():
            flat = parameter.detach().reshape(-1)
            numbers = flat[:: max(1, len(flat) // _EACH)][:_EACH].clone(memory_format=torch.contiguous_format)
            as_bytes = numbers.view(torch.uint8)  # NaN equals itself, and types that cannot be concatenated can
            found.setdefault((parameter.device, parameter.dtype), []).append(as_bytes)
    return {kind: torch.cat(parts) for kind, parts in found.items()}
