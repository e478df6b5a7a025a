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

from ...attention.forest import Forest
from ...cache.layout.stores import Kind
from ..call_context import CallContext
from ..options import FEWEST_SAVED
from ..structure import Structure


@dataclass(frozen=True)
class HostCosts:
    """Seconds that sharing costs a call of one kind.

    Attributes:
        call: Fixed, per call.
        layer: Per step and decoder layer.
    """

    call: float
    layer: float

    def of_call(self, steps: int, layers: int, batches: int = 1) -> float:
        """Seconds of a call with so many steps, whose forest has so many batches of alike nodes."""
        return self.call + steps * layers * (self.layer + (max(1, batches) - 1) * BATCH)


COSTS: Final = {
    "keys and values": HostCosts(call=3.1e-3, layer=350e-6),
    "images": HostCosts(call=9.8e-3, layer=400e-6),
    "states": HostCosts(call=1.0e-3, layer=350e-6),
    "latents": HostCosts(call=2.6e-3, layer=560e-6),
    "an encoder": HostCosts(call=4.5e-3, layer=1080e-6),
}
"""Costs by what a call has beside text, or by what layers store."""

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


def kind_of(call: CallContext) -> str:
    """The call's entry of `COSTS`."""
    layout = call.structure.layout
    if layout.cross:
        return "an encoder"
    if any(store.kind is Kind.LATENT for store in layout.per_token.values()):
        return "latents"
    if layout.states:
        return "states"
    return "keys and values" if call.inputs is None else "images"


def fewest_saved(call: CallContext, forest: Forest, new_tokens: int) -> int:
    """Least tokens that sharing must save in a call with up to so many new tokens a row, to take no longer than stock.

    Other devices than the CPU have `FEWEST_SAVED`.
    """
    if call.model.device.type != "cpu":
        return FEWEST_SAVED
    steps, batches = max(0, new_tokens - 1), sum(map(len, forest.batches))
    seconds = COSTS[kind_of(call)].of_call(steps, len(call.structure.layout.layers), batches)
    return max(FEWEST_SAVED, Savings.of(call.model, call.structure).fewest(seconds, steps))


def _weights_of_a_token(model: PreTrainedModel, structure: Structure) -> int:
    """Weights that a token of a prompt is multiplied by: all but those of embeddings, and of experts not chosen."""
    ends = [module for module in structure.walk.modules if isinstance(module, nn.Embedding)]
    left_out = {id(getattr(one, "weight", None)) for one in (*ends, model.get_output_embeddings())}
    weights = [weight for weight in structure.walk.parameters if weight.dim() > 1 and id(weight) not in left_out]
    chosen = getattr(structure.text_config, "num_experts_per_tok", None)
    # Experts of a layer are one parameter of three dimensions.
    return sum(one.numel() * chosen // len(one) if chosen and one.dim() == 3 else one.numel() for one in weights)
