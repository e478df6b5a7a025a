"""The ``custom_generate`` that `generate` is given, and whether a model's `generate` takes one.

Others may have replaced or wrapped it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.utils import ModelOutput

from ..._compat import CACHE, is_compiled_in_place
from ...attention.own_code import own_code_of
from ...cache.shared import SharedContextCache
from ..active_call import active_call_of_thread
from ..decoding.decisions import agreed_criteria
from ..decoding.decode import decode_shared
from ..prompts.start import start_shared
from ..same_calls import require_same_draws
from ..steps.modes import call_passes, choose_mode
from ..steps.prefill_passes import begin_compiling_sampler


def decode(
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
    """Decoding loop passed as ``custom_generate``; calls that cannot share context go to transformers' own loop."""
    call, active_call = None, active_call_of_thread.get()
    if active_call is not None:
        call, active_call.context = active_call.context, None
    if call is not None and call.model is model:
        call.config, call.arguments = generation_config, model_kwargs
        new_tokens = int(generation_config.max_length) - input_ids.shape[1]  # may be another library's integer
        call.set_mode(*choose_mode(call, new_tokens))
        begin_compiling_sampler(call, logits_processor, input_ids)
        with call_passes(call) as passes:
            with call.or_stock():
                start = start_shared(call, passes, input_ids)
            if not call.runs_stock:
                if is_compiled_in_place(model):
                    call.state.log_once(
                        "model.compile() does not apply to passes with shared context, which run uncompiled; "
                        "on a GPU they are captured in CUDA graphs"
                    )
                return _for_callers(
                    model,
                    decode_shared(
                        call, passes.make_steps, start, input_ids, logits_processor, stopping_criteria, streamer
                    ),
                )
        if call.must_share:  # its prompts cannot use the given cache
            model_kwargs[CACHE] = call.stock_cache()
        require_same_draws(call, "transformers")
        call.ranks.watchdog.enter_foreign_loop()
    if active_call is not None and not isinstance(model_kwargs.get(CACHE), SharedContextCache):
        active_call.give_back(model_kwargs)
    elif active_call is not None and active_call.inputs is not None:
        model_kwargs |= active_call.inputs.of_each_pass(model)  # needed if the first pass runs stock after all
    mode = generation_config.get_generation_mode(model_kwargs.get("assistant_model"))
    stock = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    if "inputs_tensor" in inspect.signature(stock).parameters:  # passed to loops that accept it
        model_kwargs["inputs_tensor"] = inputs_tensor
    if active_call is not None and active_call.model is model and active_call.structure is not None:
        ranks = active_call.structure.ranks
        stopping_criteria = agreed_criteria(ranks, stopping_criteria, input_ids.device)
        if ranks.count > 1:  # the criteria have it; a draft that ended by it would be shorter on one of them
            generation_config.max_time = None
    output = stock(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        **model_kwargs,
    )
    return _for_callers(model, output)


def _for_callers(model: PreTrainedModel, output: Any) -> Any:
    """An output without a shared cache where a class's own `generate` would read each row's tensors in it."""
    if not reads_its_cache(type(model)) or not isinstance(output, ModelOutput):
        return output
    if not isinstance(output.get(CACHE), SharedContextCache):
        return output
    return type(output)(**{name: value for name, value in output.items() if name != CACHE})


_HAND_LOOP_ON: Final = frozenset(
    {
        "WhisperGenerationMixin.generate",
        *(f"SeamlessM4T{version}For{task}ToText.generate" for version in ("", "v2") for task in ("Text", "Speech")),
    }
)
"""A `generate` of transformers' classes that calls transformers' with what else it is given, once or several times."""

_signatures: WeakKeyDictionary[Callable[..., Any], inspect.Signature] = WeakKeyDictionary()
"""Signatures of methods of classes, less their instance."""


def signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """A method's signature, which is made once for a class where its instance is bound by a partial."""
    of_class = method.func if isinstance(method, partial) and len(method.args) == 1 and not method.keywords else None
    if not isinstance(of_class, FunctionType):
        return inspect.signature(method)
    if (found := _signatures.get(of_class)) is None:
        found = _signatures[of_class] = inspect.signature(method)
    return found


def takes_loop(signature: inspect.Signature, given: int) -> bool:
    """Whether ``custom_generate`` is a parameter after the `given` positional arguments."""
    names = list(signature.parameters)
    return "custom_generate" in names and given <= names.index("custom_generate")


def reads_its_cache(kind: type) -> bool:
    """Whether a class's own `generate` reads the tensors of each row in the cache that transformers' returns."""
    return _of_transformers(kind) == "WhisperGenerationMixin.generate"


def _of_transformers(kind: type) -> str | None:
    """The qualified name of a class's `generate`, if it is of one of transformers' models."""
    method = getattr(kind, "generate", None)
    of_models = getattr(method, "__module__", "").startswith("transformers.models.")
    return getattr(method, "__qualname__", None) if of_models else None


def wrappers_pass_loop_on(function: Callable[..., Any]) -> bool:
    """Whether wrappers take ``custom_generate``, or any argument: they may take fewer than what they wrap."""
    inner: Callable[..., Any] | None = function
    while inner is not None:
        if isinstance(inner, partial):
            inner = inner.func
            continue
        if not _takes_or_passes_on(inner):
            return False
        inner = getattr(inner, "__wrapped__", None)
    return True


def _takes_or_passes_on(function: Callable[..., Any]) -> bool:
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is not None and (code.co_flags & inspect.CO_VARKEYWORDS) and not hasattr(function, "__signature__"):
        return True
    signature = inspect.signature(function, follow_wrapped=False)
    return "custom_generate" in signature.parameters or takes_any(signature)


def takes_any(signature: inspect.Signature) -> bool:
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())


def hands_generate_on(kind: type, arguments: Mapping[str, Any]) -> bool:
    """Whether a class of transformers has a `generate` of its own that hands a call on, see `OwnCode`."""
    own, name = own_code_of(kind), _of_transformers(kind)
    if name in _HAND_LOOP_ON:
        return True
    return own is not None and name is not None and own.hands_generate_on(arguments)


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
