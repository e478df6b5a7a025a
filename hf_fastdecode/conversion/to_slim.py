"""`to_slim`: convert a loaded model to a slim one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_fastdecode.generation.foreign_code import unwrapped
from hf_fastdecode.patches.config_base import Rope, check_threshold

from ..patches.layers.family import Family, language_config
from .calibration import calibration_text, model_inputs, record
from .families import family_of, require_rope, slim_config, untied
from .fit.attention import AttentionInputs
from .fit.layer_plan import dtype_name
from .layer_converter import LayerConverter, NamedPlan, PlanChoice, below
from .source import WEIGHT_DTYPES


def to_slim(
    model: PreTrainedModel,
    calibration: Tensor | None = None,
    *,
    features: Tensor | None = None,
    tokenizer: Any = None,
    plan: NamedPlan | tuple[tuple[str, int], ...] = "auto",
    rank: int | None = None,
    tolerance: float = 2.0,
    cache_dtype: str | torch.dtype = "auto",
    rope: Rope = "raw",
    sparsity_threshold: float = 0.0,
) -> PreTrainedModel:
    """Make a slim copy of a multi-head model, which caches keys and a few V-coordinates instead of keys and values.

    The copy generates like any transformers model, with transformers' caches, and is saved by ``save_pretrained``.
    It shares unchanged weights with `model`, which is not modified. Each layer gets the smallest cache whose measured
    error is acceptable, at best half the bytes; a layer without such a cache keeps keys and values. See docs/slim.md.

    Args:
        model: A model with multi-head attention, in float32, bfloat16 or float16, of an architecture listed in
            docs/slim-architectures.md. One wrapped by `torch.compile` or DistributedDataParallel is unwrapped first.
        calibration: Token ids of a text typical of what the model will read, ``[tokens]``; the first 1,024 are used,
            or as many as the model takes. If None, a built-in text of English and Python, encoded by `tokenizer`. An
            encoder and its decoder both read it.
        features: For Whisper, whose encoder reads sounds: ``[1, bands, frames]``, from its feature extractor; if None,
            synthetic ones.
        tokenizer: The model's tokenizer.
        plan: ``auto`` measures; ``k`` caches keys alone, ``kv`` keys and values, ``x`` the layer's inputs (GPT-2,
            OPT); or a pair of plan and rank per layer. Encoder-decoder models have further plans, see `PlanChoice`.
        rank: Number of V-coordinates beside the keys of every layer, instead of `plan`.
        tolerance: For ``auto``: largest acceptable error of a layer's output, as a multiple of the error that keys and
            values in the model's dtype make.
        cache_dtype: Dtype of cached keys and V-coordinates. ``auto``: fp16 for models in bf16, else the model's dtype.
            ``fp16``, ``bf16``, also by torch's names or as `torch.dtype`: this dtype. Layers whose keys come near the
            end of its range keep keys and values.
            ``int8``, ``fp8``: for layers whose error is at most `tolerance` times that of keys and values in int8;
            other layers are as with ``auto``.
        rope: ``raw`` caches keys before RoPE and rotates them when they are read, at positions counted from the
            attention mask. ``unrotate`` caches them after RoPE, together with their positions, which may be arbitrary.
        sparsity_threshold: Attention weights of slim layers below it are set to 0 (see `measure_sparsity`); 0 disables
            it. It may be changed later as ``slim_sparsity_threshold`` of the config.

    Returns:
        The slim model, in eval mode, on the same device.

    Raises:
        ValueError: The model has no slim form (grouped-query attention, a quantized model), has adapters, no head, or
            weights that are not in memory; a layer cannot have the plan; an option is out of bounds; or there is no
            usable calibration text.
        TypeError: `model` is not a transformers model and does not wrap one.
    """
    check_threshold(sparsity_threshold)
    choice = PlanChoice(plan, rank, tolerance, cache_dtype, rope)
    model = unwrapped(model)
    family, config = family_of(model.config), language_config(model.config)
    require_rope(family, config, choice.rope)
    _require_plain(model)
    _require_ordinary(model, family)
    ids = calibration_text(config, calibration, tokenizer)
    recorded = record(model, family, model_inputs(family, model.config, ids, features))
    state, prefixes = model.state_dict(), family.attentions(config)

    def attention(index: int) -> tuple[Mapping[str, Tensor], AttentionInputs]:
        return below(prefixes[index], state), recorded[index]

    converter, entries = LayerConverter(family, config, choice, attention), []
    made = {name: one for name, one in state.items() if not name.startswith(tuple(prefixes))}
    for index, prefix in enumerate(prefixes):
        converted = converter.convert(index)
        entries.append(converted.entry.to_dict())
        made |= {prefix + name: one.to(model.device) for name, one in converted.tensors.items()}
    slim = _slim_model(family, model, entries, made, choice.rope)
    language_config(slim.config).slim_sparsity_threshold = sparsity_threshold
    return slim


def _require_plain(model: PreTrainedModel) -> None:
    """Refuse weights that a quantizer rounded, or that tensor parallelism replaced."""
    for name, tensor in model.state_dict().items():
        if type(tensor) is not Tensor:
            raise ValueError(
                f"{name} is of type {type(tensor).__name__}, from which values cannot be solved for; convert the "
                "model first, then quantize or distribute the slim one"
            )
    for name, parameter in model.named_parameters():
        if (dtype := dtype_name(parameter.dtype)) not in WEIGHT_DTYPES:
            raise ValueError(
                f"{name} is of dtype {dtype}, as quantized weights are, from which values cannot be solved for; "
                f"convert the model in {', '.join(WEIGHT_DTYPES)}, then quantize the slim one"
            )


def _require_ordinary(model: PreTrainedModel, family: Family) -> None:
    """Refuse a model that is not for generation, or whose tensors are not those of an ordinary one of its config."""
    if family.has_encoder:
        if type(model).__name__ != family.architecture:
            raise ValueError(f"only models for generation, {family.architecture}, have a slim form, got {type(model)}")
        return
    with torch.device("meta"):
        expected = family.auto.from_config(model.config).state_dict()
    state = model.state_dict()
    if other := sorted(state.keys() ^ expected.keys()):
        raise ValueError(
            f"to_slim takes an ordinary {family.architecture}, and this {type(model).__name__} "
            f"{'has' if other[0] in state else 'lacks'} {other[0]}; pass a causal language model, with adapters "
            "merged into its weights (merge_and_unload)"
        )
    if away := next((name for name, tensor in state.items() if tensor.is_meta), None):
        raise ValueError(f"{away} is not in memory; load the model without offloading, or convert its checkpoint")


def _slim_model(
    family: Family, model: PreTrainedModel, entries: list[dict[str, Any]], state: Mapping[str, Tensor], rope: str
) -> PreTrainedModel:
    """The slim form of a model, in eval mode, with its config's `entries`, one per layer.

    It takes the parameters and saved buffers of `state` without a copy, and everything else from the ordinary model.
    """
    tied: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    saved = model.state_dict()
    # A head that was trained separately differs from the embeddings that its config ties it to.
    separate = {name: other for name, other in tied.items() if saved[name].data_ptr() != saved[other].data_ptr()}
    differing = {name for name, other in separate.items() if not torch.equal(saved[name], saved[other])}
    config = slim_config(family, model.config, entries, model.dtype, rope)
    if tied and differing == tied.keys():
        untied(config)
    config._attn_implementation = "eager" if model.config._attn_implementation == "eager" else "sdpa"
    with torch.device("meta"):
        slim: PreTrainedModel = family.slim_model(config)
    slim.load_state_dict(state, strict=True, assign=True)
    slim.generation_config = deepcopy(model.generation_config)
    if not family.has_encoder:
        family.fill_buffers(slim, language_config(slim.config), model.device)
    for name, buffer in list(slim.named_buffers()):
        if buffer.is_meta:
            path, _, attribute = name.rpartition(".")
            setattr(slim.get_submodule(path), attribute, model.get_buffer(name))
    # A config that ties several tensors, of which some differ, ties the others here and when it is loaded.
    slim.all_tied_weights_keys = {
        name: other for name, other in slim.all_tied_weights_keys.items() if name not in differing
    }
    slim.tie_weights(recompute_mapping=False)
    return slim.eval()
