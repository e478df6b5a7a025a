"""A cache of ordinary models that rounds keys and values to another dtype, and logits that are read through it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from hf_fastdecode._compat import CACHE

from ..fit.cached_numbers import load, store
from ..layers.calibration import on_device


class RoundedCache(DynamicCache):
    """A cache that rounds keys and values of `layers`, or of all, to measure a dtype's errors; it saves no memory.

    transformers' `QuantizedCache` passes the prompt to attention unrounded, and backends other than fp8 also the
    latest tokens, so it does not show the error of the dtype alone. In 8 bits a token and head have a scale, as in
    slim caches. A config of None is for a cache without sliding windows.
    """

    def __init__(self, config: Any, dtype: torch.dtype, layers: Collection[int] | None = None) -> None:
        super().__init__(config=config)
        self.dtype, self.rounded_layers = dtype, layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[rows, kv_heads, tokens, head_dim]``, rounded, and return all of them."""
        if self.rounded_layers is None or layer_idx in self.rounded_layers:
            key_states, value_states = map(self._round, (key_states, value_states))
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def _round(self, x: Tensor) -> Tensor:
        head_dim = x.shape[-1]
        return load(store(x, self.dtype, head_dim), self.dtype, head_dim).to(x.dtype)


def cached_logits(model: PreTrainedModel, inputs: dict[str, Tensor], int8_layers: Sequence[int] = ()) -> Tensor:
    """Logits of all tokens of one text, fp64: the second half reads the first from the cache, one by one at its end.

    Of an ordinary or a slim model and its `model_inputs`. In `int8_layers`, attentions in the order of the family's
    `attentions`, keys and values are cached in int8.
    """
    inputs = on_device(model, inputs)
    given: dict[str, Any] = {}
    with torch.no_grad():
        if "decoder_input_ids" in inputs:
            name = "decoder_input_ids"
            ids = inputs.pop(name)
            given["encoder_outputs"] = model.get_encoder()(*inputs.values())
            halves = ([at // 2 for at in int8_layers if at % 2 == half] for half in (0, 1))
            cache: Cache = EncoderDecoderCache(*(RoundedCache(None, torch.int8, layers) for layers in halves))
        else:
            name = "input_ids"
            ids, cache = inputs[name], RoundedCache(model.config, torch.int8, int8_layers)
        half = ids.shape[1] // 2
        steps = min(8, half - 1)
        parts = ids.split([half, ids.shape[1] - half - steps, *[1] * steps], 1)
        return torch.cat([model(**given, **{name: part, CACHE: cache}).logits[0].double() for part in parts])
