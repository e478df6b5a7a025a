"""Differences between convertible encoder-decoder architectures, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import AutoModel, AutoModelForSeq2SeqLM, PreTrainedModel

from ...conversion.fit.weights import AttentionWeights
from .family import longest_text, model_name


@dataclass(frozen=True)
class EncoderDecoder:
    """A family of encoder-decoder architectures.

    Attributes:
        architecture: Class of the ordinary models, as in ``config.architectures``.
        slim_model: Class of the slim models, which knows the names of a decoder layer's modules.
        slim_base: Class of the slim models without a head.
        slim_config: Class of their configs, which takes all fields of the ordinary ones.
        embedding: Name of the embedding's weight.
        decoder: Prefix of the decoder's weights.
        scale: Factor on the scores; None for ``head_dim ** -0.5``.
        score_bias: Makes the bias of positions, ``[heads, tokens, tokens]``, from a model and a number of tokens; None
            without such a bias.
        auto: Auto class of the ordinary and of the slim models.
        audio: Whether the encoder reads features of a sound, ``[1, bands, frames]``, rather than a text.
        renamed: Beginnings of names in checkpoints, and their replacements in models.
        other_refusal: Why a whole model of a config has no slim form, or None.
    """

    architecture: str
    slim_model: Any
    slim_base: type[PreTrainedModel]
    slim_config: type
    embedding: str
    decoder: str
    scale: float | None = None
    score_bias: Callable[[PreTrainedModel, int], Tensor] | None = None
    auto: Any = AutoModelForSeq2SeqLM
    audio: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    other_refusal: Callable[[Any], str | None] = lambda config: None

    def register(self) -> None:
        """Register the slim models with the Auto classes."""
        AutoModel.register(self.slim_config, self.slim_base, exist_ok=True)
        self.auto.register(self.slim_config, self.slim_model, exist_ok=True)

    def refusal(self, config: Any) -> str | None:
        """Why a model of a config has no slim form, or None."""
        if config.is_encoder_decoder:
            return self.other_refusal(config)
        return (
            f"{config.model_type} without its encoder (is_encoder_decoder) has no slim form; convert the whole model"
        )

    def model_name(self, stored: str) -> str:
        """Name that a model has for a checkpoint's tensor."""
        return model_name(self.renamed, stored)

    def attentions(self, config: Any) -> list[str]:
        """Prefixes of the weights of the decoder's attentions: self-attention, cross-attention, layer by layer."""
        model = self.slim_model
        return [
            f"{self.decoder}{model.blocks}.{index}.{path}."
            for index in range(decoder_layers(config))
            for path in (model.self_attention, model.cross_attention)
        ]

    def projection(self, part: str) -> str:
        """Name of the projection of queries, keys, values or the output: ``q``, ``k``, ``v`` or ``o``."""
        name: str = self.slim_model.slim_attention.projections["qkvo".index(part)]
        return name

    def plain(self, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of an attention with separate projections: the same, as none are fused."""
        return dict(tensors)

    ordinary = plain

    def rotation(self, config: Any, tokens: int) -> None:
        """None: there is no RoPE."""

    def weights(self, config: Any, own: Mapping[str, Tensor], index: int) -> AttentionWeights:
        """The projections of an attention, from its tensors by their names below it; all indices are read alike."""
        query, key, value, output = (self.projection(part) for part in "qkvo")
        heads = decoder_heads(config)
        return AttentionWeights(
            query=own[f"{query}.weight"],
            key=own[f"{key}.weight"],
            value=own[f"{value}.weight"],
            output=own[f"{output}.weight"],
            heads=heads,
            kv_heads=heads,
            query_bias=own.get(f"{query}.bias"),
            key_bias=own.get(f"{key}.bias"),
            value_bias=own.get(f"{value}.bias"),
            output_bias=own.get(f"{output}.bias"),
            scale=self.scale,
        )


def decoder_layers(config: Any) -> int:
    """Layers of the decoder; `num_hidden_layers` are those of the encoder."""
    layers: int = config.num_decoder_layers if hasattr(config, "num_decoder_layers") else config.decoder_layers
    return layers


def decoder_heads(config: Any) -> int:
    """Heads of the decoder's attentions; `num_attention_heads` may be those of the encoder."""
    heads: int = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
    return heads


def longest_contexts(config: Any) -> tuple[int, int]:
    """Most tokens of the decoder and of the encoder, for which a cache is counted."""
    decoded = longest_text(config)
    return decoded, getattr(config, "max_source_positions", None) or decoded
