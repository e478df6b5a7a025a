"""Calibration: the text and features that layers are measured on, and the recorded inputs of layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from hf_fastdecode._compat import CACHE
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt

from ..patches.layers.family import Family, attention_inputs, language_config, longest_text
from .fit.attention import AttentionInputs
from .fit.cached_numbers import load, store

TOKENS: Final = 1024
"""Most tokens of a calibration text: half to fit offsets and roundings, half to measure errors on."""

LEAST: Final = 32
"""Fewest tokens, below which errors say nothing about other texts."""

_CHARACTERS_PER_TOKEN: Final = 256  # a text has about 4


def calibration_text(config: Any, ids: Tensor | None, tokenizer: Any, file: Path | None = None) -> Tensor:
    """Token ids of one text, ``[tokens]``, as many as a language model takes: those given, or `calibration_ids`.

    Raises ValueError where there is neither a text nor a tokenizer, the text is too short or no vector of ids, or the
    model does not have one of its ids.
    """
    if ids is None and tokenizer is None:
        raise ValueError("layers are measured on a text: pass ids as `calibration`, or the model's `tokenizer`")
    limit = longest_text(config)
    ids = calibration_ids(tokenizer, file, limit) if ids is None else _prefix(ids, limit)
    if wrong := [bound for bound in map(int, ids.aminmax()) if not 0 <= bound < config.vocab_size]:
        raise ValueError(
            f"the calibration text has id {wrong[-1]}, and the model has {config.vocab_size} tokens, from 0; take the "
            "model's tokenizer"
        )
    return ids


def calibration_ids(tokenizer: Any, file: Path | None = None, limit: int | None = None) -> Tensor:
    """The token ids of a calibration text, ``[tokens]``, of which the model takes `limit` at most.

    The text is a UTF-8 file, or English and Python, the embedded tasks with their solutions. Raises ValueError where
    the file cannot be read, or the text, or the part that the model takes, is too short.
    """
    if file is None:
        tasks = embedded_tasks()
        text = "\n\n".join(few_shot_prompt(tasks[at + 6], tasks[at : at + 6]) for at in (0, 12))
    else:
        try:
            with file.open(encoding="utf-8") as stream:  # of any size; only a prefix is used
                text = stream.read(TOKENS * _CHARACTERS_PER_TOKEN)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the calibration text {file}: {error}; name a UTF-8 text file") from error
    return _prefix(tokenizer(text, return_tensors="pt", truncation=False, verbose=False).input_ids[0], limit)


def _prefix(ids: Tensor, limit: int | None) -> Tensor:
    if limit is not None and limit < LEAST:
        raise ValueError(
            f"layers are measured on {LEAST} tokens or more, and the model takes {limit}; keep it as it is"
        )
    if not isinstance(ids, Tensor):
        raise ValueError(f"calibration must be a tensor of ids of one text, [tokens], got {type(ids).__name__}")
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"calibration must be ids of one text, [tokens], got {ids.dtype} of shape {list(ids.shape)}")
    if len(ids) < LEAST:
        raise ValueError(f"a calibration text needs {LEAST} tokens, got {len(ids)}; give a longer one")
    return ids[: min(TOKENS, limit or TOKENS)]


def model_inputs(family: Family, config: Any, ids: Tensor, features: Tensor | None = None) -> dict[str, Tensor]:
    """Arguments of a forward pass over ids ``[tokens]``; an encoder reads the same text, or features.

    A decoder's first token is put before the text, unless it begins with that. Features are ``[1, bands, frames]``; if
    None, synthetic ones, for models that read sounds. Raises ValueError where the config does not name the decoder's
    first token, or features are of another shape.
    """
    if not family.has_encoder:
        return {"input_ids": ids[None]}
    if (first := getattr(config, "decoder_start_token_id", None)) is None:
        raise ValueError(
            f"the config of this {config.model_type} has no decoder_start_token_id, the decoder's first token; set it "
            "(for T5 to that of padding, 0)"
        )
    decoded = ids if ids[0] == first else torch.cat([torch.tensor([first]), ids[:-1]])
    if not family.audio:
        return {"input_ids": ids[None], "decoder_input_ids": decoded[None]}
    return {
        "input_features": _synthetic_features(config) if features is None else _checked_features(config, features),
        "decoder_input_ids": decoded[None],
    }


def on_device(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs on the model's device, features in its dtype."""
    return {
        name: one.to(model.device, model.dtype if one.is_floating_point() else None) for name, one in inputs.items()
    }


def _synthetic_features(config: Any) -> Tensor:
    """Smooth features ``[1, bands, frames]``, always the same, in the range of Whisper's log-mel features."""
    frames = 2 * config.max_source_positions
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(1, 1, max(2, config.num_mel_bins // 5), max(2, frames // 8), generator=generator)
    smooth = F.interpolate(coarse, (config.num_mel_bins, frames), mode="bilinear", align_corners=True)[:, 0]
    return (0.5 * smooth).clamp(-1, 1)


def read_features(file: Path) -> Tensor:
    """Features, a safetensors file's ``input_features``; ValueError where it has none."""
    try:
        return load_file(file)["input_features"].float()
    except Exception as error:  # no file, another format, another tensor
        raise ValueError(
            f"{file} holds no tensor input_features, [1, bands, frames], in safetensors ({type(error).__name__})"
        ) from error


def _checked_features(config: Any, features: Tensor) -> Tensor:
    expected = [1, config.num_mel_bins, 2 * config.max_source_positions]
    if list(features.shape) != expected:
        raise ValueError(f"calibration features must be of shape {expected}, got {list(features.shape)}")
    if bad := int(features.isfinite().logical_not().sum()):
        raise ValueError(f"calibration features hold {bad} inf or nan; extract them again")
    return features


def record(model: PreTrainedModel, family: Family, inputs: dict[str, Tensor]) -> list[AttentionInputs]:
    """Inputs of every attention, in the order of `attentions`, in one run of an ordinary model, fp32 on the CPU."""
    recorded: list[Tensor] = []
    encoded: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        recorded.append(attention_inputs(args, kwargs).float().cpu())
        if kwargs.get("key_value_states") is not None and not encoded:
            encoded.append(kwargs["key_value_states"][0].float().cpu())

    training, bias = model.training, None
    with ExitStack() as hooks, torch.no_grad():
        hooks.callback(model.train, training)
        for prefix in family.attentions(language_config(model.config)):
            attention = model.get_submodule(prefix.rstrip("."))
            hooks.enter_context(attention.register_forward_pre_hook(keep, with_kwargs=True))
        model.eval()(**on_device(model, inputs), use_cache=False)
        if family.score_bias is not None:
            bias = family.score_bias(model, inputs["decoder_input_ids"].shape[1]).float().cpu()
    if not encoded:
        return [AttentionInputs(one) for one in recorded]
    return [
        AttentionInputs(one, encoded=encoded[0]) if index % 2 else AttentionInputs(one, score_bias=bias)
        for index, one in enumerate(recorded)
    ]


class RoundedCache(DynamicCache):
    """A cache that rounds keys and values of `layers`, or of all, to measure a dtype's errors; it saves no memory.

    In 8 bits a token and head have a scale, as in slim caches. transformers' `QuantizedCache` passes the prompt to
    attention unrounded, and backends other than fp8 also the latest tokens. A config of None is for a cache without
    sliding windows.
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

    In `int8_layers`, attentions in the order of the family's `attentions`, keys and values are cached in int8.
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
