"""Time that sharing costs and saves a call whose passes run on the CPU, for ``min_saved_tokens="auto"``.

Each step of ours makes two or more attention calls a layer and merges them, where stock makes one; that takes about
as long for a tiny model as for a large one. Sharing saves the prefill of the shared tokens, and in each step the reads
and copies of their keys and values. `python -m tools.host_costs` measures the constants, and writes their table in
docs/limits.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from ...cache.layout import ModelLayout
from ...cache.stores import Kind
from ..options import FEWEST_SAVED
from ..structure import Structure


@dataclass(frozen=True)
class HostCosts:
    """Seconds that sharing costs a call of one kind.

    Attributes:
        call: Fixed, per call.
        layer: Per step and decoder layer.
        step: Per step, whatever its layers.
    """

    call: float
    layer: float
    step: float = 0.0

    def __add__(self, other: HostCosts) -> HostCosts:
        """Costs of what has both."""
        return HostCosts(self.call + other.call, self.layer + other.layer, self.step + other.step)

    def of_call(self, steps: int, layers: int, batches: int = 1) -> float:
        """Seconds of a call with so many steps, whose forest has so many batches of alike nodes."""
        return self.call + steps * (self.step + layers * (self.layer + (max(1, batches) - 1) * BATCH))


COSTS: Final = {
    "keys and values": HostCosts(call=3.1e-3, layer=350e-6),
    "images": HostCosts(call=9.8e-3, layer=400e-6),
    "states": HostCosts(call=1.0e-3, layer=350e-6),
    "latents": HostCosts(call=2.6e-3, layer=560e-6),
    "an encoder": HostCosts(call=4.5e-3, layer=1080e-6),
}
"""Costs by what a call has beside text, or by what layers store."""

LOOPS: Final = {
    "this package's": HostCosts(call=0.0, layer=0.0),
    "transformers'": HostCosts(call=0.9e-3, layer=190e-6),
    "a user's": HostCosts(call=1.1e-3, layer=120e-6, step=620e-6),
}
"""Further costs by the loop that decodes. In a user's each pass asks whether the model has changed.

That transformers' beam search copies all keys and values to reorder rows, but not shared ones, is not counted.
"""

BATCH: Final = 70e-6
"""Further seconds for each step and layer of a further batch of nodes, which differ in length or in spacing."""

FLOPS: Final = 6e10
"""Floating-point operations per second and thread of stock's prefill."""

LAYER_OF_A_TOKEN: Final = 1.8e-6
"""Seconds of stock's prefill for each token and layer beside matrix products."""

BANDWIDTH: Final = 2e9
"""Bytes of keys and values per second and thread that stock's step copies and reads."""


@dataclass(frozen=True)
class Savings:
    """Seconds that one saved token saves: once in prefill, and in each step."""

    prefill: float
    step: float

    @classmethod
    def of(cls, model: PreTrainedModel, structure: Structure) -> Savings:
        """Those of a prompt's tokens in the decoder, or if there is an encoder, of its output's in cross-attention."""
        layout, itemsize = structure.layout, model.dtype.itemsize
        stores = list((layout.cross or layout.per_token).values())
        numbers = sum(store.stock_numbers or store.numbers for store in stores)
        if layout.cross:  # rows share an input's keys and values, and the products that make these
            weights = numbers * int(structure.text_config.hidden_size)
        else:
            weights = structure.kept("weights of a token", lambda: _weights_of_a_token(model, structure))
        threads = torch.get_num_threads()
        prefill = 2 * weights / (FLOPS * threads) + len(layout.layers) * LAYER_OF_A_TOKEN
        return cls(prefill, numbers * itemsize / (BANDWIDTH * threads))

    def fewest(self, seconds: float, steps: int) -> int:
        """Tokens that save so many seconds in a call of so many steps."""
        return math.ceil(seconds / (self.prefill + steps * self.step))


def kind_of(layout: ModelLayout, *, images: bool) -> str:
    """The entry of `COSTS` of calls of a model, given images or not."""
    if layout.cross:
        return "an encoder"
    if any(store.kind is Kind.LATENT for store in layout.per_token.values()):
        return "latents"
    if layout.states:
        return "states"
    return "images" if images else "keys and values"


@dataclass(frozen=True)
class Estimate:
    """What sharing costs and saves a model's calls of one kind on the CPU, which has so many layers."""

    costs: HostCosts
    layers: int
    savings: Savings

    @classmethod
    def of(cls, model: PreTrainedModel, structure: Structure, loop: str, *, images: bool) -> Estimate | None:
        """That of a call in a loop of `LOOPS`, given images or not; None on other devices than the CPU."""
        if model.device.type != "cpu":
            return None
        layout = structure.layout
        costs = COSTS[kind_of(layout, images=images)] + LOOPS[loop]
        return cls(costs, len(layout.layers), Savings.of(model, structure))

    def fewest(self, new_tokens: int, batches: int = 1) -> int:
        """Least tokens that sharing must save to take no longer than stock, at least `FEWEST_SAVED`.

        Args:
            new_tokens: Most new tokens of a row.
            batches: Batches of alike nodes in the forest.
        """
        steps = max(0, new_tokens - 1)
        return max(FEWEST_SAVED, self.savings.fewest(self.costs.of_call(steps, self.layers, batches), steps))


def _weights_of_a_token(model: PreTrainedModel, structure: Structure) -> int:
    """Weights that a token of a prompt is multiplied by: all but those of embeddings, and of experts not chosen."""
    ends = [module for module in structure.walk.modules if isinstance(module, nn.Embedding)]
    left_out = {id(getattr(one, "weight", None)) for one in (*ends, model.get_output_embeddings())}
    weights = [weight for weight in structure.walk.parameters if weight.dim() > 1 and id(weight) not in left_out]
    chosen = getattr(structure.text_config, "num_experts_per_tok", None)
    # Experts of a layer are one parameter of three dimensions.
    return sum(one.numel() * chosen // len(one) if chosen and one.dim() == 3 else one.numel() for one in weights)
