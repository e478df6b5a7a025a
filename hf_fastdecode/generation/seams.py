"""What `enable` puts on a model instance, and takes off again.

Three methods of the instance are wrapped; the class, the modules and transformers stay as they are:

- ``_prepare_cache_for_generation``, which `generate` calls once it knows the generation mode: decides whether the
  call can share.
- ``_prefill``, which the sampling loop calls with the expanded prompts: builds the forest, prefills each node once,
  and gives the loop each row's first logits and a shared-context cache. From there on it is transformers' own loop,
  with its own sampler, processors, criteria and streamers.
- ``forward``: while a pass carries a shared-context cache, the functions of `attention.interface` are active.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from ..attention.interface import UnsupportedAttentionError, active
from ..cache.shared import SharedContextCache
from .eligibility import call_reason, input_reason, model_reason
from .options import Options
from .prefill import prefill_nodes
from .prompts import PromptGroup, group_prompts, plan_prompts
from .report import CallReport, Report

logger = logging.getLogger("hf_fastdecode")

STATE_ATTRIBUTE = "_hf_fastdecode"
# transformers itself hangs a call's private facts on the call's own copy of the generation config.
_CALL_ATTRIBUTE = "_hf_fastdecode_call"


class Seams:
    """The state behind one enabled model; it stands in the model's ``__dict__`` and is gone after `uninstall`.

    Raises:
        TypeError: The model is not one that transformers can generate with.
    """

    def __init__(self, model: PreTrainedModel, options: Options):
        missing = [name for name in _WRAPPERS if not hasattr(model, name)]
        if missing:
            raise TypeError(
                f"{type(model).__name__} has no method {missing[0]!r}; enable takes a model that generates, from "
                "transformers >= 5.17, < 6"
            )
        self.options = options
        self.last_call: CallReport | None = None
        # An instance may carry its own versions already (accelerate puts a forward there).
        self._saved = {name: vars(model)[name] for name in _WRAPPERS if name in vars(model)}
        self._told: set[str] = set()

    def install(self, model: PreTrainedModel) -> None:
        """Wrap the model's methods."""
        setattr(model, STATE_ATTRIBUTE, self)
        for name, wrapper in _WRAPPERS.items():
            # A bound method follows a deep copy of the model, a closure over the model would not.
            vars(model)[name] = types.MethodType(_wrapped(wrapper, name, getattr(type(model), name)), model)

    def uninstall(self, model: PreTrainedModel) -> None:
        """Put back what was there. A method that someone replaced since is theirs, and stays."""
        for name in _WRAPPERS:
            if getattr(vars(model).get(name), "__func__", None) not in _OURS:
                continue
            if name in self._saved:
                vars(model)[name] = self._saved[name]
            else:
                del vars(model)[name]
        vars(model).pop(STATE_ATTRIBUTE, None)

    def original(self, model: PreTrainedModel, name: str) -> Callable[..., Any]:
        """The model's method as it was before `install`."""
        return self._saved[name] if name in self._saved else types.MethodType(getattr(type(model), name), model)

    def tell(self, call: CallReport, reason: str, level: int = logging.WARNING) -> None:
        """Note that a call runs stock; log it the first time for each reason."""
        call.path, call.reason = "stock", reason
        if reason not in self._told:
            self._told.add(reason)
            logger.log(level, "this generate call runs stock transformers: %s", reason)


def seams_of(model: PreTrainedModel) -> Seams | None:
    """The state of an enabled model, or None."""
    return vars(model).get(STATE_ATTRIBUTE)


def report_on(model: PreTrainedModel) -> Report:
    """What `hf_fastdecode.explain` returns."""
    seams = seams_of(model)
    return Report(
        model=type(model).__name__,
        enabled=seams is not None,
        layer_count=model.config.get_text_config(decoder=True).num_hidden_layers,
        model_reason=model_reason(model),
        last_call=seams.last_call if seams else None,
    )


def _forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    seams = vars(model)[STATE_ATTRIBUTE]
    original = seams.original(model, "forward")
    cache = kwargs.get("past_key_values")
    if cache is None:
        cache = next((argument for argument in args if isinstance(argument, SharedContextCache)), None)
    if not isinstance(cache, SharedContextCache):
        return original(*args, **kwargs)
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    queries = input_ids.shape[1] if isinstance(input_ids, Tensor) else 0
    with active(_configs(model), cache.longest_row(queries)), cache.all_or_nothing():
        output = original(*args, **kwargs)
    if not cache.state.packed and isinstance(input_ids, Tensor):
        cache.record_tokens(input_ids)
    if seams.last_call is not None and seams.last_call.cache_id == id(cache):
        seams.last_call.observe(cache)
    return output


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The distinct config objects of the model and its modules."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if isinstance(config, PreTrainedConfig)]


def _prepare_cache_for_generation(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    *args: Any,
    **kwargs: Any,
) -> Any:
    seams: Seams = vars(model)[STATE_ATTRIBUTE]
    seams.last_call = call = CallReport()
    reason = call_reason(model, generation_mode, generation_config, model_kwargs)
    if reason is None:
        setattr(generation_config, _CALL_ATTRIBUTE, call)
    elif isinstance(model_kwargs.get("past_key_values"), SharedContextCache):
        raise ValueError(f"this call cannot use a SharedContextCache: {reason}; leave past_key_values out")
    else:
        seams.tell(call, reason)
    original = seams.original(model, "_prepare_cache_for_generation")
    return original(generation_config, model_kwargs, generation_mode, *args, **kwargs)


def _prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    seams: Seams = vars(model)[STATE_ATTRIBUTE]
    call: CallReport | None = vars(generation_config).pop(_CALL_ATTRIBUTE, None)
    if call is not None:
        output = _shared_prefill(model, seams, call, input_ids, generation_config, model_kwargs)
        if output is not None:
            return output
    return seams.original(model, "_prefill")(input_ids, generation_config, model_kwargs, *args, **kwargs)


def _shared_prefill(
    model: PreTrainedModel,
    seams: Seams,
    call: CallReport,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> ModelOutput | None:
    """The rows' first logits, with the cache to go on with; None, and the reason told, to run stock."""
    given = model_kwargs.get("past_key_values")
    given = given if isinstance(given, SharedContextCache) and given.layers else None
    mask = model_kwargs.get("attention_mask")
    reason = input_reason(input_ids, mask, model_kwargs.get("position_ids"))
    if reason is not None:
        _stock(seams, call, reason, given)
        return None

    if given is not None:
        _check_shape(model, given)
    options, width = seams.options, input_ids.shape[1]
    groups = group_prompts(input_ids, mask)
    max_suffix = generation_config.max_length - width
    cache = (SharedContextCache() if given is None else given).fork(max_suffix=max_suffix, backend=options.backend)
    plan = plan_prompts(groups, cache, min_shared_tokens=options.min_shared_tokens)
    if given is not None and not all(plan.known_lengths):
        raise ValueError(
            f"prompt {plan.known_lengths.index(0)} does not begin with tokens of the cache; pass the whole text, with "
            "the part that the cache holds"
        )
    # Where the cache holds a whole prompt, or all but its last token, that token runs (again) as the first step.
    feed_last = None in plan.ends or (given is not None and len(plan.new_tokens) <= len(groups))
    if feed_last:
        groups = [PromptGroup(group.tokens[:-1], group.count) for group in groups]
        plan = plan_prompts(groups, cache, min_shared_tokens=options.min_shared_tokens)
        cache.state.max_suffix, width = max_suffix + 1, width - 1

    total = sum(plan.forest.context_lengths)
    saved, least = total - plan.forest.stored_tokens, max(1, options.min_saved_tokens)
    if given is None and saved < least:
        reason = f"sharing would save {saved} tokens, fewer than {least} (min_saved_tokens)"
        _stock(seams, call, reason, None, logging.INFO)
        return None

    call.path, call.reason = "shared", f"{saved} of {total} context tokens are shared"
    call.rows, call.padded_length, call.forest = len(input_ids), input_ids.shape[1], repr(plan.forest)
    call.context_width, call.cache_id = width, id(cache)
    call.prefilled_tokens, call.stored_tokens = len(plan.new_tokens), plan.forest.stored_tokens
    at_once = min(generation_config.prefill_chunk_size or options.max_prefill_tokens, options.max_prefill_tokens)
    try:
        logits = prefill_nodes(model, cache, plan, max_tokens=at_once, length=width)
    except UnsupportedAttentionError as error:
        _stock(seams, call, str(error), given)
        return None
    model_kwargs["past_key_values"] = cache
    if feed_last or logits is None:
        last = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1, is_first_iteration=True, **model_kwargs
        )
        return model(**last, return_dict=True)
    counts = torch.tensor([group.count for group in groups], device=logits.device)
    return CausalLMOutputWithPast(
        logits=logits.repeat_interleave(counts, dim=0)[:, None],  # [rows, 1, vocabulary]
        past_key_values=cache,
    )


def _check_shape(model: PreTrainedModel, cache: SharedContextCache) -> None:
    """Refuse a cache that another model's layers filled, as far as shapes tell."""
    config = model.config.get_text_config(decoder=True)
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"the cache holds {len(cache.layers)} layers, the model has {config.num_hidden_layers}; make it with "
            "hf_fastdecode.prefill(model, ...) of this model"
        )
    keys = next(iter(cache.layers[0].segments.values())).keys
    kv_heads = getattr(config, "num_key_value_heads", None) or keys.shape[0]
    if keys.shape[0] != kv_heads or keys.dtype != model.dtype:
        raise ValueError(
            f"the cache holds {keys.shape[0]} KV heads in {keys.dtype}, the model has {kv_heads} in {model.dtype}; "
            "make it with hf_fastdecode.prefill(model, ...) of this model"
        )


def _stock(
    seams: Seams, call: CallReport, reason: str, given: SharedContextCache | None, level: int = logging.WARNING
) -> None:
    if given is not None:
        raise ValueError(f"this call cannot use a SharedContextCache: {reason}")
    seams.tell(call, reason, level)


def _wrapped(wrapper: Callable[..., Any], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls `wrapper` and looks like `original`: generate reads signatures."""

    @functools.wraps(original)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if STATE_ATTRIBUTE not in vars(self):  # disabled, but another hook on the instance kept this method
            return original(self, *args, **kwargs)
        return wrapper(self, *args, **kwargs)

    _OURS.add(method)
    return method


_OURS: WeakSet[Callable[..., Any]] = WeakSet()
_WRAPPERS: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "_prepare_cache_for_generation": _prepare_cache_for_generation,
    "_prefill": _prefill,
}
