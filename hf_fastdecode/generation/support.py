"""Which models and calls can share context: checks of both, by layout, modules, processes, mode and arguments."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin, GenerationMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._compat import CACHE, LOOP_METHODS, AnyDropout
from ..attention.overrides import ATTENTION_NAME, own_code_of
from ..cache.layers.cross import ENCODER_OUTPUTS
from ..cache.layout import ModelLayout
from ..cache.shared import SharedContextCache
from ..cache.stores import (
    ENCODER_DECODERS,
    LEAVES_TOKENS_OUT,
    OTHER_ENCODER_DECODERS,
    PER_TOKEN,
    STATES_IN_CACHES,
    STATES_NOT_SHARED,
    Kind,
    leaves_tokens_out,
)
from ..errors import Unsupported
from ..parallel.ranks import common_group, splitting_groups
from .call_context import CallContext
from .foreign_code import check_code
from .forward_pass import arguments_of_decoders, counts_positions, takes_shared_cache
from .snapshot import ModelWalk, attributes
from .structure import Structure

_OF_PIPELINES = "transformers.distributed.pipeline_parallel"
"""Where the module is defined that stands for a layer of another process."""


def check_model(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Raise `Unsupported` if this model, of this layout, can never decode with shared context."""
    name, text = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        _check_encoder_decoder(model, layout)
        _check_attention(text._attn_implementation)
        return
    own = own_code_of(type(model))
    own_states = own is not None and own.states is not None
    _check_layout(layout, keeps_states=own_states or layout.model_type in STATES_IN_CACHES)
    if own_states and not layout.states:
        raise Unsupported(f"the config of {name} does not say which layers have states, as newer transformers' does")
    if layout.states and not takes_shared_cache(model):
        raise Unsupported(f"{name}.forward takes no {CACHE}")
    if layout.states and not layout.per_token:
        return
    said = getattr(model, "_supports_attention_backend", False) or bool(layout.states)  # tried, see STATES_IN_CACHES
    if not said and own is None and not _attends_by_itself(model, layout):
        if not takes_shared_cache(model):
            raise Unsupported(f"{name}.forward takes no {CACHE}")
        raise Unsupported(
            f"{name} does not say that its attention may be replaced (_supports_attention_backend)"
            if _uses_interface(model)
            else f"{name} does not use transformers' attention interface"
        )
    if not counts_positions(model) and not (own is not None and (own.takes_no_positions or own.counts_padding)):
        raise Unsupported(f"{name}.forward takes no position_ids")
    _check_attention(text._attn_implementation)


def _check_layout(layout: ModelLayout, *, keeps_states: bool) -> None:
    """Check that layers store keys and values of every token, nothing, or states where the cache keeps these."""
    kinds, types = {store.kind for _, store in layout}, set[str]()
    reasons = {**OTHER_ENCODER_DECODERS, **STATES_NOT_SHARED}  # of decoders alone, they are the same
    if (reason := reasons.get(layout.model_type)) is not None:
        raise Unsupported(reason)
    served = PER_TOKEN | {Kind.CROSS, Kind.STATE} if keeps_states else PER_TOKEN | {Kind.CROSS}
    for name, stores in zip(layout.types, layout.layers, strict=True):
        types |= {name for store in stores if store.kind not in served}
    if types:
        raise Unsupported(
            f"its layers of type {', '.join(sorted(types))} need more than keys and values of every token"
        )
    if Kind.CROSS in kinds:
        raise Unsupported("it has cross attention")
    if any(store.kind is Kind.LATENT and index not in layout.expanding for index, store in layout):
        raise Unsupported("its cache holds latents from which keys and values are made (multi-head latent attention)")


def _check_encoder_decoder(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Check that a decoder's layers store keys and values, and find their encoder's by the cache's own protocol."""
    name, kind = type(model).__name__, model.config.model_type
    if kind not in ENCODER_DECODERS:
        other = f"the decoder of {kind} is not among those that share what an encoder puts out"
        raise Unsupported(OTHER_ENCODER_DECODERS.get(kind, other))
    if leaves_tokens_out(model.config):
        raise Unsupported(LEAVES_TOKENS_OUT)
    if not takes_shared_cache(model):
        raise Unsupported(f"{name}.forward takes no {CACHE}")
    if any({store.kind for store in stores} - PER_TOKEN - {Kind.CROSS} for stores in layout.layers):
        raise Unsupported("layers of its decoder need more than keys and values of every token")


def _attends_by_itself(model: PreTrainedModel, layout: ModelLayout) -> bool:
    """Whether layers attend by themselves, and those that do not, if any, use the attention interface."""
    return layout.attends_by_itself or (bool(layout.own) and _uses_interface(model))


def _uses_interface(model: PreTrainedModel) -> bool:
    modules = {type(module).__module__ for module in model.modules()}
    return any("ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[name]) for name in modules if name in sys.modules)


def _check_attention(name: str | None) -> None:
    """Check that a config does not name third-party attention, which shared context would bypass."""
    if name is None or name == ATTENTION_NAME or "/" in name:  # hub kernels compute the same as sdpa
        return
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        if (function := registry.get(name)) is None:
            continue
        # Where it is defined: `__module__` may be copied from a wrapped function.
        module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if not module.startswith("transformers."):
            raise Unsupported(
                f"its attention is {name!r} of {module}, which passes with shared context would not call",
                "call model.set_attn_implementation('sdpa')",
            )


def check_state(walk: ModelWalk, *, keeps_cache: bool = True) -> None:
    """Raise `Unsupported` for what may change from call to call: processes, training mode and third-party code.

    Where passes have a cache, also for gradient checkpointing, which drops it.
    """
    if any(kind.__module__ == _OF_PIPELINES for kind in walk.classes):
        raise Unsupported("its layers are divided between processes (pipeline parallelism)")
    splitting_groups(walk.parameters)  # raises for several
    training = [module for module in walk.modules if module.training]
    if keeps_cache and any(getattr(module, "gradient_checkpointing", False) for module in training):
        raise Unsupported("gradient checkpointing in training mode drops the cache", "call model.eval() for the call")
    check_noise(training)
    check_code(walk)
    check_quantized(walk)


_LLM_INT8: Final = "bitsandbytes.nn.modules.Linear8bitLt"


def check_quantized(walk: ModelWalk) -> None:
    """Raise `Unsupported` if layers round a token's activations by those of other tokens.

    LLM.int8 (Dettmers et al., 2022, section 3.2) multiplies a feature in 16 bits for all tokens of a pass if it is an
    outlier of any. Activations that are scaled per tensor have one scale for all tokens of a pass. Packed prompts, and
    batches without finished rows, are other tokens than stock's.
    """
    kinds = [kind for kind in walk.classes if f"{kind.__module__}.{kind.__name__}" == _LLM_INT8]
    if kinds and any(type(module) in kinds and _finds_outliers(module) for module in walk.modules):
        raise Unsupported(
            "its 8-bit layers (bitsandbytes) find outlier features over all tokens of a pass",
            "load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)",
        )
    if any(_scales_all_tokens(weight) for weight in walk.parameters if type(weight) is not nn.Parameter):
        raise Unsupported(
            "its activations are quantized with one scale for all tokens of a pass (PerTensor)",
            "quantize it with granularity=PerRow()",
        )


def _finds_outliers(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "state", None), "threshold", 0.0))


def _scales_all_tokens(weight: Tensor) -> bool:
    """Whether a weight of torchao quantizes the activations that it multiplies so, without a scale that is known."""
    given = getattr(weight, "act_quant_kwargs", None)
    per_tensor = type(getattr(given, "granularity", None)).__name__ == "PerTensor"
    return per_tensor and getattr(weight, "act_quant_scale", None) is None


def check_noise(modules: Iterable[nn.Module]) -> None:
    """Raise `Unsupported` if one of these modules, in training mode, draws noise."""
    config: object = None  # of the module, or of the last one before that has any
    for module in modules:
        config = vars(module).get("config", config)
        if module.training and (noise := _noise_in_training(module)) is not None:
            name, value = noise
            layer = isinstance(module, AnyDropout)
            field = _field_of(config, name, value)
            remedy = "disable_dropout=True in TRL, lora_dropout=0 in PEFT" if layer else f"{field}=0 in its config"
            raise Unsupported(
                f"the model is in training mode with {type(module).__name__}.{name}={value}",
                f"call model.eval(), or load it without noise: {remedy}",
            )


def check_sequence_parallel(model: PreTrainedModel, structure: Structure, *, longest: int) -> None:
    """Raise `Unsupported` where the context of this model's rows, of up to `longest` tokens, cannot be divided."""
    division = structure.division
    if division.group is None:
        return
    alone = "use sequence_parallel=False"
    if len(devices := {parameter.device for parameter in structure.walk.parameters}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(f"it is on several devices ({names}), and each process divides contexts on one", alone)
    if structure.layout.expanding:
        raise Unsupported("its layers store latents (multi-head latent attention), which are not divided yet", alone)
    window = structure.layout.smallest_window
    if window is not None and longest > window:
        division.check_window(window)
    splitting = splitting_groups(structure.walk.parameters)
    if not splitting or common_group(splitting[0], division.group) is not division.group:
        return
    whole = ModelLayout.from_config(model.config)
    heads = ([(store.query_heads, store.kv_heads) for _, store in layout] for layout in (structure.layout, whole))
    if next(heads) != next(heads):
        raise Unsupported(
            f"its attention heads are split between the {division.ranks} processes that would divide contexts",
            "split its other layers only, see hf_fastdecode.sequence_parallel_plan, or use sequence_parallel=False",
        )


def _field_of(config: object, name: str, value: float) -> str:
    """The field of a config that set a module's attribute: with its name, or one that contains it, and its value."""
    fields = attributes(config) if isinstance(config, PreTrainedConfig) else {}
    return min((one for one in fields if name in one and fields[one] == value), key=len, default=name)


def _noise_in_training(module: nn.Module) -> tuple[str, float] | None:
    """Name and value of the module's active dropout or jitter setting, or None."""
    if isinstance(module, AnyDropout):
        return ("p", module.p) if module.p else None
    for name, value in attributes(module).items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float | int) and value > 0 and value is not True:
            return name, value
    return None


def check_processes(structure: Structure) -> None:
    """Raise `Unsupported` where passes gather parameters from several processes, or where several processes compute a
    model whose layers have states, or an encoder."""
    if (gathering := structure.gathering) is not None:
        raise Unsupported(gathering.refused.what, gathering.refused.remedy)  # another one, which keeps no frames
    what = "its layers have states, which are" if structure.layout.states else "it has an encoder, whose output is"
    if structure.layout.beyond_tokens and not structure.alone:
        raise Unsupported(f"{what} not shared where several processes compute a model yet")


def check_prefill(model: PreTrainedModel, structure: Structure) -> None:
    """Raise ValueError for a model of which `prefill` can keep no prompts."""
    name = type(model).__name__
    if structure.layout.cross:
        raise ValueError(
            f"prefill is for models without an encoder, and {name} has one; call generate, which shares each input "
            "between its rows"
        )
    try:
        check_model(model, structure.layout)
        check_processes(structure)
        check_state(structure.walk)
    except Unsupported as error:
        raise ValueError(f"{name} cannot share context: {error}") from error


def why_not_kept(layout: ModelLayout) -> str | None:
    """Why prompts are not kept for later calls, which could not continue them; None where they can."""
    if not layout.continues_states:
        return "its layers' scans do not continue states"
    return "the model has an encoder, and its decoder's prompts are of one input" if layout.cross else None


def rope_limit(config: PreTrainedConfig) -> int | None:
    """Length up to which rotary frequencies do not depend on the text length; None if they never do.

    Dynamic and LongRoPE embeddings switch frequencies with the longest row of the batch, including stored keys.
    """
    # Phi-3 drops the cache at this length, whatever its rope type.
    if (original := getattr(config, "original_max_position_embeddings", None)) is not None:
        return int(original)
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values()):  # for all layers, or per layer type
        kind = (entry.get("rope_type") or "") if isinstance(entry, dict) else ""
        if kind == "longrope" or "dynamic" in kind:
            original = int(entry.get("original_max_position_embeddings") or config.max_position_embeddings)
            # Dynamic embeddings change beyond max_position_embeddings, whatever the entry says.
            return original if kind == "longrope" else min(original, int(config.max_position_embeddings))
    return None


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
_KNOWN_ARGUMENTS = {"attention_mask", "inputs_embeds", "position_ids", CACHE, "use_cache", "logits_to_keep"}
OWN_METHOD: Final = "the model's own"
"""Prefix of the names that `other_loop` has for methods which a user has replaced."""

# Methods of PEFT that hand the model a cache which holds their own keys and values.
_PEFT_WITH_KEYS = ("PREFIX_TUNING", "CARTRIDGE")
# The decoding loop passes its own, or only loops or the first pass take it.
_NOT_IN_STEPS = {
    *("attention_mask", "position_ids", "inputs_embeds", CACHE),
    *("decoder_attention_mask", "decoder_position_ids", "decoder_inputs_embeds", ENCODER_OUTPUTS),
    *("tokenizer", "assistant_tokenizer", "assistant_model"),
}


def check_call(call: CallContext, mode: GenerationMode) -> None:
    """Raise `Unsupported` if a `generate` call must run stock, by its model and arguments."""
    model, structure, config = call.model, call.structure, call.config
    check_model(model, structure.layout)
    if mode not in _MODES:
        raise Unsupported(f"generation mode {mode.value!r} is not accelerated yet")
    check_processes(structure)
    _check_mode(model, structure, mode)
    if config.is_assistant:
        raise Unsupported("the model assists another one")
    if config.use_cache is False:
        raise Unsupported("use_cache=False", "pass use_cache=True")
    if config.output_attentions:
        raise Unsupported("output_attentions=True needs weights that fused attention lacks", "leave it out")
    _check_cache_implementation(config)
    _check_given_cache(call.arguments.get(CACHE), cross=bool(structure.layout.cross))
    check_arguments(call.arguments, _KNOWN_ARGUMENTS | arguments_of_decoders(model))
    if (kind := _adapter_with_keys(model)) is not None:
        raise Unsupported(f"its adapter ({kind}) brings keys and values of its own", "use another, such as LoRA")
    structure.kept("state", lambda: check_state(structure.walk))
    limit = rope_limit(structure.text_config)
    if limit is not None and config.max_length > limit:
        raise Unsupported(
            f"its position embedding changes beyond {limit} tokens, and max_length is {config.max_length}",
            "lower max_new_tokens",
        )


def _check_mode(model: PreTrainedModel, structure: Structure, mode: GenerationMode) -> None:
    name, own = type(model).__name__, own_code_of(type(model))
    if mode is GenerationMode.ASSISTED_GENERATION and structure.layout.beyond_tokens:
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
    if cache is None:
        return
    if not isinstance(cache, SharedContextCache):
        remedy = "leave it out, or pass what hf_fastdecode.prefill returns"
        raise Unsupported(f"{CACHE} is a {type(cache).__name__}, not a SharedContextCache", remedy)
    if cross:
        raise Unsupported(
            "the cache of a model with an encoder is of the inputs of its call, so that no call continues it"
        )
    if cache.inputs is not None:
        raise Unsupported("the cache holds images of the call that returned it, so that no call continues it")


def _check_cache_implementation(config: GenerationConfig) -> None:
    """Check that the requested kind of cache may be another one: a static one if only its memory and speed count."""
    kind = config.cache_implementation
    if kind in (None, "dynamic") or (kind == "static" and not config.return_dict_in_generate):
        return
    returned = ", and return_dict_in_generate returns that cache" if kind == "static" else ""
    raise Unsupported(f"cache_implementation={kind!r} was requested{returned}", "leave it out")


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
