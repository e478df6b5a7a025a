"""Checks of a model: by its layout, its modules, and the processes that compute it."""

from __future__ import annotations

import sys

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..._compat import CACHE, AnyDropout
from ...attention.active_passes import ATTENTION_NAME
from ...attention.own_code import own_code_of
from ...cache.layout import ModelLayout
from ...cache.stores import (
    ENCODER_DECODERS,
    LEAVES_TOKENS_OUT,
    OTHER_ENCODER_DECODERS,
    PER_TOKEN,
    STATES_IN_CACHES,
    STATES_NOT_SHARED,
    Kind,
    leaves_tokens_out,
)
from ...errors import Unsupported
from ...parallel.groups import common_group, splitting_groups
from ...parallel.sequence import window_is_not_divided
from ..foreign_code import check_code
from ..forward_pass import counts_positions, takes_shared_cache
from ..snapshot import ModelWalk, attributes
from ..structure import Structure

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
    refused = {Kind.OTHER} if keeps_states else {Kind.OTHER, Kind.STATE}
    for name, stores in zip(layout.types, layout.layers, strict=True):
        types |= {name for store in stores if store.kind in refused}
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
    """Whether the code of a layer looks up attention functions in transformers' registry."""
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
                f"its attention is {name!r} of {module}, which passes with shared context would not call"
            )


def check_state(walk: ModelWalk) -> None:
    """Raise `Unsupported` for what may change from call to call: processes, training mode and third-party code."""
    if any(kind.__module__ == _OF_PIPELINES for kind in walk.classes):
        raise Unsupported("its layers are divided between processes (pipeline parallelism)")
    splitting_groups(walk.parameters)  # raises for several
    training = [module for module in walk.modules if module.training]
    if any(getattr(module, "gradient_checkpointing", False) for module in training):
        raise Unsupported("gradient checkpointing in training mode drops the cache")
    for module in training:
        if (noise := _noise_in_training(module)) is not None:
            name, value = noise
            layer = isinstance(module, AnyDropout)
            remedy = "disable_dropout=True in TRL, lora_dropout=0 in PEFT" if layer else f"{name}=0 in its config"
            raise Unsupported(
                f"the model is in training mode with {type(module).__name__}.{name}={value}",
                f"call model.eval(), or load it without dropout: {remedy}",
            )
    check_code(walk)


def check_sequence_parallel(model: PreTrainedModel, structure: Structure, *, longest: int) -> None:
    """Raise `Unsupported` where the context of this model's rows, of up to `longest` tokens, cannot be divided."""
    if (parallel := structure.parallel) is None:
        return
    alone = "use sequence_parallel=False"
    if len(devices := {parameter.device for parameter in structure.walk.parameters}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(f"it is on several devices ({names}), and each process divides contexts on one", alone)
    if structure.layout.expanding:
        raise Unsupported("its layers store latents (multi-head latent attention), which are not divided yet", alone)
    window = structure.layout.smallest_window
    if window is not None and longest > window:
        raise window_is_not_divided(window)
    splitting = splitting_groups(structure.walk.parameters)
    if not splitting or common_group(splitting[0], parallel.group) is not parallel.group:
        return
    whole = ModelLayout.from_config(model.config)
    heads = ([(store.query_heads, store.kv_heads) for _, store in layout] for layout in (structure.layout, whole))
    if next(heads) != next(heads):
        raise Unsupported(
            f"its attention heads are split between the {parallel.ranks} processes that would divide contexts",
            "split its other layers only, see hf_fastdecode.sequence_parallel_plan, or use sequence_parallel=False",
        )


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
        raise Unsupported(*gathering)
    what = "its layers have states, which are" if structure.layout.states else "it has an encoder, whose output is"
    if structure.layout.prefills_by_rows and structure.spans_processes:
        raise Unsupported(f"{what} not shared where several processes compute a model yet")


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
