"""Base classes of slim decoders, and of slim models for generation."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from .._compat import cache_in
from ..cache.captured import CapturedCache
from ..cache.direct_pass import named_arguments
from ..cache.shared import SharedContextCache
from ..weak_method import WeakMethod
from .attention.attention_layer import SlimAttention
from .attention.cached_positions import key_positions, require_counted, visible_slots
from .attention.rotation import ROTATION, Rotation, Tables, captured_rotation, forest_rotation
from .values.projection import Projection


class SlimPreTrainedModel(PreTrainedModel):
    """Flags of slim models: attention is computed here, not by transformers' attention interface."""

    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse transformers' continuous batching (`generate_batch`), whose paged cache slim layers do not read.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} does not run in transformers' continuous batching, whose paged cache holds keys "
            "and values of one shape; call generate, with hf_fastdecode.enable for many rows"
        )

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module.as_linear() if isinstance(module, Projection) else module)


class SlimDecoder(SlimPreTrainedModel):
    """A decoder with slim layers; precedes the architecture's own class among base classes.

    Args:
        config: Of the model.

    Attributes:
        slim_attention: Class of the layers' attention.
        slim_layer: Class of layers with slim attention; None for the architecture's own.
        blocks: Name of the list of layers.
        attention: Name of a layer's attention.
    """

    slim_attention: ClassVar[type[nn.Module]]
    slim_layer: ClassVar[type[nn.Module] | None] = None
    blocks: ClassVar[str] = "layers"
    attention: ClassVar[str] = "self_attn"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = getattr(self, self.blocks)
        for index, layer in enumerate(config.layer_plans):
            if layer.plan != "kv":
                if self.slim_layer is not None:
                    layers[index] = self.slim_layer(config, index)
                setattr(layers[index], self.attention, self.slim_attention(config, index, layer))
        self.first_slim = next((at for at, layer in enumerate(config.layer_plans) if layer.plan != "kv"), None)
        self.post_init()


class SlimRotaryDecoder(SlimDecoder):
    """A decoder with RoPE, which rotates keys when it reads them, or when it caches them.

    In the first case caches hold no positions, and those of cached keys are counted from the attention mask.
    """

    _argument_names: ClassVar[tuple[str, ...]]  # of the ordinary decoder's forward

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = inspect.signature(super().forward)
        cls._argument_names = tuple(forward.parameters)[1:]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for block in getattr(self, self.blocks):
            attention = getattr(block, self.attention)
            if isinstance(attention, SlimAttention) and not hasattr(attention, "tables"):
                attention.tables = WeakMethod(type(self).tables, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder, with the ordinary decoder's arguments, also in their order.

        Without `position_ids`, tokens have the numbers of their slots, as in the ordinary decoder; those cached in
        earlier passes are taken to have had positions that rise by 1 from token to token, unless they are cached.

        Raises:
            ValueError: `position_ids` that do not, for a cache that is empty so far and holds no positions.
        """
        given = named_arguments(self._argument_names, args, kwargs)
        input_ids, attention_mask, position_ids = map(given.get, ("input_ids", "attention_mask", "position_ids"))
        cache, tokens = cache_in(given), input_ids if input_ids is not None else given.get("inputs_embeds")
        if self.first_slim is not None and tokens is not None:
            unrotates = self.config.unrotates
            length, device = tokens.shape[1], tokens.device
            cached = 0 if cache is None else cache.get_seq_length()
            slots, dropped = length, 0
            if cache is not None:  # a sliding window drops the oldest tokens
                slots, dropped = cache.get_mask_sizes(length, self.first_slim)
            visible, shared = None, isinstance(cache, SharedContextCache | CapturedCache)
            if position_ids is None:
                position_ids = (torch.arange(length, device=device) + cached)[None]
            elif not shared and not unrotates:
                visible = visible_slots(attention_mask, dropped)
                if length > 1 and self.fills_cache(cache, cached, given.get("use_cache")):
                    require_counted(position_ids, None if visible is None else visible[:, :length])
            if isinstance(cache, CapturedCache):
                given |= {ROTATION: captured_rotation(self.tables, cache, position_ids)}
            elif shared:
                given |= self.forest_rotation(cache, position_ids)
            elif unrotates:
                given |= self.rotation(position_ids, None)
            else:
                given |= self.rotation(position_ids, key_positions(position_ids, visible, cached - dropped, slots))
            given["position_ids"] = position_ids
        return super().forward(**given)

    def rotation(self, query_positions: Tensor, key_positions: Tensor | None) -> dict[str, Rotation]:
        """Argument of the attention layers, of positions ``[rows or 1, tokens]``; None for those that are cached."""
        keys = None if key_positions is None else self.tables(key_positions)
        return {ROTATION: Rotation(query_positions, self.tables(query_positions), keys)}

    def forest_rotation(self, cache: SharedContextCache, position_ids: Tensor) -> dict[str, Rotation]:
        """Argument of the attention layers, for a pass over a shared-context cache."""
        unrotates = self.config.unrotates
        return {ROTATION: forest_rotation(self.tables, cache, position_ids, unrotates=unrotates)}

    def tables(self, positions: Tensor) -> Tables:
        """Tables of positions ``[rows or 1, tokens]``."""
        # They have the dtype of what they are for: fp32 for an empty tensor of it.
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self.rotary_emb(like, positions)
        return cos, sin

    def fills_cache(self, cache: Any, cached: int | Tensor, use_cache: bool | None) -> bool:
        """Whether this pass begins a cache that later passes will read."""
        if torch.compiler.is_compiling() or self.training:
            return False
        return int(cached) == 0 and (cache is not None or (self.config.use_cache if use_cache is None else use_cache))


class SlimCausalLM(SlimPreTrainedModel):
    """A slim decoder with a head; precedes the architecture's own class among base classes.

    Args:
        config: Of the model.

    Attributes:
        slim_decoder: Class of the decoder, which is kept under the architecture's ``base_model_prefix``.
    """

    slim_decoder: ClassVar[type[nn.Module]]

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)  # not the architecture's, which makes an ordinary decoder
        setattr(self, self.base_model_prefix, self.slim_decoder(config))
        if not config.layers_that_attend_by_themselves:  # all are the architecture's own
            self._supports_attention_backend = super(SlimPreTrainedModel, self)._supports_attention_backend
        self.vocab_size = config.vocab_size
        self.lm_head = self.make_head(config)
        self.post_init()

    @staticmethod
    def make_head(config: Any) -> nn.Linear:
        """The projection to logits."""
        return nn.Linear(config.hidden_size, config.vocab_size, bias=False)
