"""Finds the decoder of a model: the module without a head, which computes the last hidden states of tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

from transformers import PreTrainedModel
from transformers.utils import ModelOutput


def decoder_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The module of a causal text model that computes its hidden states; the model itself if it has no head.

    Its `forward` takes tokens (``input_ids`` or ``inputs_embeds``, ``[rows, width]``) and ``attention_mask``, and
    returns an output with ``last_hidden_state`` ``[rows, width, hidden_size]``. Where such a module is all of another,
    it is the inner one, which heads call past the outer: `OPTDecoder` rather than the `OPTModel` around it.

    Returns:
        The module; of a model for images or sounds its text decoder. None for a model with an encoder, or whose tokens
        attend to later ones, and for one without such a module.
    """
    if model.config.is_encoder_decoder:
        return None
    text = model.config.get_text_config()
    inside = model.base_model if text is model.config else model
    for module in inside.modules():  # which may be in a wrapper, as `torch.compile` makes one
        if isinstance(module, PreTrainedModel) and module.config is text:
            signature = _signature(type(module).forward)
            if signature.names:  # else it hands all arguments on, such as `BartDecoderWrapper`
                decodes = signature.returns_states(unsaid=module is not model) and _takes_text_alone(module)
                return _innermost(module) if decodes and _is_causal(module, signature) else None
    return None


def _innermost(decoder: PreTrainedModel) -> PreTrainedModel:
    """The innermost decoder that has all weights of this one."""
    weights = len([*decoder.parameters()])
    inside = [module for module in decoder.modules() if isinstance(module, PreTrainedModel)]
    whole = [module for module in inside if len([*module.parameters()]) == weights]
    return [one for one in whole if _signature(type(one).forward).returns_states(unsaid=True)][-1]


class _Signature(NamedTuple):
    """Names of the arguments of a `forward`, and the classes of outputs that its annotation names."""

    names: frozenset[str]
    outputs: list[type[ModelOutput]]

    def returns_states(self, *, unsaid: bool) -> bool:
        """Whether it takes tokens and returns their hidden states; `unsaid` where no annotation tells what."""
        if "attention_mask" not in self.names or self.names.isdisjoint({"input_ids", "inputs_embeds"}):
            return False
        return any(hasattr(kind, "last_hidden_state") for kind in self.outputs) if self.outputs else unsaid


@functools.cache
def _signature(forward: Callable[..., Any]) -> _Signature:
    try:
        found = inspect.signature(forward, eval_str=True)
    except (NameError, TypeError, AttributeError, SyntaxError):  # of annotations that are names for type checkers
        found = inspect.signature(forward)
    _, *others = found.parameters.values()  # without the instance
    names = frozenset(one.name for one in others if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
    kinds = (found.return_annotation, *get_args(found.return_annotation))
    outputs = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ModelOutput)]
    return _Signature(names, outputs)


def _takes_text_alone(decoder: PreTrainedModel) -> bool:
    given = decoder.input_modalities  # a model with a head may have its family's
    return {*([given] if isinstance(given, str) else given)} == {"text"}


def _is_causal(decoder: PreTrainedModel, signature: _Signature) -> bool:
    """Whether no token attends to later ones, as its attention modules say it, or where none does, its class."""
    config = decoder.config
    if not getattr(config, "is_causal", True) or "is_decoder" in signature.names:  # each call says it
        return False
    said = [module.is_causal for module in decoder.modules() if hasattr(module, "is_causal")]
    return any(said) or getattr(config, "is_decoder", not said and "use_cache" in signature.names)
