"""Differences between convertible architectures, as data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
class Family:
    """A family of architectures: decoders, or encoder-decoders whose decoder attends to itself and to the encoder.

    Attributes:
        architecture: Class of the ordinary models, as in ``config.architectures``.
        slim_model: Class of the slim models.
        slim_config: Class of their configs, which takes all fields of the ordinary ones.
        slim_attention: Class of their attention, which names the projections.
        auto: Auto class of the ordinary and of the slim models.
        layers: Prefix of the decoder layers' weights, before the index.
        paths: Names of a layer's attentions: self-attention and, of encoder-decoders, cross-attention.
        embedding: Name of the embedding's weight.
        renamed: Prefixes of names in checkpoints, and their replacements in models.
        left_out: Ends of names in old checkpoints that models no longer read.
        fused: The fused projection of queries, keys and values; None where there are three.
        output_conv1d: Whether the output projection's weight is stored ``[in, out]``.
        norm: QK-norm of a whole projection ``[tokens, heads * head_dim]`` in fp64, from the config, the norm's weight
            and the projection.
        norm_weight: The weight that `norm` takes, from an attention's tensors and ``q`` or ``k``; None without a norm.
        scale: Factor on the scores, from a config and a layer's index; None for ``head_dim ** -0.5``.
        refused: By name of a config's field, or of a type of layers, why models with it have no slim form.
        longrope: Whether RoPE of type ``longrope`` works, since the model drops its cache when the frequencies change.
        decoder_layer: Of decoders, makes an ordinary layer from a config and an index.
        rotary: Makes the module for cos and sin of positions from a config; None without RoPE.
        buffers: Functions of a config that make buffers that no checkpoint holds, by the buffers' names.
        score_bias: Of encoder-decoders, makes the bias of positions, ``[heads, tokens, tokens]``, from a model and a
            number of tokens; None without such a bias.
        audio: Whether the encoder reads features of a sound, ``[1, bands, frames]``, rather than a text.
    """

    architecture: str
    slim_model: Any
    slim_config: type[SlimConfig]
    slim_attention: Any
    auto: Any
    layers: str
    paths: tuple[str, ...]
    embedding: str = "model.embed_tokens.weight"
    renamed: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = (".rotary_emb.inv_freq",)
    fused: Fused | None = None
    output_conv1d: bool = False
    norm: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    norm_weight: Callable[[Mapping[str, Tensor], str], Tensor | None] = lambda plain, part: plain.get(
        f"{part}_norm.weight"
    )
    scale: Callable[[Any, int], float] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    longrope: bool = False
    decoder_layer: Any = None
    rotary: Callable[[Any], Any] | None = None
    embed: Callable[[Any, Mapping[str, Tensor], str, Tensor], Tensor] = embed
    run_layer: Callable[[nn.Module, Tensor, Tensor, Any], Tensor] = run_layer
    buffers: Mapping[str, Callable[[Any], Tensor]] = field(default_factory=dict)
    score_bias: Callable[[PreTrainedModel, int], Tensor] | None = None
    audio: bool = False

    @classmethod
    def of(cls, slim_model: Any, **fields: Any) -> Self:
        """The family of a class of slim models, which are registered with the Auto classes.

        Layers, attentions and RoPE of decoders are by default those that the classes name.
        """
        config, base = slim_model.config_class, slim_model.slim_base
        if hasattr(slim_model, "cross_attention"):
            found = {"auto": AutoModelForSeq2SeqLM, "paths": (slim_model.self_attention, slim_model.cross_attention)}
        else:
            ordinary = next(one for one in slim_model.__mro__ if one.__module__.startswith("transformers.models."))
            source, (layer,) = sys.modules[ordinary.__module__], ordinary._no_split_modules
            name = config.__name__.removeprefix("Slim").removesuffix("Config")
            found = {"auto": AutoModelForCausalLM, "paths": (base.attention,), "decoder_layer": getattr(source, layer)}
            found["layers"] = f"{slim_model.base_model_prefix}.{base.blocks}."
            found["rotary"] = getattr(source, f"{name}RotaryEmbedding", None)
        found |= {"architecture": slim_model.__name__.removeprefix("Slim"), "slim_attention": base.slim_attention}
        family = cls(slim_model=slim_model, slim_config=config, **found | fields)
        AutoModel.register(config, base, exist_ok=True)
        family.auto.register(config, slim_model, exist_ok=True)
        return family

    @property
    def has_encoder(self) -> bool:
        return len(self.paths) == 2

    def refusal(self, config: Any) -> str | None:
        """Why a model of a config has no slim form, or None."""
        for name, reason in self.refused.items():
            value = getattr(config, name, name in (getattr(config, "layer_types", None) or ()))
            if value is not None and value is not False:
                return reason.format(name=name, value=value)
        return None

    def model_name(self, stored: str) -> str:
        """Name that a model has for a checkpoint's tensor."""
        for old, new in self.renamed.items():
            if stored.startswith(old):
                return new + stored.removeprefix(old)
        return stored

    def attentions(self, config: Any) -> list[str]:
        """Prefixes of the names of the decoder's attentions' weights, layer by layer."""
        names = ("num_decoder_layers", "decoder_layers") if self.has_encoder else ("num_hidden_layers",)
        layers = next(getattr(config, name) for name in names if hasattr(config, name))
        return [f"{self.layers}{index}.{path}." for index in range(layers) for path in self.paths]

    def projection(self, part: str) -> str:
        """Name of the separate projection of queries, keys, values or the output: ``q``, ``k``, ``v`` or ``o``."""
        return (*self.slim_attention.projections, self.slim_attention.output_projection)["qkvo".index(part)]

    def plain(self, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of an ordinary attention, by names below it, with separate projections."""
        return dict(tensors) if self.fused is None else self.fused.split(config, tensors)

    def ordinary(self, config: Any, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `plain`."""
        return dict(plain) if self.fused is None else self.fused.join(config, plain)

    def weights(self, config: Any, plain: Mapping[str, Tensor], index: int) -> AttentionWeights:
        """The projections of attention `index`, from the tensors that `plain` returns, with scale and QK-norm."""
        found: dict[str, Any] = {"scale": None if self.scale is None else self.scale(config, index)}
        for name in ("query", "key", "value", "output"):
            projection = self.projection(name[0])
            found[name], found[f"{name}_bias"] = plain[f"{projection}.weight"], plain.get(f"{projection}.bias")
        if self.output_conv1d:
            found["output"] = found["output"].mT
        for name in ("query", "key"):
            found[f"{name}_norm"] = self._norm(config, self.norm_weight(plain, name[0]))
        # `num_attention_heads` may be those of the encoder.
        heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
        return AttentionWeights(**found, heads=heads)

    def _norm(self, config: Any, weight: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        norm = self.norm
        return None if norm is None or weight is None else lambda x: norm(config, weight.double(), x)

    def rotation(self, config: Any, tokens: int) -> Rotation | None:
        """RoPE of tokens 0, 1, ..., in fp32 tables; None without RoPE."""
        if self.rotary is None:
            return None
        cos, sin = self.rotary(config)(torch.empty(0), torch.arange(tokens)[None])
        return Rotation(cos[0], sin[0], self.slim_attention.interleaved)

    def fill_buffers(self, module: nn.Module, config: Any, device: torch.device | str = "cpu") -> None:
        """Make the buffers of a module built on the meta device that no checkpoint holds."""
        for part in list(module.modules()):
            for name, child in list(part.named_children()):
                if isinstance(self.rotary, type) and isinstance(child, self.rotary):
                    setattr(part, name, self.rotary(config).to(device))
            for name, buffer in list(part.named_buffers(recurse=False)):
                if buffer.is_meta and name in self.buffers:
                    setattr(part, name, self.buffers[name](config).to(device))


def language_config(config: Any) -> Any:
    """Config of the language model, which is a part of a multimodal model's config."""
    return getattr(config, "text_config", None) or config


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
