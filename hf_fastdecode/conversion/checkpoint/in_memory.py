"""`to_slim`: a loaded model to a slim one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_fastdecode.patches.slim_layers import check_threshold
from hf_fastdecode.wrappers import unwrapped

from .calibration import calibration_ids, check_ids, check_vocabulary
from .encoder_decoder.architecture import EncoderDecoder
from .encoder_decoder.in_memory import decoder_to_slim
from .families.configs import require_rope
from .families.lookup import family_of
from .family import Family, attention_inputs, language_config, longest_text
from .plan_choice import PlanChoice
from .slim_layer import convert_layer
from .slim_model import build_slim_model, share_buffers


def to_slim(
    model: PreTrainedModel,
    calibration: Tensor | None = None,
    *,
    features: Tensor | None = None,
    tokenizer: Any = None,
    plan: str | tuple[tuple[str, int], ...] = "auto",
    rank: int | None = None,
    tolerance: float = 2.0,
    cache_dtype: str = "auto",
    rope: str = "raw",
    sparsity_threshold: float = 0.0,
) -> PreTrainedModel:
    """A slim copy of a multi-head model, which caches keys (and few coordinates of the values) for keys and values.

    It generates as any model of transformers, with transformers' caches, and saves with ``save_pretrained``. Weights
    that stay as they are are shared with `model`, which itself does not change. Half the cache is the best case: each
    layer gets the smallest cache that measures as accurate as is asked for, and keeps keys and values where none does.

    Args:
        model: A model with multi-head attention, of an architecture of docs/slim.md, in float32, bfloat16 or float16.
            One wrapped by `torch.compile` or DistributedDataParallel is unwrapped first.
        calibration: Ids of a text typical of what the model will read, ``[tokens]``; without, `tokenizer` makes them
            of a built-in text of English and Python. Encoder and decoder both read it.
        features: For Whisper, whose encoder reads sounds: ``[1, bands, frames]``, as its feature extractor makes
            them; without, synthetic ones.
        tokenizer: Of the model.
        plan: ``auto`` measures; ``k`` caches keys alone, ``kv`` keys and values, ``x`` inputs (GPT-2, OPT); or plan
            and rank of each layer. Encoder-decoder models have further ones, see `PlanChoice`.
        rank: V-coordinates beside the keys of every layer, in the place of `plan`.
        tolerance: Of ``auto``: how many times the error that an ordinary cache in the model's dtype makes in a layer's
            output is acceptable.
        cache_dtype: Of keys and V-coordinates. ``auto``: fp16 for models in bf16 where the range allows, else the
            model's dtype. ``fp16``, ``bf16``: for all layers. ``int8``, ``fp8``: for layers that have at most
            `tolerance` times the error of keys and values in int8; others are as with ``auto``.
        rope: ``raw`` caches keys before RoPE and rotates them when they are read, at positions counted from the
            attention mask. ``unrotate`` caches them after RoPE, beside their positions, which may then be any.
        sparsity_threshold: Attention weights of slim layers below it count as 0, which `measure_sparsity` measures;
            0 for none. ``slim_sparsity_threshold`` of its config changes it.

    Returns:
        The slim model, in eval mode, on the same device.

    Raises:
        ValueError: The model has no slim form (grouped-query attention, a quantised model), has adapters, no head or
            weights that are not in memory, a layer cannot have the plan, an option is out of its bounds, or there is
            no usable calibration text.
        TypeError: `model` neither is nor wraps a transformers model.
    """
    check_threshold(sparsity_threshold)
    choice = PlanChoice(plan, rank, tolerance, cache_dtype, rope)
    model = unwrapped(model)
    family, config = family_of(model.config), language_config(model.config)
    require_rope(family, config, choice.rope)
    _require_plain(model)
    if isinstance(family, Family):
        _require_ordinary(model, family)
    if calibration is None:
        if tokenizer is None:
            raise ValueError("to_slim measures layers on a text: pass ids as calibration=, or the model's tokenizer=")
        calibration = calibration_ids(tokenizer, limit=longest_text(config))
    calibration = check_vocabulary(check_ids(calibration), config.vocab_size)
    if isinstance(family, EncoderDecoder):
        slim = decoder_to_slim(model, family, choice, calibration, features)
        slim.config.slim_sparsity_threshold = sparsity_threshold
        return slim
    inputs = layer_inputs(model, family, calibration)
    state, count = model.state_dict(), config.num_hidden_layers
    rotation = family.rotation(config, len(calibration))
    entries = []
    for index in range(count):
        prefix = family.layer_prefix(index) + family.attention
        own = {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}
        plain = family.plain(config, own)
        weights = family.weights(config, {name: one.cpu() for name, one in plain.items()}, index)
        converted = convert_layer(weights, inputs[index], rotation, choice, index, count, plans=family.plans)
        entries.append(converted.entry.to_dict())
        if converted.entry.plan != "kv":
            state = {name: one for name, one in state.items() if not name.startswith(prefix)}
            state |= {prefix + name: one.to(model.device) for name, one in converted.attention(plain).items()}
    slim = build_slim_model(family, model, entries, state, choice)
    slim_config = language_config(slim.config)
    family.fill_buffers(slim, slim_config, model.device)
    share_buffers(model, slim)
    slim.tie_weights()
    slim_config.slim_sparsity_threshold = sparsity_threshold
    return slim


def _require_plain(model: PreTrainedModel) -> None:
    """Refuse weights that a quantizer or tensor parallelism put in the place of tensors."""
    for name, tensor in model.state_dict().items():
        if type(tensor) is not Tensor:
            raise ValueError(
                f"{name} is of type {type(tensor).__name__}, from which values cannot be solved for; convert the "
                "model first, then quantise or distribute the slim one"
            )


def _require_ordinary(model: PreTrainedModel, family: Family) -> None:
    """Refuse a model whose tensors are not those of an ordinary causal language model of its config."""
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


def layer_inputs(model: PreTrainedModel, family: Family, ids: Tensor) -> list[Tensor]:
    """Inputs of every layer's projections on a text, ``[tokens, d]`` each, fp32 on the CPU."""
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(attention_inputs(args, kwargs).float().cpu())

    blocks = [
        model.get_submodule((family.layer_prefix(index) + family.attention).rstrip("."))
        for index in range(language_config(model.config).num_hidden_layers)
    ]
    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(ids[None].to(model.device), use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return seen
