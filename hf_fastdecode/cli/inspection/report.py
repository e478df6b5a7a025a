"""All that `inspect` counts for one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from hf_fastdecode.conversion.families import is_slim, ordinary_config
from hf_fastdecode.conversion.fit.cache_errors import dtype_name
from hf_fastdecode.conversion.sizes.model_caches import (
    CacheSize,
    decoder_caches,
    decoder_matrices,
    empty_model,
    encoder_decoder_caches,
    refusal,
)
from hf_fastdecode.conversion.sizes.slim_checkpoint import LayerCache, checkpoint_caches, layer_caches

from ...dtypes import parse_dtype
from ...errors import InputError, one_line
from ...model_names import max_positions
from .sharing import Sharing, count_sharing

_UNLIMITED: Final = 512  # tokens, where a config sets no bound


@dataclass(frozen=True)
class ContextCaches:
    """The caches that one row of a context may have."""

    context: int  # tokens of the row
    encoder_tokens: int | None  # of the encoder's output; None for decoder-only models
    sizes: list[CacheSize]  # keys and values first

    def speedup(self, size: CacheSize, rows: int) -> float | None:
        """Reads per token of keys and values, divided by those of another cache; None when unknown."""
        ordinary, other = self.sizes[0].reads(rows), size.reads(rows)
        return None if ordinary is None or other is None else ordinary / other

    def to_json(self, batches: Sequence[int]) -> dict[str, Any]:
        """Plain dictionaries, with bytes as integers and ratios beside them."""
        kv = self.sizes[0].stored
        plain: dict[str, Any] = {"context": self.context}
        if self.encoder_tokens is not None:
            plain["encoder_tokens"] = self.encoder_tokens
        plain["sizes"] = [
            {
                "cache": size.name,
                "bytes": size.stored,
                "of_kv": round(size.stored / kv, 4),
                "bytes_read": size.read,
                "matrix_bytes": size.matrices,
                "per_token": [self._per_token(size, rows) for rows in batches],
            }
            for size in self.sizes
        ]
        return plain

    def _per_token(self, size: CacheSize, rows: int) -> dict[str, Any]:
        reads, speedup = size.reads(rows), self.speedup(size, rows)
        return {
            "batch": rows,
            "bytes_read": None if reads is None else round(reads),
            "speedup_at_most": None if speedup is None else round(speedup, 4),
        }


@dataclass(frozen=True)
class ModelReport:
    """What `inspect` counts for one model."""

    model: str
    model_type: str
    dtype: str
    sharing: Sharing | None  # None for encoder-decoders and slim checkpoints
    refused: str | None  # why `convert-checkpoint` refuses the model
    caches: list[ContextCaches]  # for each context
    slim_layers: list[LayerCache] | None = None  # what each layer of a slim checkpoint caches

    def to_json(self, batches: Sequence[int]) -> dict[str, Any]:
        """Plain dictionaries."""
        fields = {"model": self.model, "model_type": self.model_type, "dtype": self.dtype}
        sharing = {} if self.sharing is None else self.sharing.to_json()
        caches = [one.to_json(batches) for one in self.caches]
        slim: dict[str, Any] = {"slim_refused": self.refused}
        if self.slim_layers is not None:
            slim["slim_layers"] = [
                {
                    "plan": one.layer.plan,
                    "rank": one.layer.rank,
                    "dtype": dtype_name(one.dtype),
                    "bytes_per_token": one.bytes_per_token,
                }
                for one in self.slim_layers
            ]
        return {**fields, **sharing, **slim, "caches": caches}


def inspect_model(
    name: str,
    config: Any,
    contexts: Sequence[int],
    samples: Sequence[int],
    *,
    new_tokens: int,
    dtype: str,
    encoder_tokens: int | None = None,
) -> ModelReport:
    """Count for the config of a model of this name; raises an InputError if the config cannot be counted.

    Without contexts, lengths that the model takes; without `encoder_tokens`, the most that the config allows, else the
    context. The dtype ``auto`` is what the config says, else float32.
    """
    element, slim = _dtype(config, dtype), is_slim(config)
    ordinary = ordinary_config(config) if slim else config
    model = _build(ordinary)
    matrices = None if isinstance(model, str) else decoder_matrices(model)
    sharing = None
    caches = []
    try:
        if not config.is_encoder_decoder and not slim:
            sharing = count_sharing(name, config, model, contexts, samples, new_tokens=new_tokens, dtype=element)
        for context in contexts or [_longest(config)]:
            if config.is_encoder_decoder:
                encoded = encoder_tokens or getattr(config, "max_source_positions", None) or context
                sizes = encoder_decoder_caches(ordinary, context, encoded, element, matrices)
            else:
                encoded, sizes = None, decoder_caches(ordinary, context, element, matrices)
            if slim:  # in the place of the slim caches that the ordinary model could have
                sizes = [sizes[0], *checkpoint_caches(config, context, encoded, element, sizes[0]), sizes[-1]]
            caches.append(ContextCaches(context, encoded, sizes))
    except ValueError as error:
        raise InputError(f"cannot count the KV of {name}: {error}") from error
    layers = layer_caches(config, element) if slim else None
    refused = None if slim else refusal(config)
    return ModelReport(name, config.model_type, dtype_name(element), sharing, refused, caches, layers)


def _build(config: Any) -> PreTrainedModel | str:
    """The model on the meta device, or why it cannot be built."""
    try:
        return empty_model(config)
    except Exception as error:  # whatever the model's own code raises
        return f"the model could not be built from its config: {one_line(error)}"


def _dtype(config: Any, name: str) -> torch.dtype:
    if name == "auto":
        given = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype or torch.float32
        return given if isinstance(given, torch.dtype) else getattr(torch, str(given))
    return getattr(torch, parse_dtype(name))


def _longest(config: Any) -> int:
    """Most tokens in a row, or 512 where the config sets no bound."""
    text = config.get_text_config(decoder=True)
    named = getattr(text, "max_target_positions", None) or max_positions(config) or getattr(text, "n_positions", None)
    return named or _UNLIMITED
