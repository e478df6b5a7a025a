"""xLSTM: blocks have three states each, in a class of cache of their own, which also padding enters."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from ..._compat import CACHE, cache_in, with_cache
from ...attention.own_code import OwnCode, OwnStates


def run(module: Any, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
    """Stands in for `xLSTMModel.forward`, which overwrites states of an `xLSTMCache` or of what has its attributes."""
    shared = cache_in(kwargs)
    embeddings = module.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    if shared.layers[0].kept_states is None:
        make = sys.modules[type(module).__module__].xLSTMCache
        own = make(module.config, len(embeddings), dtype=embeddings.dtype, device=embeddings.device)
    else:
        states = {index: layer.kept_states for index, layer in enumerate(shared.layers)}
        own = SimpleNamespace(rnn_state=states, seqlen_offset=0)
    output = type(module).forward(module, inputs_embeds=embeddings, **with_cache(kwargs, own))
    for layer, states in zip(shared.layers, own.rnn_state.values(), strict=True):
        layer.keep_states(states)
    output[CACHE] = shared
    return output


XLSTM = OwnCode({"xLSTMModel": {"forward": run}}, states=OwnStates(3, beams=False))
