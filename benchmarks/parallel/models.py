"""Models with random weights, whole on each process or split between all, and contexts of random keys and values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.forest import Forest, Span
from hf_fastdecode.attention.kv import Segment
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.measurement.shapes import config_of, random_model

_FEW = 64  # tokens of a context that are computed, so that its cache has the layout of the model's

_POSITIONS = 1 << 21  # longer than any context that is measured


def make_model(
    shape: str, device: torch.device, dtype: torch.dtype, *, split: int | None, whole_heads: bool = False
) -> PreTrainedModel:
    """A model with random weights, the same on every process; or split between `split` of them as by tp_plan="auto".

    With `whole_heads`, each of them has all attention heads. Communicates where it is split.
    """
    if split is None:
        return random_model(shape, device, dtype, positions=_POSITIONS)
    from transformers.distributed import DistributedConfig

    config = config_of(shape, dtype, positions=_POSITIONS)
    with torch.device("meta"):
        family: type[PreTrainedModel] = type(AutoModelForCausalLM.from_config(config))
    plan = fd.sequence_parallel_plan(config) if whole_heads else None
    torch.manual_seed(0)
    with _quiet():  # without a checkpoint every weight is missing, and is drawn as a new model's is
        model = family.from_pretrained(
            None,
            config=config,
            state_dict={},
            dtype=dtype,
            distributed_config=DistributedConfig(tp_size=split, tp_plan=plan),
        )
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, transformers tells nothing but errors, and shows no progress."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def random_prompt(model: PreTrainedModel, context: int) -> Tensor:
    """Random ids ``[1, context]``, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (1, context), generator=generator).to(model.device)


def random_context(model: PreTrainedModel, ids: Tensor) -> SharedContextCache:
    """What `hf_fastdecode.prefill` would return for a prompt ``[1, length]``, with random keys and values.

    Its first tokens are computed; then its node is replaced by a longer one, of which this process draws its part.
    """
    cache = fd.prefill(model, ids[:, :_FEW])
    tokens = ids[0].cpu()
    state = cache.state
    state.padded_length += len(tokens) - state.segment_lengths[0]
    cache.segment_tokens[0], state.segment_lengths[0] = tokens, len(tokens)
    state.forest = Forest.from_paths([(Span(0, 0, len(tokens)),)])
    stored = state.stored_length(0)
    for layer in cache.attention_layers:
        few = layer.storage.segments[0]
        parts = (part.new_empty(part.shape[0], stored, part.shape[2]).normal_() for part in few)
        layer.storage.replace_segments({0: Segment._make(parts)})
    return cache


@torch.no_grad()
def random_stock_context(model: PreTrainedModel, ids: Tensor, rows: int) -> Any:
    """transformers' cache of a prompt ``[1, length]`` for so many rows, with random keys and values."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :_FEW], use_cache=True, logits_to_keep=1, **{CACHE: cache})
    for layer in cache.layers:
        heads, width = layer.keys.shape[1], layer.keys.shape[3]
        for name in ("keys", "values"):
            drawn = layer.keys.new_empty(rows, heads, ids.shape[1], width).normal_()
            setattr(layer, name, drawn)
    return cache
