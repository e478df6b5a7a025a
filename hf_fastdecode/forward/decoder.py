"""Finds the decoder of a model: the module without a head, which computes the last hidden states of tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

from transformers import PreTrainedModel
from transformers.utils import ModelOutput


def decoder_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The module of a causal text model that computes its hidden states; the model itself if it has no head.

    Its `forward` takes tokens (``input_ids`` or ``inputs_embeds``, ``[rows, width]``) and ``attention_mask``, and
    returns an output with ``last_hidden_state`` ``[rows, width, hidden_size]``. It is the outermost such module:
    `OPTModel` rather than the `OPTDecoder` in it.

    Returns:
        The module; None for a model with an encoder, with inputs other than text, or whose tokens attend to later
        ones, and for one without such a module.
    """
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return None
    modules = (module for module in model.base_model.modules() if isinstance(module, PreTrainedModel))
    decoder = next((module for module in modules if _returns_hidden_states(module, is_base=module is not model)), None)
    return decoder if decoder is not None and _takes_text_alone(decoder) and _is_causal(decoder) else None


def _takes_text_alone(decoder: PreTrainedModel) -> bool:
    given = decoder.input_modalities  # of a model with a head it may be that of the family
    return {*([given] if isinstance(given, str) else given)} == {"text"}


def _returns_hidden_states(module: PreTrainedModel, *, is_base: bool) -> bool:
    """Whether the module's class takes tokens and returns hidden states, by its signature.

    Args:
        module: The module.
        is_base: Whether it is inside the model; without annotations it is then taken to return them.
    """
    parameters, outputs = _signature(type(module).forward)
    if "attention_mask" not in parameters or parameters.isdisjoint({"input_ids", "inputs_embeds"}):
        return False
    return any("last_hidden_state" in vars(kind)["__dataclass_fields__"] for kind in outputs) if outputs else is_base


@functools.cache
def _signature(forward: Callable[..., Any]) -> tuple[frozenset[str], list[type[ModelOutput]]]:
    """Names of a method's parameters, and the outputs that its annotation names."""
    try:
        signature = inspect.signature(forward, eval_str=True)
    except (NameError, TypeError, AttributeError, SyntaxError):  # of names that are imported for types only
        signature = inspect.signature(forward)
    kinds = (signature.return_annotation, *get_args(signature.return_annotation))
    outputs = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ModelOutput)]
    return frozenset(signature.parameters), outputs


def _is_causal(decoder: PreTrainedModel) -> bool:
    """Whether no token attends to later ones, as attention modules say it, or where they do not, the config."""
    if not getattr(decoder.config, "is_causal", True):
        return False
    said = [module.is_causal for module in decoder.modules() if hasattr(module, "is_causal")]
    return any(said) if said else getattr(decoder.config, "is_decoder", True)
