"""RecurrentGemma: recurrent blocks keep their states in attributes, those of the last pass, whoever's it was.

Padding enters the convolutions, and a pass of several tokens begins them anew. transformers leaves states in place
when beams are reordered. Here they follow their rows, so that beams are those of ``use_cache=False``.
"""

from __future__ import annotations

from typing import Any

from ..._compat import cache_in
from ...attention.own_code import OwnCode, OwnStates


def run(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `RecurrentGemmaModel.forward`: lends the rows' states to the blocks for the time of the pass."""
    layers = cache_in(kwargs).layers
    blocks = [layer.temporal_block for layer in module.layers]
    blocks = [(block, layers[index]) for index, block in enumerate(blocks) if hasattr(block, "conv1d_state")]
    before = [(block.conv1d_state, block.rg_lru.recurrent_states) for block, _ in blocks]
    try:
        for block, layer in blocks:
            block.conv1d_state, block.rg_lru.recurrent_states = layer.kept_states or (None, None)
        output = type(module).forward(module, *args, **kwargs)
        for block, layer in blocks:
            layer.keep_states((block.conv1d_state, block.rg_lru.recurrent_states))
        return output
    finally:
        for (block, _), states in zip(blocks, before, strict=True):
            block.conv1d_state, block.rg_lru.recurrent_states = states


RECURRENT_GEMMA = OwnCode({"RecurrentGemmaModel": {"forward": run}}, states=OwnStates(2))
