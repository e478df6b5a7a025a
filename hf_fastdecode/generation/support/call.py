"""Checks of a `generate` call, by its mode, config and arguments; the loop that decodes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin, GenerationMode

from ..._compat import CACHE, LOOP_METHODS
from ...attention.own_code import own_code_of
from ...cache.layers.cross import ENCODER_OUTPUTS
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext
from ..inputs.encoded import prompt_names
from ..structure import Structure
from .model import check_model, check_processes, check_state, rope_limit

# Modules whose overrides of loop methods change nothing that steps of one token need: they drop the cache where the
# position embedding changes (see `rope_limit`), pass logits_to_keep, leave the mask or token types out of steps, or
# count positions by it.
_HARMLESS = {
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        *("phi3", "phimoe"),
        *("bamba", "falcon_h1", "nemotron_h", "zamba", "zamba2"),
        *("falcon_mamba", "mamba", "mamba2"),
        *("ernie4_5_vl_moe", "gemma3", "gemma4", "gemma4_unified", "molmo2"),
        *("mllama", "whisper"),
    )
}
_OUR_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_BEAM_MODES = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
_MODES = (*_OUR_MODES, *_BEAM_MODES, GenerationMode.ASSISTED_GENERATION)
# Model arguments of `generate` that shared context supports.
_KNOWN_ARGUMENTS = {
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    CACHE,
    "use_cache",
    "logits_to_keep",
}
OWN_METHOD: Final = "the model's own"
"""What a model needs another loop for, as `other_loop` names it, begins so where a user has replaced a method."""

# Methods of PEFT that hand the model a cache which holds their own keys and values.
_PEFT_WITH_KEYS = ("PREFIX_TUNING", "CARTRIDGE")
# The decoding loop passes its own, or only loops or the first pass take it.
_NOT_IN_STEPS = {
    *("attention_mask", "position_ids", "inputs_embeds", CACHE),
    *("decoder_attention_mask", "decoder_position_ids", "decoder_inputs_embeds", ENCODER_OUTPUTS),
    *("tokenizer", "assistant_tokenizer", "assistant_model"),
}


def check_call(
    model: PreTrainedModel,
    structure: Structure,
    mode: GenerationMode,
    config: GenerationConfig,
    arguments: dict[str, Any],
) -> None:
    """Raise `Unsupported` if a `generate` call must run stock, by its model and arguments."""
    check_model(model, structure.layout)
    if mode not in _MODES:
        raise Unsupported(f"generation mode {mode.value!r} is not accelerated yet")
    check_processes(structure)
    _check_mode(model, structure, mode)
    if config.is_assistant:
        raise Unsupported("the model assists another one")
    if config.use_cache is False:
        raise Unsupported("use_cache=False")
    if config.output_attentions:
        raise Unsupported("output_attentions=True needs weights that fused attention does not compute")
    _check_cache_implementation(config)
    cross = bool(structure.layout.cross)
    _check_given_cache(arguments.get(CACHE), cross=cross)
    check_arguments(arguments, _KNOWN_ARGUMENTS | ({*prompt_names(model), ENCODER_OUTPUTS} if cross else set()))
    if (kind := _adapter_with_keys(model)) is not None:
        raise Unsupported(f"its adapter ({kind}) brings keys and values of its own")
    structure.kept("state", lambda: check_state(structure.walk))
    limit = rope_limit(structure.text_config)
    if limit is not None and config.max_length > limit:
        raise Unsupported(
            f"its position embedding changes beyond {limit} tokens, and max_length is {config.max_length}"
        )


def _check_mode(model: PreTrainedModel, structure: Structure, mode: GenerationMode) -> None:
    """Check that a model's cache can follow what a mode does with its rows."""
    name, own = type(model).__name__, own_code_of(type(model))
    if mode is GenerationMode.ASSISTED_GENERATION and structure.layout.prefills_by_rows:
        if structure.layout.cross:
            raise Unsupported("assisted decoding is not accelerated yet for models with an encoder")
        # Of other states than convolutions' transformers refuses it.
        raise Unsupported(
            "transformers' own cache keeps the earlier inputs of convolutions that it takes to remove drafts"
        )
    if mode not in _BEAM_MODES:
        return
    if hasattr(model, "_reorder_cache"):
        raise Unsupported(f"{name} reorders its cache by a method of its own")
    if own is not None and own.states is not None and not own.states.beams:
        raise Unsupported(f"transformers does not reorder the states of {name} for beams, and raises")


def _check_given_cache(cache: object, *, cross: bool) -> None:
    """Check that a call can continue the cache that it is given, if any."""
    if cache is None:
        return
    if not isinstance(cache, SharedContextCache):
        raise Unsupported(f"{CACHE} is a {type(cache).__name__}, not a SharedContextCache")
    if cross:
        raise Unsupported(
            "the cache of a model with an encoder is of the inputs of its call, so that no call continues it"
        )
    if cache.inputs is not None:
        raise Unsupported("the cache holds images of the call that returned it, so that no call continues it")


def _check_cache_implementation(config: GenerationConfig) -> None:
    """Check that the kind of cache that was requested may be another one: None and dynamic, and a static one if only
    its memory and speed are wanted."""
    kind = config.cache_implementation
    if kind in (None, "dynamic") or (kind == "static" and not config.return_dict_in_generate):
        return
    returned = ", and return_dict_in_generate returns that cache" if kind == "static" else ""
    raise Unsupported(f"cache_implementation={kind!r} was requested{returned}")


def _adapter_with_keys(model: PreTrainedModel) -> str | None:
    """The kind of PEFT's adapter in use if it fills the cache itself; its `generate` puts this method on the model."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    kind = getattr(getattr(getattr(prepare, "__self__", None), "active_peft_config", None), "peft_type", None)
    name = str(getattr(kind, "value", kind))
    return name if name in _PEFT_WITH_KEYS else None


def check_arguments(arguments: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `Unsupported` if a model argument other than `known` ones has a value other than a switch."""
    for name, value in arguments.items():
        if name not in known and not is_nothing(value) and not isinstance(value, bool):
            raise Unsupported(f"the argument {name!r} is not accelerated yet")


def other_loop(call: CallContext, mode: GenerationMode) -> str | None:
    """Feature that needs transformers' decoding loop over a shared-context cache, or None."""
    model = call.model
    for name in LOOP_METHODS:
        method = getattr(type(model), name, None)
        if name in vars(model):
            return f"{OWN_METHOD} {name}"
        if method is not getattr(GenerationMixin, name, None) and method.__module__ not in _HARMLESS:
            return f"{type(model).__name__}.{name}"
    if mode not in _OUR_MODES:
        return f"generation mode {mode.value!r}"
    if call.config.output_hidden_states:
        return "output_hidden_states=True"
    if not is_nothing(call.arguments.get(call.names.embeddings)):
        return "the prompts are inputs_embeds"
    if call.positions.differ and call.positions.after is None:
        return "position_ids whose planes differ at the end of a prompt"
    return None


def is_nothing(argument: object) -> bool:
    """Whether an argument is equivalent to omitting it: None or an empty collection."""
    return argument is None or (isinstance(argument, Mapping | list | tuple) and not argument)


def step_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Model arguments of `generate` that every step takes too, beyond tokens, positions and cache."""
    return {name: value for name, value in arguments.items() if name not in _NOT_IN_STEPS and not is_nothing(value)}
