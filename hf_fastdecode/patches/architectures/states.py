"""Architectures whose recurrent states are outside transformers' caches: MiniMax, RecurrentGemma and xLSTM.

transformers leaves the states of MiniMax and RecurrentGemma in place when beams are reordered. Here they follow their
rows, so that beams are those of ``use_cache=False``.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..._compat import CACHE, cache_in, with_cache
from ...attention.overrides import OwnCode, OwnStates


def attend_minimax(module: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """Overrides `MiniMaxLightningAttention.forward`, which continues from a state token by token only."""
    layer = cache_in(kwargs).layers[module.layer_idx]
    return layer.by_segments(partial(_attend_minimax, module, layer), hidden_states, **kwargs), None


def _attend_minimax(module: Any, layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    (state,) = layer.kept_states or (None,)  # [rows, heads, head_dim, head_dim]
    if state is not None and hidden_states.shape[1] > 1:
        out, state = _continue_minimax(module, hidden_states, kwargs.get("attention_mask"), state)
        layer.keep_states((state,))
        return out
    # The methods of `MiniMaxCache` that it calls.
    states = SimpleNamespace(
        get_linear_cache=lambda index: state, set_linear_cache=lambda index, new: layer.keep_states((new,))
    )
    return type(module).forward(module, hidden_states, **with_cache(kwargs, states))[0]


def _continue_minimax(module: Any, hidden_states: Tensor, mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lightning attention of ``[rows, tokens, hidden]`` after a state, and the state after it.

    Blocks of tokens are computed at once, as the module does from an empty state (Qin et al. 2024, algorithm 1).
    """
    mixed = module.act_fn(module.qkv_proj(hidden_states))
    if mask is not None:
        mixed = (mixed * mask[:, :, None]).to(mixed.dtype)
    of_heads = mixed.unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2)
    parts = (part.split(module.block_size, 2) for part in of_heads.split(module.head_dim, -1))
    blocks = []
    for query, key, value in zip(*parts, strict=True):  # [rows, heads, tokens, head_dim]
        size = query.shape[2]
        scores = (query @ key.mT) * module.diagonal_decay[:, :, :size, :size]
        blocks.append((query * module.query_decay[:, :size]) @ state + scores @ value)
        state = state * torch.exp(-module.slope_rate * size) + (key * module.key_decay[:, -size:]).mT @ value
    normed = module.norm(torch.cat(blocks, 2).transpose(1, 2).flatten(2))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * normed), state


def run_minimax(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Overrides `MiniMaxModel.forward`, which checks the class of its cache if told to use one."""
    return type(module).forward(module, *args, **kwargs | {"use_cache": False})


def run_recurrent_gemma(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Overrides `RecurrentGemmaModel.forward`: lends the rows' states to the blocks for the time of the pass.

    Its blocks keep the states of the last pass, of whichever rows, in attributes. Padding enters the convolutions, and
    a pass of several tokens begins them anew.
    """
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


def run_xlstm(module: Any, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
    """Overrides `xLSTMModel.forward`, which overwrites the three states of each block, which padding enters too.

    They are in an `xLSTMCache`, or in an object with its attributes.
    """
    shared = cache_in(kwargs)
    embeddings = module.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    if shared.layers[0].kept_states is None:
        make = sys.modules[type(module).__module__].xLSTMCache
        stock_cache = make(module.config, len(embeddings), dtype=embeddings.dtype, device=embeddings.device)
    else:
        states = {index: layer.kept_states for index, layer in enumerate(shared.layers)}
        stock_cache = SimpleNamespace(rnn_state=states, seqlen_offset=0)
    output = type(module).forward(module, inputs_embeds=embeddings, **with_cache(kwargs, stock_cache))
    for layer, states in zip(shared.layers, stock_cache.rnn_state.values(), strict=True):
        layer.keep_states(states)
    output[CACHE] = shared
    return output


STATES = {
    "minimax": OwnCode(
        {"MiniMaxLightningAttention": {"forward": attend_minimax}, "MiniMaxModel": {"forward": run_minimax}},
        states=OwnStates(1, continues=True, segments=True),
    ),
    "recurrent_gemma": OwnCode({"RecurrentGemmaModel": {"forward": run_recurrent_gemma}}, states=OwnStates(2)),
    "xlstm": OwnCode({"xLSTMModel": {"forward": run_xlstm}}, states=OwnStates(3, beams=False)),
}
"""Overrides by folder of ``transformers.models``."""
