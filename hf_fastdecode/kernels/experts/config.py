"""Arguments of experts' kernels, their limits, and their launch parameters."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability, interpreted, power_of_two
from ..failures import Kernel, failure
from ..limits import refusal_in_half, refusal_of_operands, refusal_of_weights
from ..pointwise.api import Activation


class Gate(NamedTuple):
    """``activation(gate) * (up + offset)``, with clamped inputs."""

    activation: Activation
    alpha: float = 1.0  # factor of the gate within the sigmoid of `Activation.SILU`, ``gate * sigmoid(alpha * gate)``
    limit: float = inf  # the most a gate can be, and the most and least of what it opens
    offset: float = 0.0  # added to what the gate opens


class Weights(NamedTuple):
    """Weights of a layer's experts, as transformers' modules hold them."""

    gate_up: Tensor  # ``[experts, 2 * inner, hidden]``, or ``[experts, hidden, 2 * inner]`` where `transposed`
    down: Tensor  # ``[experts, hidden, inner]``, or ``[experts, inner, hidden]`` where `transposed`
    gate_up_bias: Tensor | None = None  # ``[experts, 2 * inner]``, or None
    down_bias: Tensor | None = None  # ``[experts, hidden]``, or None
    transposed: bool = False  # whether the width of a product comes before its columns
    interleaved: bool = False  # whether columns of gates and of what they open alternate; else all gates come first

    @property
    def experts(self) -> int:
        return len(self.gate_up)

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[1 if self.transposed else 2]

    @property
    def inner(self) -> int:
        return self.down.shape[1 if self.transposed else 2]


class Shared(NamedTuple):
    """Weights of experts of all rows, as a module of their joint width holds them; without biases."""

    gate: Tensor  # ``[count * inner, hidden]``
    up: Tensor  # likewise
    down: Tensor  # ``[hidden, count * inner]``

    def count(self, inner: int) -> int:
        """As how many experts of this width they are computed."""
        return len(self.gate) // inner

    @property
    def distance(self) -> int:
        """Elements from the weights of gates to those of what they open."""
        return (self.up.data_ptr() - self.gate.data_ptr()) // self.up.element_size()


class Routing(NamedTuple):
    """How a router chooses experts and their shares."""

    experts: int  # of a row
    # Whether the softmax is of all scores; else it is of the largest, as where shares are divided by their sum
    first: bool
    whole: bool  # whether shares stay in fp32; else they are rounded to the dtype of the input
    wide: bool = False  # whether scores are computed and stay in fp32, of weights in fp32 or the dtype of the input
    scale: float = 1.0  # factor of the shares
    # Where `first`, equal groups of experts, and how many a row chooses from: those with the largest experts
    groups: int = 1
    kept: int = 1
    # Whether scores become their sigmoids, biases are added for the choice alone, and groups are chosen by the sum of
    # their two largest (DeepSeek-V3, section 2.1.2); `first` then
    corrected: bool = False
    normed: bool = False  # whether shares are divided by their sum; with `corrected`


MOST_PAIRS: Final = 1024  # of a row and an expert
MOST_OF_AN_EXPERT: Final = 32  # pairs of an expert, on average; of more, products take longer than reading weights
MOST_EXPERTS: Final = 512
MOST_LARGEST: Final = 16  # elements that `largest` finds in a row
MOST_ROUTED: Final = 128  # rows of a router
MOST_ROUTES: Final = 128  # experts of a router
MOST_WIDTH: Final = 8192  # elements of a row of a router
MOST_SHARED: Final = 4  # experts of all rows
DISTANCES: Final = 16  # divisor of the distance of their weights: more than the elements of a load
WIDTHS: Final = 32  # divisor of the widths of products
GROUPED_WIDTHS: Final = 8  # divisor of the widths of grouped products, which need aligned strides

_AT_ONCE = (128, 64, 32)
_BIG_TILES = 192 << 10  # bytes of shared memory from which two programs with the largest tiles fit


class Config(NamedTuple):
    """Launch parameters of `products`."""

    columns: int  # columns of a tile
    at_once: int  # elements of each pair and column per iteration
    stages: int  # iterations whose loads are in flight


class Configs(NamedTuple):
    """Launch parameters of a layer's experts."""

    block_pairs: int  # pairs of an item
    gate_up: Config  # of the first product
    down: Config  # of the second


def choose_configs(pairs: int, weights: Weights, shared_memory: int) -> Configs:
    """Launch parameters, measured on an H100.

    Args:
        pairs: Pairs of a row and an expert.
        shared_memory: Bytes of it that a program can have.
    """
    twice = -(-2 * pairs // weights.experts)
    block_pairs = min(64, max(16, power_of_two(twice)))
    few, big = block_pairs == 16, shared_memory >= _BIG_TILES

    def config(width: int, columns: int) -> Config:
        most = 128 if few and big and not weights.transposed else 64
        at_once = next(elements for elements in _AT_ONCE if elements <= most and width % elements == 0)
        return Config(columns, at_once, 7 if few and big and columns == at_once == 64 else 4)

    gate_up = config(weights.hidden, 128 if big and weights.transposed else 64)
    return Configs(block_pairs, gate_up, config(weights.inner, 128 if big and not few else 64))


def most_items(pairs: int, experts: int, block_pairs: int) -> int:
    """The most items that pairs can make, however they spread over experts."""
    touched = min(pairs, experts)
    return touched + (pairs - touched) // block_pairs


def refusal(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor) -> str | None:
    """Why `experts` does not serve these tensors; None when it does.

    Args:
        x: ``[rows, hidden]``.
        chosen: ``[rows, experts_per_row]``.
        shares: Likewise.
    """
    pairs, most = chosen.numel(), min(MOST_PAIRS, MOST_OF_AN_EXPERT * weights.experts)
    if not 1 <= pairs <= most or weights.experts > MOST_EXPERTS:
        return f"it takes up to {most} pairs and {MOST_EXPERTS} experts, got {pairs} and {weights.experts}"
    reason = _refusal_of_pairs(x, chosen, shares) or _refusal_of_shapes(x, weights)
    return reason or _refusal_of_tensors(x, weights, chosen, shares) or refusal_in_half(x, Kernel.EXPERTS)


def shared_refusal(x: Tensor, weights: Weights, shared: Shared) -> str | None:
    """Why `experts` does not serve shared experts beside these weights, which it serves; None when it does."""
    if reason := refusal_of_operands(x, *shared) or refusal_of_weights(shared):
        return reason
    width, inner = len(shared.gate), weights.inner
    if not 0 < width <= MOST_SHARED * inner or width % inner:
        return f"it takes up to {MOST_SHARED} shared experts, as wide as the others, got {width} and {inner}"
    if [tuple(part.shape) for part in shared] != [(width, weights.hidden)] * 2 + [(weights.hidden, width)]:
        return "shared experts have weights of other shapes"
    if weights.transposed or weights.interleaved or weights.gate_up_bias is not None or shared.distance % DISTANCES:
        return "it takes shared experts beside weights whose gates come first, without biases"
    return None


def grouped_refusal(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor) -> str | None:
    """Why `grouped_experts` does not serve these tensors; None when it does. Arguments as for `refusal`."""
    if reason := _refusal_of_tensors(x, weights, chosen, shares) or _refusal_of_pairs(x, chosen, shares):
        return reason
    if weights.hidden % GROUPED_WIDTHS or weights.inner % GROUPED_WIDTHS or x.shape[1] != weights.hidden:
        return f"it takes widths in multiples of {GROUPED_WIDTHS}, got {weights.hidden} and {weights.inner}"
    on_hopper = x.device.type == "cuda" and compute_capability(x.device)[0] == 9
    if not interpreted() and not (on_hopper and x.dtype == torch.bfloat16):
        return "PyTorch's grouped products are fast in bf16 on Hopper GPUs"
    return failure(Kernel.EXPERTS, x.device)


def _refusal_of_pairs(x: Tensor, chosen: Tensor, shares: Tensor) -> str | None:
    if x.dim() != 2 or chosen.dim() != 2 or chosen.shape != shares.shape or len(chosen) != len(x) or not len(x):
        return "it takes rows [rows, hidden], and experts and their shares [rows, experts_per_row]"
    if chosen.dtype not in (torch.int32, torch.int64) or not shares.dtype.is_floating_point:
        return f"it takes whole numbers of experts and fractions of each, got {chosen.dtype} and {shares.dtype}"
    return None


def _refusal_of_shapes(x: Tensor, weights: Weights) -> str | None:
    experts, hidden, inner = weights.experts, weights.hidden, weights.inner
    if hidden % WIDTHS or inner % WIDTHS or x.shape[1] != hidden:
        return f"it takes widths in multiples of {WIDTHS}, got {hidden} and {inner}"
    if hidden * 2 * inner >= 1 << 31:
        return f"it takes experts whose weights have less than 2^31 elements each, got {hidden} * {2 * inner}"
    shapes = [(hidden, 2 * inner), (inner, hidden)]
    if not weights.transposed:
        shapes = [shape[::-1] for shape in shapes]
    found = [tuple(part.shape) for part in weights[:2]]
    if found != [(experts, *shape) for shape in shapes]:
        return f"weights have other shapes: {found[0]} and {found[1]}"
    biases = [None if bias is None else tuple(bias.shape) for bias in (weights.gate_up_bias, weights.down_bias)]
    if biases not in ([None, None], [(experts, 2 * inner), (experts, hidden)]):
        return "it takes biases [experts, columns] of both products or of none"
    return None


def _refusal_of_tensors(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor) -> str | None:
    parts = [part for part in weights[:4] if part is not None]
    return refusal_of_operands(x, *parts, of_other_dtypes=(chosen, shares)) or refusal_of_weights(parts)


def routing_refusal(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> str | None:
    """Why `route` does not serve these tensors; None when it does. Arguments as for `route`."""
    parts = [weight] if bias is None else [weight, bias]
    others = [weight] if routing.wide and weight.dtype == torch.float32 else []
    others += parts[1:] if routing.corrected else []
    operands = [part for part in parts if not any(part is other for other in others)]
    if reason := refusal_of_operands(x, *operands, of_other_dtypes=[part.detach() for part in others]):
        return reason
    if x.dim() != 2 or not 1 <= len(x) <= MOST_ROUTED or x.shape[1] > MOST_WIDTH:
        return f"it takes up to {MOST_ROUTED} rows [rows, hidden] of up to {MOST_WIDTH} elements, got {tuple(x.shape)}"
    count = len(weight)
    if count > MOST_ROUTES or weight.shape[1:] != x.shape[1:] or any(part.shape != (count,) for part in parts[1:]):
        return f"it takes weights [experts, hidden] of up to {MOST_ROUTES} experts, and biases [experts]"
    if any(not part.is_contiguous() for part in parts) or weight.data_ptr() % 16:
        return "it takes contiguous weights that begin at multiples of 16 bytes"
    return _refusal_of_choice(count, bias, routing) or refusal_in_half(x, Kernel.EXPERTS)


def _refusal_of_choice(count: int, bias: Tensor | None, routing: Routing) -> str | None:
    """Why `route` does not choose so among this many experts; None when it does."""
    if routing.corrected and (bias is None or bias.dtype != torch.float32 or not routing.wide):
        return "it corrects scores in fp32 by biases in fp32"
    if not 1 <= routing.experts <= min(count, MOST_LARGEST):
        return f"it chooses up to {MOST_LARGEST} experts, got {routing.experts} of {count}"
    if count % routing.groups or routing.experts > count // routing.groups * routing.kept:
        return f"it chooses from {routing.kept} of {routing.groups} equal groups, got {routing.experts} of {count}"
    return None
