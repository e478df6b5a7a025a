"""Differences between convertible architectures, as data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from hf_fastdecode.patches.config_base import SlimConfig

from ...conversion.fit.attention import AttentionWeights, Rotation


@dataclass(frozen=True)
class Fused:
    """A fused projection of queries, keys and values: a module of the ordinary layer.

    Its rows are in `blocks`, by config, each with queries, keys and values in this order. With `conv1d` weights are
    stored ``[in, out]``, as in transformers' ``Conv1D``.
    """

    name: str
    blocks: Callable[[Any], int] = lambda config: 1
    order: str = "qkv"
    conv1d: bool = False

    def split(self, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An attention layer's tensors, the fused ones split into ``q_proj``, ``k_proj``, ``v_proj`` ``[out, in]``."""
        plain = {name: one for name, one in tensors.items() if not name.startswith(f"{self.name}.")}
        for kind in ("weight", "bias"):
            if (fused := tensors.get(f"{self.name}.{kind}")) is None:
                continue
            rows = fused.mT if self.conv1d and kind == "weight" else fused
            blocks = rows.unflatten(0, (self.blocks(config), 3, -1))
            for at, one in enumerate(self.order):
                plain[f"{one}_proj.{kind}"] = blocks[:, at].flatten(0, 1).contiguous()
        return plain

    def join(self, config: Any, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `split`."""
        names = [f"{one}_proj" for one in self.order]
        tensors = {name: one for name, one in plain.items() if name.rpartition(".")[0] not in names}
        for kind in ("weight", "bias"):
            parts = [plain[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in plain]
            if parts:
                rows = torch.stack([part.unflatten(0, (self.blocks(config), -1)) for part in parts], 1).flatten(0, 2)
                tensors[f"{self.name}.{kind}"] = (rows.mT if self.conv1d and kind == "weight" else rows).contiguous()
        return tensors


def run_layer(layer: nn.Module, hidden: Tensor, positions: Tensor, tables: Any) -> Tensor:
    """Run a decoder layer over one text ``[1, tokens, d]``, without a cache; `tables` are cos and sin, or None."""
    return layer(hidden, position_ids=positions, position_embeddings=tables)


def embed(config: Any, tensors: Mapping[str, Tensor], embedding: str, ids: Tensor) -> Tensor:
    """Embeddings ``[tokens, d]`` of ids ``[tokens]``, from the tensors outside layers and in their dtype."""
    return tensors[embedding][ids]


def layer_norm(config: Any, weight: Tensor, x: Tensor) -> Tensor:
    """QK-norm of each head of a whole projection, ``[..., heads * head_dim]``; the weight is ``[heads, head_dim]``."""
    heads = x.unflatten(-1, tuple(weight.shape))
    centred = heads - heads.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + config.layer_norm_eps).rsqrt()
    return (weight * normed).flatten(-2)


@dataclass(frozen=True)
class AnyFamily:
    """Base class of families of both kinds.

    Attributes:
        architecture: Class of the ordinary models, as in ``config.architectures``.
        slim_model: Class of the slim models.
        slim_config: Class of their configs, which takes all fields of the ordinary ones.
        embedding: Name of the embedding's weight.
        renamed: Prefixes of names in checkpoints, and their replacements in models.
        auto: Auto class of the ordinary and of the slim models.
        fused: The fused projection of queries, keys and values; None where there are three.
    """

    architecture: str
    slim_model: Any
    slim_config: type[SlimConfig]
    embedding: str = field(default="model.embed_tokens.weight", kw_only=True)
    renamed: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    auto: Any = field(default=AutoModelForCausalLM, kw_only=True)
    fused: Fused | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, slim_model: Any, **fields: Any) -> Self:
        """The family of a class of slim models, which are registered with the Auto classes."""
        family = cls(slim_model.__name__.removeprefix("Slim"), slim_model, slim_model.config_class, **fields)
        AutoModel.register(family.slim_config, family.base_model(), exist_ok=True)
        family.auto.register(family.slim_config, slim_model, exist_ok=True)
        return family

    def base_model(self) -> Any:
        raise NotImplementedError

    def model_name(self, stored: str) -> str:
        """Name that a model has for a checkpoint's tensor."""
        for old, new in self.renamed.items():
            if stored.startswith(old):
                return new + stored.removeprefix(old)
        return stored

    def projection(self, part: str) -> str:
        """Name of the separate projection of queries, keys, values or the output: ``q``, ``k``, ``v`` or ``o``."""
        raise NotImplementedError

    def heads(self, config: Any) -> tuple[int, int]:
        """Query heads, and key and value heads."""
        raise NotImplementedError

    def plain(self, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of an ordinary attention, by names below it, with separate projections."""
        return dict(tensors) if self.fused is None else self.fused.split(config, tensors)

    def ordinary(self, config: Any, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `plain`."""
        return dict(plain) if self.fused is None else self.fused.join(config, plain)

    def weights(self, config: Any, plain: Mapping[str, Tensor], index: int) -> AttentionWeights:
        """The projections of attention `index`, from the tensors that `plain` returns."""
        found: dict[str, Any] = {}
        for name in ("query", "key", "value", "output"):
            projection = self.projection(name[0])
            found[name], found[f"{name}_bias"] = plain[f"{projection}.weight"], plain.get(f"{projection}.bias")
        heads, kv_heads = self.heads(config)
        return AttentionWeights(**found, heads=heads, kv_heads=kv_heads)


@dataclass(frozen=True)
class Family(AnyFamily):
    """A family of decoder-only architectures.

    Attributes:
        decoder_layer: Makes an ordinary layer from a config and an index.
        rotary: Makes the module for cos and sin of positions from a config; None without RoPE.
        interleaved: Whether RoPE pairs coordinates 2 i and 2 i + 1, see `rotate`.
        layers, attention: Prefix of the layers' weights, before the index, and of an attention's within a layer.
        output: Name of the output projection, whose weight is stored ``[in, out]`` with `output_conv1d`.
        norm: QK-norm of a whole projection ``[tokens, heads * head_dim]`` in fp64, from the config, the norm's weight
            and the projection.
        norm_weight: The weight that `norm` takes, from an attention's tensors and ``q`` or ``k``; None without a norm.
        scale: Factor on the scores, from a config and a layer's index; None for ``head_dim ** -0.5``.
        refusal: Why a model of a config has no slim form, or None.
        longrope: Whether RoPE of type ``longrope`` works, since the model drops its cache when the frequencies change.
        buffers: Functions of a config that make buffers that no checkpoint holds, by the buffers' names.
        left_out: Ends of names in old checkpoints that models no longer read.
    """

    decoder_layer: Callable[[Any, int], nn.Module]
    rotary: Callable[[Any], Any] | None = None
    interleaved: bool = False
    layers: str = "model.layers."
    attention: str = "self_attn."
    output: str = "o_proj"
    output_conv1d: bool = False
    norm: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    norm_weight: Callable[[Mapping[str, Tensor], str], Tensor | None] = lambda plain, part: plain.get(
        f"{part}_norm.weight"
    )
    scale: Callable[[Any, int], float] | None = None
    refusal: Callable[[Any], str | None] = lambda config: None
    longrope: bool = False
    embed: Callable[[Any, Mapping[str, Tensor], str, Tensor], Tensor] = embed
    run_layer: Callable[[nn.Module, Tensor, Tensor, Any], Tensor] = run_layer
    buffers: Mapping[str, Callable[[Any], Tensor]] = field(default_factory=dict)
    left_out: tuple[str, ...] = (".rotary_emb.inv_freq",)

    @classmethod
    def of(cls, slim_model: Any, **fields: Any) -> Self:
        """As of `AnyFamily`; layers and RoPE are by default the classes that transformers' modelling file names."""
        ordinary = next(one for one in slim_model.__mro__ if one.__module__.startswith("transformers.models."))
        source, (layer,) = sys.modules[ordinary.__module__], ordinary._no_split_modules
        name = slim_model.config_class.__name__.removeprefix("Slim").removesuffix("Config")
        found = {"decoder_layer": getattr(source, layer), "rotary": getattr(source, f"{name}RotaryEmbedding", None)}
        return super().of(slim_model, **found | fields)

    def base_model(self) -> Any:
        return self.slim_model.slim_decoder

    @property
    def plans(self) -> tuple[str, ...]:
        return self.slim_config.plans

    def layer_prefix(self, index: int) -> str:
        return f"{self.layers}{index}."

    def attentions(self, config: Any) -> list[str]:
        """Prefixes of the names of the attentions' weights, layer by layer."""
        return [self.layer_prefix(index) + self.attention for index in range(config.num_hidden_layers)]

    def projection(self, part: str) -> str:
        return self.output if part == "o" else f"{part}_proj"

    def heads(self, config: Any) -> tuple[int, int]:
        return config.num_attention_heads, kv_heads(config)

    def weights(self, config: Any, plain: Mapping[str, Tensor], index: int) -> AttentionWeights:
        if self.output_conv1d:
            name = f"{self.output}.weight"
            plain = {**plain, name: plain[name].mT}
        return replace(
            super().weights(config, plain, index),
            scale=None if self.scale is None else self.scale(config, index),
            query_norm=self._norm(config, self.norm_weight(plain, "q")),
            key_norm=self._norm(config, self.norm_weight(plain, "k")),
        )

    def _norm(self, config: Any, weight: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        norm = self.norm
        return None if norm is None or weight is None else lambda x: norm(config, weight.double(), x)

    def rotation(self, config: Any, tokens: int) -> Rotation | None:
        """RoPE of tokens 0, 1, ..., in fp32 tables; None without RoPE."""
        if self.rotary is None:
            return None
        cos, sin = self.rotary(config)(torch.empty(0), torch.arange(tokens)[None])
        return Rotation(cos[0], sin[0], self.interleaved)

    def fill_buffers(self, module: nn.Module, config: Any, device: torch.device | str = "cpu") -> None:
        """Make the buffers of a module built on the meta device that no checkpoint holds."""
        for part in list(module.modules()):
            for name, child in list(part.named_children()):
                if isinstance(self.rotary, type) and isinstance(child, self.rotary):
                    setattr(part, name, self.rotary(config).to(device))
            for name, buffer in list(part.named_buffers(recurse=False)):
                if buffer.is_meta and name in self.buffers:
                    setattr(part, name, self.buffers[name](config).to(device))


@dataclass(frozen=True)
class EncoderDecoder(AnyFamily):
    """A family of encoder-decoder architectures.

    Attributes:
        slim_base: Class of the slim models without a head.
        decoder: Prefix of the decoder's weights.
        scale: Factor on the scores; None for ``head_dim ** -0.5``.
        score_bias: Makes the bias of positions, ``[heads, tokens, tokens]``, from a model and a number of tokens; None
            without such a bias.
        audio: Whether the encoder reads features of a sound, ``[1, bands, frames]``, rather than a text.
        other_refusal: Why a whole model of a config has no slim form, or None.
    """

    slim_base: type[PreTrainedModel] = field(kw_only=True)
    decoder: str = field(kw_only=True)
    scale: float | None = None
    score_bias: Callable[[PreTrainedModel, int], Tensor] | None = None
    audio: bool = False
    other_refusal: Callable[[Any], str | None] = lambda config: None
    auto: Any = field(default=AutoModelForSeq2SeqLM, kw_only=True)

    def base_model(self) -> Any:
        return self.slim_base

    def refusal(self, config: Any) -> str | None:
        if config.is_encoder_decoder:
            return self.other_refusal(config)
        return (
            f"{config.model_type} without its encoder (is_encoder_decoder) has no slim form; convert the whole model"
        )

    def attentions(self, config: Any) -> list[str]:
        """Prefixes of the weights of the decoder's attentions: self-attention, cross-attention, layer by layer."""
        model = self.slim_model
        layers = config.num_decoder_layers if hasattr(config, "num_decoder_layers") else config.decoder_layers
        return [
            f"{self.decoder}{model.blocks}.{index}.{path}."
            for index in range(layers)  # `num_hidden_layers` are those of the encoder
            for path in (model.self_attention, model.cross_attention)
        ]

    def projection(self, part: str) -> str:
        attention = self.slim_model.slim_attention
        return (*attention.projections, attention.output_projection)["qkvo".index(part)]

    def heads(self, config: Any) -> tuple[int, int]:
        heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
        return heads, heads

    def rotation(self, config: Any, tokens: int) -> None: ...

    def weights(self, config: Any, plain: Mapping[str, Tensor], index: int) -> AttentionWeights:
        return replace(super().weights(config, plain, index), scale=self.scale)


def language_config(config: Any) -> Any:
    """Config of the language model, which is a part of a multimodal model's config."""
    return getattr(config, "text_config", None) or config


def kv_heads(config: Any) -> int:
    """Key and value heads; as many as query heads where a config does not say."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def longest_text(config: Any) -> int:
    """Most tokens of a calibration text: a sliding window at most, as layers are measured without one.

    Up to `original_max_position_embeddings`, RoPE of type ``longrope`` has the frequencies of short texts. T5, which
    has no bound, was trained on 512 tokens.
    """
    names = ("max_target_positions", "max_position_embeddings", "original_max_position_embeddings", "sliding_window")
    return min([bound for name in names if (bound := getattr(config, name, None))], default=512)


def attention_inputs(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Inputs of an attention layer's projections, ``[tokens, d]``, from the arguments of a pass over one row."""
    return (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0]


def longest_contexts(config: Any) -> tuple[int, int]:
    """Most tokens of the decoder and of the encoder, for which a cache is counted."""
    decoded = longest_text(config)
    return decoded, getattr(config, "max_source_positions", None) or decoded
