"""Convert a loaded encoder-decoder model to a slim one."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from ....patches.layers.encoder_decoder import EncoderDecoder
from ..plan_choice import PlanChoice
from ..slim_model import apart, build_slim_model
from .attention_plans import AttentionPlans
from .calibration_pass import model_inputs, record
from .tensors import below


def decoder_to_slim(
    model: PreTrainedModel, family: EncoderDecoder, choice: PlanChoice, ids: Tensor, features: Tensor | None
) -> PreTrainedModel:
    """Make a slim copy of an encoder-decoder model, which shares the weights that stay unchanged.

    Args:
        model: An ordinary model.
        family: Of it.
        choice: Of caches.
        ids: Calibration text, ``[tokens]``.
        features: ``[1, bands, frames]`` for models that read sounds, or None for synthetic ones.

    Raises:
        ValueError: The model is not for generation, or as `to_slim`.
    """
    if type(model).__name__ != family.architecture:
        raise ValueError(f"only models for generation, {family.architecture}, have a slim form, got {type(model)}")
    state = model.state_dict()
    prefixes = family.attentions(model.config)
    recorded = record(model, family, model_inputs(family, model.config, ids, features))

    def own(index: int) -> dict[str, Tensor]:
        return {name: one.cpu() for name, one in below(prefixes[index], state).items()}

    plans = AttentionPlans(family, model.config, choice, recorded, own)
    entries = []
    made = {name: one for name, one in state.items() if not name.startswith(tuple(prefixes))}
    for index, prefix in enumerate(prefixes):
        converted = plans.convert(index)
        entries.append(converted.entry.to_dict())
        tensors = converted.attention(below(prefix, state), family.projection("v"))
        made |= {prefix + name: one.to(model.device) for name, one in tensors.items()}
    slim = build_slim_model(family, model, entries, made, choice)
    # The config of a model that ties more than its head goes on to tie the rest, here and when it is loaded.
    others = apart(model)
    tied = slim.all_tied_weights_keys
    slim.all_tied_weights_keys = {name: other for name, other in tied.items() if name not in others}
    slim.tie_weights(recompute_mapping=False)
    return slim
