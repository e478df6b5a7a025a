"""What `enable` puts on a model instance, and takes off again.

Methods of the instance are wrapped; the class, the modules and transformers stay as they are:

- ``generate`` hands transformers our decoding loop as its ``custom_generate``, the official place for one: it is
  called with everything prepared, as transformers' own loops are.
- ``_extract_generation_mode_kwargs`` and ``_get_deprecated_gen_repo``: with a ``custom_generate``, transformers 5.17
  to 5.23 drop the streamer, the tokenizer (stop_strings) and the deprecated modes; these two do not see ours.
- ``_prepare_cache_for_generation``, which `generate` calls once it knows the mode: decides whether the call can share.
- ``forward``: while a pass carries a shared-context cache, the functions of `attention.interface` are active.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING

from ..attention.interface import RowLengths, active
from ..cache.shared import SharedContextCache
from .capture import Captures
from .eligibility import call_reason, model_reason
from .modes import choose_mode, configs_of
from .options import Options
from .report import CallReport, Report
from .shared import decode_shared, step_arguments
from .start import NotSharedError, start_shared

logger = logging.getLogger("hf_fastdecode")

STATE_ATTRIBUTE = "_hf_fastdecode"
# transformers itself hangs a call's private facts on the call's own copy of the generation config.
_CALL_ATTRIBUTE = "_hf_fastdecode_call"
# Whether the call under way was given our decoding loop.
_loop_is_ours: ContextVar[bool] = ContextVar("hf_fastdecode_loop", default=False)


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
        self.captures = Captures()
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
        self.tell_once(f"this generate call runs stock transformers: {reason}", level)

    def tell_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log a message the first time; messages that differ in numbers only are one."""
        kind = re.sub(r"\d+", "#", message)
        if kind not in self._told:
            self._told.add(kind)
            logger.log(level, message)


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
    with active(configs_of(model), RowLengths(cache.longest_row(queries))), cache.all_or_nothing():
        output = original(*args, **kwargs)
    if not cache.state.packed and isinstance(input_ids, Tensor):
        cache.record_tokens(input_ids)
    if seams.last_call is not None and seams.last_call.cache_id == id(cache):
        seams.last_call.observe(cache)
    return output


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
    if reason is None and not _loop_is_ours.get():
        reason = (
            "another decoding loop was asked for (custom_generate), or the model's class has a generate of its own"
        )
    if reason is None:
        setattr(generation_config, _CALL_ATTRIBUTE, call)
    elif isinstance(model_kwargs.get("past_key_values"), SharedContextCache):
        raise ValueError(f"this call cannot use a SharedContextCache: {reason}; leave past_key_values out")
    else:
        seams.tell(call, reason)
    original = seams.original(model, "_prepare_cache_for_generation")
    return original(generation_config, model_kwargs, generation_mode, *args, **kwargs)


def _generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    original = vars(model)[STATE_ATTRIBUTE].original(model, "generate")
    signature = inspect.signature(original)
    given = signature.bind_partial(*args, **kwargs).arguments
    takes = "custom_generate" in signature.parameters and len(args) <= list(signature.parameters).index(
        "custom_generate"
    )
    if not takes or given.get("custom_generate") is not None:
        return original(*args, **kwargs)
    token = _loop_is_ours.set(True)
    try:
        return original(*args, **{**kwargs, "custom_generate": _decode})
    finally:
        _loop_is_ours.reset(token)


def _extract_generation_mode_kwargs(
    model: PreTrainedModel, custom_generate: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    original = vars(model)[STATE_ATTRIBUTE].original(model, "_extract_generation_mode_kwargs")
    return original(None if custom_generate is _decode else custom_generate, *args, **kwargs)


def _get_deprecated_gen_repo(
    model: PreTrainedModel, mode: GenerationMode, trust_remote_code: Any, custom_generate: Any = None
) -> Any:
    original = vars(model)[STATE_ATTRIBUTE].original(model, "_get_deprecated_gen_repo")
    return original(mode, trust_remote_code, None if custom_generate is _decode else custom_generate)


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop that `generate` calls: ours where the call shares context, else transformers' own."""
    call: CallReport | None = vars(generation_config).pop(_CALL_ATTRIBUTE, None)
    if call is not None:
        seams: Seams = vars(model)[STATE_ATTRIBUTE]
        new_tokens = generation_config.max_length - input_ids.shape[1]
        call.mode, call.mode_reason = choose_mode(model, seams, step_arguments(model_kwargs), new_tokens)
        try:
            if synced_gpus:
                raise NotSharedError("synced_gpus=True: all processes must run the same number of forward passes")
            start = start_shared(model, seams.options, call, input_ids, generation_config, model_kwargs)
        except NotSharedError as refusal:
            seams.tell(call, str(refusal), refusal.level)
        else:
            return decode_shared(
                model,
                seams,
                call,
                start,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                model_kwargs,
            )
    mode = generation_config.get_generation_mode(model_kwargs.get("assistant_model"))
    stock = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    if "inputs_tensor" in inspect.signature(stock).parameters:  # transformers gives it to loops that name it
        model_kwargs["inputs_tensor"] = inputs_tensor
    return stock(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        **model_kwargs,
    )


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
    "generate": _generate,
    "_extract_generation_mode_kwargs": _extract_generation_mode_kwargs,
    "_get_deprecated_gen_repo": _get_deprecated_gen_repo,
    "_prepare_cache_for_generation": _prepare_cache_for_generation,
}
