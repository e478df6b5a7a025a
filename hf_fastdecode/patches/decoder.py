"""Base classes of slim decoders, of slim models for generation, and of encoder-decoders with slim attention."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from .._compat import cache_in
from ..cache.captured import CapturedCache
from ..cache.shared import SharedContextCache, named_arguments
from ..conversion.fit.attention import Tables
from ..instance_methods import WeakMethod
from .config_base import SlimConfig
from .layers.attention_layer import SlimAttention
from .layers.decoder_attention import SlimDecoderAttention
from .layers.rotation import (
    ROTATION,
    cache_rotation,
    captured_rotation,
    forest_rotation,
    key_positions,
    require_counted,
    visible_slots,
)
from .layers.slim_attention import Projection


class SlimPreTrainedModel(PreTrainedModel):
    """Flags of slim models: attention is computed here, not by transformers' attention interface."""

    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError: slim layers do not read the paged cache of transformers' `generate_batch`."""
        raise ValueError(
            f"{type(self).__name__} does not run in transformers' continuous batching, whose paged cache holds keys "
            "and values of one shape; call generate, with hf_fastdecode.enable for many rows"
        )

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module.as_linear() if isinstance(module, Projection) else module)


class SlimDecoder(SlimPreTrainedModel):
    """A decoder with slim layers; precedes the architecture's class among base classes.

    `blocks` and `attention` name the list of layers, and a layer's attention. `slim_layer` is the class of layers with
    slim attention, where the architecture's does not pass on `ROTATION`.
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
    """A decoder with RoPE; where caches hold no positions, they are counted from the attention mask.

    Without `hands_rotation_on` its layers make their `Rotation` themselves.
    """

    hands_rotation_on: ClassVar[bool] = True
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
        """Run the decoder, with the ordinary decoder's arguments and their order.

        Without `position_ids`, a token's position is its slot, as in the ordinary decoder. Positions of cached
        tokens must have risen by 1 from token to token, unless the cache holds them; else the first pass over a cache
        raises ValueError.
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
                rotation = captured_rotation(self.tables, cache, position_ids)
            elif shared:
                rotation = forest_rotation(self.tables, cache, position_ids, unrotates=unrotates)
            else:
                keys = None if unrotates else self.key_positions(position_ids, visible, cached - dropped, slots)
                rotation = cache_rotation(self.tables, position_ids, keys)
            given |= {"position_ids": position_ids} | ({ROTATION: rotation} if self.hands_rotation_on else {})
        return super().forward(**given)

    def key_positions(self, position_ids: Tensor, visible: Tensor | None, cached: int | Tensor, slots: int) -> Tensor:
        return key_positions(position_ids, visible, cached, slots)

    def tables(self, positions: Tensor) -> Tables:
        # Rotary modules give tables the dtype of this argument.
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self.rotary_emb(like, positions)
        return cos, sin

    def fills_cache(self, cache: Any, cached: int | Tensor, use_cache: bool | None) -> bool:
        if torch.compiler.is_compiling() or self.training:
            return False
        return int(cached) == 0 and (cache is not None or (self.config.use_cache if use_cache is None else use_cache))


class SlimCausalLM(SlimPreTrainedModel):
    """A slim decoder with a head; precedes the architecture's class among base classes."""

    slim_base: ClassVar[type[nn.Module]]
    head_bias: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)  # not the architecture's, which makes an ordinary decoder
        setattr(self, self.base_model_prefix, self.slim_base(config))
        if not config.layers_that_attend_by_themselves:  # all are the architecture's
            self._supports_attention_backend = super(SlimPreTrainedModel, self)._supports_attention_backend
        self.vocab_size = config.vocab_size
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)  # the former in OPT
        self.lm_head = nn.Linear(width, config.vocab_size, bias=self.head_bias)
        self.post_init()


class SlimEncoderDecoder(SlimPreTrainedModel):
    """An encoder-decoder with slim attention in its decoder; precedes the architecture's among base classes.

    The encoder caches nothing and is the ordinary one. `blocks` names the decoder's list of layers, and the attentions
    are paths below a layer.
    """

    slim_attention: ClassVar[type[SlimDecoderAttention]]
    slim_base: ClassVar[type[nn.Module]]
    blocks: ClassVar[str] = "layers"
    self_attention: ClassVar[str] = "self_attn"
    cross_attention: ClassVar[str] = "encoder_attn"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        plans = iter(config.layer_plans)
        for block in getattr(self.get_decoder(), self.blocks):
            for path in (self.self_attention, self.cross_attention):
                if (layer := next(plans)).plan != "kv":
                    ordinary, cross = block.get_submodule(path), path == self.cross_attention
                    attention = self.slim_attention.in_place_of(ordinary, layer, cross)
                    attention.config = config  # T5's decoder has a copy, which would miss later changes
                    block.set_submodule(path, attention)
        self.post_init()


def slim_class(config: type[SlimConfig], slim: type, ordinary: Any, **attributes: Any) -> Any:
    """Make the slim class of transformers' `ordinary` one, in the module and with the name that checkpoints know."""
    module = f"{__package__}.architectures.{config.model_type}"
    doc = f"{ordinary.__name__} with slim attention."
    return type(f"Slim{ordinary.__name__}", (slim, ordinary), {"__module__": module, "__doc__": doc, **attributes})


def slim_classes(
    config: type[SlimConfig],
    source: Any,
    *,
    attention: type[SlimAttention] = SlimAttention,
    decoder: type[SlimDecoder] = SlimRotaryDecoder,
    model: type[SlimCausalLM] = SlimCausalLM,
    head: str = "ForCausalLM",
) -> tuple[Any, Any, Any]:
    """Make the classes of a family's attention, decoder and models for generation.

    Base classes `attention`, `decoder` and `model` precede ``<family>Attention``, ``<family>Model`` and
    ``<family><head>`` of `source`, transformers' module; `config` is ``Slim<family>Config``.
    """
    family = config.__name__.removeprefix("Slim").removesuffix("Config")
    attention = slim_class(config, attention, getattr(source, f"{family}Attention"))
    fields = {"config_class": config, "slim_attention": attention}
    decoder = slim_class(config, decoder, getattr(source, f"{family}Model"), **fields)
    fields = {"config_class": config, "slim_base": decoder}
    return attention, decoder, slim_class(config, model, getattr(source, family + head), **fields)


def encoder_decoder_classes(
    config: type[SlimConfig],
    source: Any,
    *,
    attention: type[SlimDecoderAttention] = SlimDecoderAttention,
    model: type[SlimEncoderDecoder] = SlimEncoderDecoder,
) -> tuple[Any, Any, Any]:
    """Make a family's classes of attention, of models without a head, and of models for generation."""
    family = config.__name__.removeprefix("Slim").removesuffix("Config")
    attention = slim_class(config, attention, getattr(source, f"{family}Attention"))
    fields = {"config_class": config, "slim_attention": attention}
    base = slim_class(config, model, getattr(source, f"{family}Model"), **fields)
    ordinary = getattr(source, f"{family}ForConditionalGeneration")
    whole = slim_class(config, model, ordinary, slim_base=base, **fields)
    return attention, base, whole
