"""Matrix products of few rows, each of which reads its weights in one launch (`kernels.row_products`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ...kernels.failures import KernelFailedError
from ...kernels.pointwise.api import Activation
from ...kernels.row_products.config import refusal


class RowProducts:
    """Products of a pass, or of its capture.

    Where parts of a product are added up within a launch, the launches of a stream count in the same memory by turns.
    A capture has memory of its own, which each replay sets to zero.
    """

    def __init__(self) -> None:
        self._arrived: dict[tuple[torch.cuda.Stream, bool], Tensor] = {}

    @contextmanager
    def here(self) -> Iterator[None]:
        """Context in which `row_products` returns these."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def linears(
        self, inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor] | None:
        """`F.linear` of one input by several weights; None where the kernel does not serve them."""
        if not _served(inputs, weights, biases):
            return None
        from ...kernels.row_products.api import row_products

        try:
            return row_products(inputs, weights, biases, self.counters(inputs.device))
        except KernelFailedError:
            return None

    def gated(
        self,
        inputs: Tensor,
        weights: tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        activation: Activation,
    ) -> Tensor | None:
        """``activation(F.linear(inputs, gate)) * F.linear(inputs, up)``; None where the kernel does not serve them."""
        if not _served(inputs, weights, biases) or weights[0].shape != weights[1].shape:
            return None
        from ...kernels.row_products.api import gated_product

        try:
            return gated_product(inputs, *weights, biases, activation, self.counters(inputs.device))
        except KernelFailedError:
            return None

    def counters(self, device: torch.device) -> Tensor | None:
        """Arrival counters of launches on the current stream; None without a GPU."""
        from ...kernels.device import counters

        if device.type != "cuda":
            return None
        key = torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()
        if (arrived := self._arrived.get(key)) is None:
            arrived = self._arrived[key] = counters(device)
        return arrived


# Of this thread's pass.
_active: ContextVar[RowProducts | None] = ContextVar("hf_fastdecode_products", default=None)


def products_here() -> RowProducts | None:
    """Those of this thread's pass, if any."""
    return _active.get()


def _served(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    return refusal(inputs, weights, biases) is None
