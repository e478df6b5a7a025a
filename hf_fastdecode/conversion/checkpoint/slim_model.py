"""Build a slim model from converted tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...patches.layers.encoder_decoder import EncoderDecoder
from ...patches.layers.family import Family
from .families.configs import slim_config, untied
from .plan_choice import PlanChoice
from .slim_layer import matrix_dtype


def build_slim_model(
    family: Family | EncoderDecoder,
    model: PreTrainedModel,
    entries: Sequence[dict[str, Any]],
    state: Mapping[str, Tensor],
    choice: PlanChoice,
) -> PreTrainedModel:
    """Build the slim form of a model, in eval mode; its weights are not tied yet.

    Args:
        family: Of both models.
        model: The ordinary model, whose config and generation config are copied.
        entries: Of the slim config, one per layer.
        state: All parameters and buffers that are saved, which the slim model takes without a copy.
        choice: Of caches.
    """
    config = slim_config(family, model.config, list(entries), model.dtype, matrix_dtype(model.dtype), choice.rope)
    if (tied := _tied(model)) and apart(model) == tied.keys():
        untied(config)
    config._attn_implementation = "eager" if model.config._attn_implementation == "eager" else "sdpa"
    with torch.device("meta"):
        slim: PreTrainedModel = family.slim_model(config)
    slim.load_state_dict(state, strict=True, assign=True)
    slim.generation_config = deepcopy(model.generation_config)
    return slim.eval()


def apart(model: PreTrainedModel) -> set[str]:
    """Names of tensors that the config ties to others, and that differ from them, as a head that was trained apart."""
    state = model.state_dict()
    return {name for name, other in _tied(model).items() if not _same(state[name], state[other])}


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Names of tensors that the config ties to others, and of those."""
    names: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    return names


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def share_buffers(model: PreTrainedModel, slim: PreTrainedModel) -> None:
    """Give a slim model the buffers that no checkpoint holds, as far as it lacks them: those of the ordinary model."""
    for name, buffer in list(slim.named_buffers()):
        if buffer.is_meta:
            place, _, own = name.rpartition(".")
            setattr(slim.get_submodule(place), own, model.get_buffer(name))
