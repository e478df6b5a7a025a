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
        """Whether a model's weights are others; one of other types, or on other devices, is not compared."""
        now = _numbers_of(model)
        return now.keys() == self._numbers.keys() and not all(
            torch.equal(now[kind], numbers) for kind, numbers in self._numbers.items()
        )


@torch.no_grad()
def _numbers_of(model: nn.Module) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """The numbers of plain parameters that have any here, by where and what they are."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.device.type != "meta" and parameter.numel():
            flat = parameter.detach().reshape(-1)
            numbers = flat[:: max(1, len(flat) // _EACH)][:_EACH].contiguous().view(torch.uint8)  # NaN is no other NaN
            found.setdefault((parameter.device, parameter.dtype), []).append(numbers)
    return {kind: torch.cat(parts) for kind, parts in found.items()}
