"""xLSTM: blocks have three states each, in a class of cache of their own, which also padding enters."""

from __future__ import annotations

import sys
from typing import Any

from ..._compat import CACHE, cache_in, with_cache
from ...attention.own_code import OwnCode, OwnStates


def run(module: Any, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
    """Stands in for `xLSTMModel.forward`, over an `xLSTMCache` with the rows' states, which it overwrites."""
    shared = cache_in(kwargs)
    embeddings = module.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    first = shared.layers[0].kept_states is None
    own = sys.modules[type(module).__module__].xLSTMCache(
        module.config, len(embeddings) if first else 0, dtype=embeddings.dtype, device=embeddings.device
    )
    if not first:
        own.rnn_state = {index: layer.kept_states for index, layer in enumerate(shared.layers)}
    kwargs = with_cache(kwargs, own)
    output = type(module).forward(module, inputs_embeds=embeddings, **kwargs)
    for layer, states in zip(shared.layers, own.rnn_state.values(), strict=True):
        layer.keep_states(states)
    output[CACHE] = shared
    return output


XLSTM = OwnCode({"xLSTMModel": {"forward": run}}, states=OwnStates(3, beams=False))
