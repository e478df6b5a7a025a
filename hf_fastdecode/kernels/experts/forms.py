"""How experts' weights lie in memory, and what stands between their two products."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from torch import Tensor

from ..pointwise.forms import Activation


class Gate(NamedTuple):
    """``activation(gate) * (up + offset)``, of limited numbers.

    Attributes:
        activation: The function of the gate.
        alpha: Factor of the gate within the sigmoid of `Activation.SILU`, ``gate * sigmoid(alpha * gate)``.
        limit: The most a gate can be, and the most and least of what it opens.
        offset: Added to what the gate opens.
    """

    activation: Activation
    alpha: float = 1.0
    limit: float = inf
    offset: float = 0.0


class Weights(NamedTuple):
    """Weights of a layer's experts, as transformers' modules hold them.

    Attributes:
        gate_up: ``[experts, 2 * inner, hidden]``, or ``[experts, hidden, 2 * inner]`` where `transposed`.
        down: ``[experts, hidden, inner]``, or ``[experts, inner, hidden]`` where `transposed`.
        gate_up_bias: ``[experts, 2 * inner]``, or None.
        down_bias: ``[experts, hidden]``, or None.
        transposed: Whether the width of a product comes before its columns.
        interleaved: Whether columns of gates and of what they open alternate; else all gates come first.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    transposed: bool = False
    interleaved: bool = False

    @property
    def experts(self) -> int:
        return len(self.gate_up)

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[1 if self.transposed else 2]

    @property
    def inner(self) -> int:
        return self.down.shape[1 if self.transposed else 2]


class Routing(NamedTuple):
    """How a router chooses experts and their shares.

    Attributes:
        experts: Of a row.
        first: Whether the softmax is of all scores; else it is of the largest, as where shares are divided by their
            sum.
        whole: Whether shares stay in fp32; else they are rounded to the dtype of the input.
    """

    experts: int
    first: bool
    whole: bool
