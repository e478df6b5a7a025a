"""Llama with slim attention: layers that cache keys before RoPE, and V-coordinates, in the place of keys and values.

A model type of its own, rather than a patch of Llama: a checkpoint without value projections must not load into
classes that would draw them at random. Any cache of transformers serves, as its keys and values.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    rotate_half,
)

from ..attention.autocast import no_autocast
from .cached_positions import key_positions, require_counted, visible_slots
from .slim_attention import cache_dtype, slim_attention
from .slim_layers import SlimLayer
from .slim_llama_config import SlimLlamaConfig
from .slim_values import SlimValues
from .wide_products import KeyProjection, wide

_ROTATION: Final = "slim_rotation"
"""Argument of the attention layers: cos and sin of this pass's tokens, then of all keys, each
``[rows or 1, tokens, head_dim]`` in fp32."""


class SlimLlamaAttention(LlamaAttention):
    """Attention of a layer that caches no values.

    Args:
        config: Of the model.
        layer_idx: Of the layer.
        layer: What it caches, not ``kv``.
    """

    def __init__(self, config: SlimLlamaConfig, layer_idx: int, layer: SlimLayer) -> None:
        super().__init__(config, layer_idx)
        del self.v_proj
        self.layer = layer
        width = config.num_attention_heads * self.head_dim
        self.k_proj = KeyProjection(config.hidden_size, width, bias=config.attention_bias)
        matrix_dtype = getattr(torch, config.slim_matrix_dtype)
        self.slim = SlimValues(config.hidden_size, width, width, layer.rank, matrix_dtype)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As Llama's, with `slim_rotation` in the place of `position_embeddings`.

        Raises:
            ValueError: `slim_rotation` is missing, since the layer is not called by `SlimLlamaModel`.
        """
        if (rotation := kwargs.get(_ROTATION)) is None:
            raise ValueError(f"a slim attention layer needs {_ROTATION}; call it through SlimLlamaModel")
        query_cos, query_sin, key_cos, key_sin = rotation
        query = self.q_proj(hidden_states)
        dtype = query.dtype  # under autocast that of its products
        cached_dtype = cache_dtype(dtype, self.layer.float16)
        keys, coordinates = self.slim.to_cache(hidden_states, self.k_proj(hidden_states), cached_dtype)
        if past_key_values is not None:
            with no_autocast(keys.device):  # which does not concatenate fp16
                keys, coordinates = past_key_values.update(keys, coordinates, self.layer_idx)
        out, weights = slim_attention(
            _rotate(self._heads(query.to(wide(dtype))), query_cos, query_sin),
            _rotate(self._heads(self.slim.rotatable(keys)), key_cos, key_sin),
            keys,
            coordinates,
            self.slim,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            dtype=dtype,
            weights_wanted=self.config._attn_implementation == "eager",
        )
        return self.o_proj(out), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SlimLlamaPreTrainedModel(LlamaPreTrainedModel):
    """Base class of the models: attention is computed here, not by transformers' attention interface."""

    config_class = SlimLlamaConfig
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_record_outputs = {"hidden_states": LlamaDecoderLayer, "attentions": LlamaAttention}  # noqa: RUF012


class SlimLlamaModel(SlimLlamaPreTrainedModel, LlamaModel):
    """Llama's decoder, which rotates keys when it reads them."""

    def __init__(self, config: SlimLlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(config.layer_plans):
            if layer.plan != "kv":
                self.layers[index].self_attn = SlimLlamaAttention(config, index, layer)
        self.first_slim = next((at for at, layer in enumerate(config.layer_plans) if layer.plan != "kv"), None)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As Llama's.

        Without `position_ids`, tokens have the numbers of their slots, as in Llama; those cached in earlier passes are
        taken to have had positions that rise by 1 from token to token.

        Raises:
            ValueError: `position_ids` that do not, for a cache that is empty so far.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if self.first_slim is not None and tokens is not None:
            length, device = tokens.shape[1], tokens.device
            cached = 0 if past_key_values is None else past_key_values.get_seq_length()
            visible = None
            if position_ids is None:
                position_ids = (torch.arange(length, device=device) + cached)[None]
            else:
                visible = visible_slots(attention_mask)
                if length > 1 and self._fills_cache(past_key_values, cached, kwargs.get("use_cache")):
                    require_counted(position_ids, None if visible is None else visible[:, :length])
            slots = length
            if past_key_values is not None:
                slots, _ = past_key_values.get_mask_sizes(length, self.first_slim)
            # Llama's tables have the dtype of what they are for: fp32 for an empty tensor of it.
            like = torch.empty(0, dtype=torch.float32, device=device)
            positions = key_positions(position_ids, visible, cached, slots)
            kwargs[_ROTATION] = (*self.rotary_emb(like, position_ids), *self.rotary_emb(like, positions))
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _fills_cache(self, cache: Any, cached: int | Tensor, use_cache: bool | None) -> bool:
        """Whether this pass begins a cache that later passes will read."""
        if torch.compiler.is_compiling() or self.training:
            return False
        return int(cached) == 0 and (cache is not None or (self.config.use_cache if use_cache is None else use_cache))


class SlimLlamaForCausalLM(SlimLlamaPreTrainedModel, LlamaForCausalLM):
    """Llama for generation, with slim attention."""

    def __init__(self, config: SlimLlamaConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # not LlamaForCausalLM's, which makes an ordinary decoder
        self.model = SlimLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of ``[rows, heads, tokens, head_dim]``."""
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


AutoModel.register(SlimLlamaConfig, SlimLlamaModel, exist_ok=True)
AutoModelForCausalLM.register(SlimLlamaConfig, SlimLlamaForCausalLM, exist_ok=True)
