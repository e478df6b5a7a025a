"""Calibration pass of an encoder-decoder, which records the inputs of every attention of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import EncoderDecoderCache, PreTrainedModel

from hf_fastdecode._compat import CACHE

from ....patches.layers.encoder_decoder import EncoderDecoder
from ....patches.layers.family import attention_inputs
from ..rounded_cache import RoundedCache


@dataclass(frozen=True)
class Recorded:
    """Inputs of a decoder's attentions on a calibration input, fp32 on the CPU.

    Attributes:
        inputs: ``[tokens, d]`` of every attention's queries, in the order of `EncoderDecoder.attentions`.
        encoded: ``[encoder tokens, key_d]``, the encoder's output.
        score_bias: ``[heads, tokens, tokens]`` of self-attention, or None.
    """

    inputs: list[Tensor]
    encoded: Tensor
    score_bias: Tensor | None


def model_inputs(family: EncoderDecoder, config: Any, ids: Tensor, features: Tensor | None) -> dict[str, Tensor]:
    """Arguments of a forward pass: encoder and decoder read one text, or the encoder reads features.

    Args:
        family: Of the model.
        config: Of the model.
        ids: Text, ``[tokens]``; the decoder's first token is put before it, unless it begins with that.
        features: ``[1, bands, frames]``; synthetic ones when None, for models that read sounds.

    Raises:
        ValueError: The config does not name the decoder's first token, or features are of another shape.
    """
    if (first := getattr(config, "decoder_start_token_id", None)) is None:
        raise ValueError(
            f"the config of this {config.model_type} has no decoder_start_token_id, the decoder's first token; set it "
            "(for T5 to that of padding, 0)"
        )
    decoded = ids if ids[0] == first else torch.cat([torch.tensor([first]), ids[:-1]])
    if not family.audio:
        return {"input_ids": ids[None], "decoder_input_ids": decoded[None]}
    return {
        "input_features": synthetic_features(config) if features is None else check_features(config, features),
        "decoder_input_ids": decoded[None],
    }


def synthetic_features(config: Any) -> Tensor:
    """Synthetic features, ``[1, bands, frames]``: smooth in time and frequency, always the same.

    They lie in the range of Whisper's log-mel features, which are clipped to within 2 of their maximum.
    """
    frames = 2 * config.max_source_positions
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(1, 1, max(2, config.num_mel_bins // 5), max(2, frames // 8), generator=generator)
    smooth = F.interpolate(coarse, (config.num_mel_bins, frames), mode="bilinear", align_corners=True)[:, 0]
    return (0.5 * smooth).clamp(-1, 1)


def read_features(file: Path) -> Tensor:
    """Features from a safetensors file with a tensor ``input_features``.

    Raises:
        ValueError: There is none, or its numbers are not finite.
    """
    try:
        features = load_file(file)["input_features"].float()
    except Exception as error:  # no file, another format, another tensor
        raise ValueError(
            f"{file} holds no tensor input_features, [1, bands, frames], in safetensors ({type(error).__name__})"
        ) from error
    if bad := _not_finite(features):
        raise ValueError(f"{file} holds {bad} inf or nan in input_features; extract the features again")
    return features


def check_features(config: Any, features: Tensor) -> Tensor:
    """Return the features if their shape is right and their numbers are finite.

    Raises:
        ValueError: Their shape is not what the encoder reads, or they hold inf or nan.
    """
    expected = [1, config.num_mel_bins, 2 * config.max_source_positions]
    if list(features.shape) != expected:
        raise ValueError(f"calibration features must be of shape {expected}, got {list(features.shape)}")
    if bad := _not_finite(features):
        raise ValueError(f"calibration features hold {bad} inf or nan; extract them again")
    return features


def _not_finite(features: Tensor) -> int:
    return int(features.isfinite().logical_not().sum())


def record(model: PreTrainedModel, family: EncoderDecoder, inputs: dict[str, Tensor]) -> Recorded:
    """Run a model once, without a cache.

    Args:
        model: An ordinary one.
        family: Of it.
        inputs: From `model_inputs`.
    """
    seen: list[Tensor] = []
    encoded: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(attention_inputs(args, kwargs).float().cpu())
        if kwargs.get("key_value_states") is not None and not encoded:
            encoded.append(kwargs["key_value_states"][0].float().cpu())

    blocks = [model.get_submodule(prefix.rstrip(".")) for prefix in family.attentions(model.config)]
    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(**on_device(model, inputs), use_cache=False)
            tokens = inputs["decoder_input_ids"].shape[1]
            bias = None if family.score_bias is None else family.score_bias(model, tokens).float().cpu()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return Recorded(seen, encoded[0], bias)


def decoder_logits(model: PreTrainedModel, inputs: dict[str, Tensor], int8_layers: Sequence[int] = ()) -> Tensor:
    """Logits of all tokens, fp64: the second half reads the first from the cache, token by token at its end.

    Args:
        model: The model.
        inputs: From `model_inputs`.
        int8_layers: Attentions, in the order of `EncoderDecoder.attentions`, whose keys and values are cached in int8.
    """
    moved = on_device(model, inputs)
    ids = moved.pop("decoder_input_ids")
    half = ids.shape[1] // 2
    steps = min(8, half - 1)
    parts = ids.split([half, ids.shape[1] - half - steps, *[1] * steps], 1)
    parts_in_int8 = ([at // 2 for at in int8_layers if at % 2 == part] for part in (0, 1))
    cache = EncoderDecoderCache(*(RoundedCache(None, torch.int8, layers) for layers in parts_in_int8))
    with torch.no_grad():
        encoded = model.get_encoder()(*moved.values())
        return torch.cat(
            [
                model(encoder_outputs=encoded, decoder_input_ids=part, **{CACHE: cache}).logits[0].double()
                for part in parts
            ]
        )


def on_device(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs where the model is, features in its dtype."""
    return {
        name: one.to(model.device, model.dtype if one.is_floating_point() else None) for name, one in inputs.items()
    }
