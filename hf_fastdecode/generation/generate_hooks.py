"""Overrides of an enabled model's methods.

Each is called with the state (`ModelState`), the model and the method's arguments:

- ``generate`` passes this package's decoding loop as ``custom_generate``, transformers' official extension point,
  called with the same prepared arguments as its own loops. The loop forwards unsupported calls to transformers' loops.
- ``_extract_generation_mode_kwargs`` and ``_get_deprecated_gen_repo``: with a ``custom_generate``, transformers 5.17
  to 5.23 drop the streamer, the tokenizer (stop_strings) and the deprecated modes; these two hide ours.
- ``_prepare_cache_for_generation``, which `generate` calls once it knows the mode: decides whether the call can share,
  and gives other decoding loops a cache that prefills on their first pass (`first_pass`).
- `_compat.ENCODE`, which `generate` calls to run an encoder: runs it once for neighbouring rows of one input.
- ``_expand_inputs_for_generation``, and `ENCODE` where images are a decoder's: hold back images, video or audio of a
  call (`inputs.hooks`).
- ``forward``: activates the functions of `attention.interface` for passes with a shared-context cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMixin, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.utils import ModelOutput

from .._compat import (
    CACHE,
    ENCODE,
    TRANSFORMERS,
    cache_in,
    ignored_cache,
    is_compiled_in_place,
    untested_transformers,
    with_cache,
)
from ..attention.interface import RowLengths
from ..attention.stand_in_calls import at_positions
from ..cache.direct_pass import check_mask, named_arguments, next_positions
from ..cache.encoder_decoders import ENCODER_DECODERS
from ..cache.layers.cross import ENCODER_OUTPUTS
from ..cache.shared import SharedContextCache
from ..errors import Unsupported
from ..parallel.groups import in_several_processes
from ..parallel.unwatched import UNWATCHED, Unwatched
from .active_call import ActiveCall, active_call_of_thread
from .call_context import CallContext
from .decoding.decisions import agreed_criteria
from .decoding.loop import decode_shared
from .forward_pass import input_device, takes_positions
from .inputs.encoded import encode_distinct, prompt_names
from .inputs.hooks import INPUT_METHODS, hold_before_encoding
from .loop_argument import (
    hands_generate_on,
    name_of,
    pass_loop_on,
    reads_its_cache,
    signature_of,
    takes_any,
    takes_loop,
)
from .model_state import ModelState
from .prompts.first_pass import FirstPassPrompts
from .prompts.start import start_shared
from .report import CallReport
from .same_calls import require_same_call, require_same_draws, require_same_pass
from .steps.early_kernels import begin_compiling_sampler
from .steps.modes import call_passes, choose_mode
from .structure import Structure
from .support import check_call, check_sequence_parallel, forget_offset, other_loop

# Arguments of transformers' `_prepare_cache_for_generation` that ours reads.
_PREPARED_FROM = ("generation_config", "model_kwargs", "generation_mode", "max_cache_length")


def _forward(model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    cache = cache_in(kwargs)
    if isinstance(ignored_cache(kwargs), SharedContextCache):
        model_state.log_once(
            f"a pass was given a SharedContextCache as cache=, which transformers {TRANSFORMERS} calls {CACHE} and "
            "otherwise ignores: the pass runs without it"
        )
    if cache is None:
        cache = next((argument for argument in args if isinstance(argument, SharedContextCache)), None)
    if not isinstance(cache, SharedContextCache):
        return model_state.methods.original(model, "forward")(*args, **kwargs)
    return _forward_shared(model_state, model, cache, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as `forward_pass` does, for direct passes
def _forward_shared(
    model_state: ModelState, model: PreTrainedModel, cache: SharedContextCache, /, *args: Any, **kwargs: Any
) -> Any:
    names = list(inspect.signature(type(model).forward).parameters)[1:] if args else []
    given = named_arguments(names, args, kwargs)
    if cache.first_pass is not None:
        return cache.first_pass.run(cache, with_cache(given, cache), model_state.methods.original(model, "forward"))
    called = prompt_names(model)
    input_ids = given.get(called.ids)
    inputs = input_ids if input_ids is not None else given.get(called.embeddings)
    rows, queries = inputs.shape[:2] if isinstance(inputs, Tensor) else (0, 0)
    if not cache.state.packed:
        if cache.checks_masks:
            check_mask(cache, given.get(called.mask), queries)
        unplaced = given.get(called.positions) is None and takes_positions(model)
        if isinstance(inputs, Tensor) and len(inputs) == cache.rows and unplaced:
            # The model would count from the longest row, padding included.
            given |= {called.positions: next_positions(cache, queries).to(inputs.device)}
            args, kwargs = (), given
    if cache.inputs is not None:  # in the place of as many rows as the decoder has
        given |= cache.inputs.arguments
    elif model.config.is_encoder_decoder:
        raise ValueError(f"a SharedContextCache of a {type(model).__name__} is made by generate, for its inputs alone")
    structure = _structure(model_state, model)
    active_call = active_call_of_thread.get()
    if active_call is not None and active_call.loop is not None:
        structure.forget()  # the user's loop may have changed the model since the last pass
        if not cache.state.packed:
            require_same_pass(model, structure.ranks, input_ids, queries)
    output = cache.later_passes.run(cache, with_cache(given, cache)) if cache.later_passes is not None else None
    if output is None:
        own = cache.state.tensors_of_pass is not None  # by transformers' own attention
        passing = nullcontext() if own else structure.passing(RowLengths(cache.longest_row(queries)))
        alike = cache.all_or_nothing(rows, queries)
        with structure.ranks.watch.running_pass(model_state.options.peer_timeout), passing, alike:
            if active_call is None and not cache.state.packed:  # prefill may give each process a part of a pass
                require_same_pass(model, structure.ranks, input_ids, queries)
            if cache.state.met is None or cache.state.met() is not model:
                cache.meet(structure.layout)
                cache.state.met = ref(model)
            forward = model_state.methods.original(model, "forward")
            positions = given.get(called.positions)
            if positions is None and cache.inputs is not None:  # counted by the slots of the cache
                positions = torch.arange(queries, device=input_device(model))[None] + cache.get_seq_length()
            with at_positions(positions):
                if cache.inputs is None:
                    output = forward(*args, **kwargs)
                else:
                    output = forward(**with_cache(given, cache.inputs.view(cache, cache.state)))
                    output[CACHE] = cache
            if not cache.state.packed and isinstance(input_ids, Tensor):
                cache.record_tokens(input_ids)
    report = model_state.last_call
    if report is not None and report.cache is not None and report.cache() is cache:
        report.observe(cache)
    return output


def _structure(model_state: ModelState, model: PreTrainedModel) -> Structure:
    """The model's structure, read once per call."""
    call = active_call_of_thread.get()
    if call is None or call.model is not model:
        return model_state.structure_of(model)
    if call.structure is None:
        call.structure = model_state.structure_of(model)
    return call.structure


def _prepare_cache_for_generation(
    model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any
) -> Any:
    prepare = partial(model_state.methods.original(model, "_prepare_cache_for_generation"), *args, **kwargs)
    active_call = active_call_of_thread.get()
    loop_is_ours = active_call is not None and active_call.loop_is_ours
    users_loop = active_call.loop if active_call is not None else None
    if active_call is not None and active_call.model is model:
        active_call.context = None  # of an earlier try, which failed before it decoded
    if model_state.disable_pending and not loop_is_ours:
        return prepare()
    model_state.last_call = report = CallReport()
    if active_call is not None and active_call.model is model:
        active_call.report = report
    given = signature_of(partial(GenerationMixin._prepare_cache_for_generation, model)).bind(*args, **kwargs).arguments
    newer = untested_transformers()
    if newer is not None and (missing := [name for name in _PREPARED_FROM if name not in given]):
        report.reason = f"transformers {newer}, newer than tested, prepares its cache without {', '.join(missing)}"
        model_state.log_once(f"this generate call runs stock transformers: {report.reason}")
        return prepare()
    generation_config, model_kwargs, generation_mode, max_cache_length = map(given.__getitem__, _PREPARED_FROM)
    structure = _structure(model_state, model)
    call = CallContext(model, model_state, generation_config, model_kwargs, report, structure)
    report.ranks = call.ranks.count
    given_tensors: dict[str, Tensor] = {}
    if active_call is not None and active_call.model is model:
        call.scope, given_tensors = active_call.scope, active_call.given
        held = active_call.inputs
        call.inputs = None if held is None or held.says_nothing else held
    loop = other_loop(call, generation_mode) if users_loop is None else "custom_generate"
    require_same_call(call, given_tensors, loop or generation_mode.value)
    with call.or_stock(), call.ranks.together():
        check_call(model, structure, generation_mode, generation_config, model_kwargs)
        if call.inputs is not None:
            call.inputs.check(model, structure, generation_mode)
        check_sequence_parallel(model, structure, longest=max_cache_length + 1)
        if not loop_is_ours and users_loop is None:
            raise Unsupported(_why_not_ours(model_state, model))
        if loop is not None and generation_config.cache_implementation == "static":
            raise Unsupported(f"cache_implementation='static' was requested for the loop of {loop}")
    if call.runs_stock:
        model_state.captures.end_ahead(call.scope)
        require_same_draws(call, "transformers")
        call.ranks.watch.enter_foreign_loop()
        return prepare()
    if loop is None:
        assert active_call is not None  # for the loop is ours
        if active_call.model is model:
            active_call.context = call
        return prepare()
    model_kwargs.pop(CACHE, None)
    prepared = prepare()  # creates the fallback cache
    cache = SharedContextCache(backend=call.options.backend)
    cache.first_pass = FirstPassPrompts(
        call,
        stock=model_kwargs.get(CACHE),
        longest=max_cache_length + 1,
        loop=loop,
        chunk=generation_config.prefill_chunk_size,
        checks_masks=users_loop is not None or call.returns_cache,
    )
    generation_config.prefill_chunk_size = None  # one pass over whole prompts, which is chunked here
    report.reason = f"the decoding loop of {loop} has not called the model"
    require_same_draws(call, f"the loop of {loop}")
    model_kwargs[CACHE] = cache
    return prepared


def _generate(model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    original = model_state.methods.original(model, "generate")
    signature = signature_of(original)
    hands_on = model_state.methods.wraps("generate") or hands_generate_on(type(model), kwargs)
    takes = takes_loop(signature, len(args)) or (hands_on and takes_any(signature))
    takes = takes and pass_loop_on(original)
    given = signature.bind_partial(*args, **kwargs).arguments
    loop = kwargs.get("custom_generate", given.get("custom_generate"))  # in a wrapper's **kwargs, or by place
    with model_state.call(model) as may_share:
        ours = may_share and takes and loop is None
        tensors = {name: one for name, one in (*given.items(), *kwargs.items()) if isinstance(one, Tensor)}
        call = ActiveCall(model, ours, loop if may_share and callable(loop) else None, tensors)
        token = active_call_of_thread.set(call)
        try:
            with _watch(model_state, model, may_share).call("generate", model_state.options.peer_timeout):
                if may_share and isinstance(cache_in(kwargs), SharedContextCache):
                    forget_offset(model)
                if ours:
                    _begin_prefill(model_state, model, call, args, kwargs)
                output = original(*args, **(kwargs | {"custom_generate": _decode} if ours else kwargs))
            if ours and call.report is not None and not (call.report.reason or call.report.rows):
                call.report.reason = f"{name_of(original)}, which replaces generate, left out custom_generate"
                model_state.log_once(f"this generate call runs stock transformers: {call.report.reason}")
            return output
        except BaseException as error:
            if call.report is None:  # failed before the path was chosen
                model_state.last_call = call.report = CallReport()
            call.report.fail(error)
            raise
        finally:
            call.scope.close()
            active_call_of_thread.reset(token)
            if call.structure is not None:
                call.structure.release()


def _watch(model_state: ModelState, model: PreTrainedModel, may_share: bool) -> Unwatched:
    """What ends this call when another process of the model fails."""
    if not may_share or not in_several_processes():
        return UNWATCHED
    watch = _structure(model_state, model).ranks.watch
    watch.frees(model_state.captures)
    return watch


def _begin_prefill(
    model_state: ModelState, model: PreTrainedModel, call: ActiveCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Begin the prefill of a call of `generate` with these arguments, if it may be guessed."""
    if in_several_processes() and _structure(model_state, model).ranks.count > 1:
        return  # they do not capture prefill, and agree on who holds the captures
    prefills = model_state.captures.prefills
    prefills.asked = len(args), frozenset(kwargs)
    if prefills.again is None or prefills.again[1] != prefills.asked or model_state.options.reuse_prefix:
        return
    if kwargs.get(CACHE) is None:
        inputs = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        model_state.captures.begin_prefill(model, inputs, call.scope)


def _why_not_ours(model_state: ModelState, model: PreTrainedModel) -> str:
    """Why `generate` could not be given this package's decoding loop."""
    if not (model_state.methods.wraps("generate") or hands_generate_on(type(model), {})):
        return "the model's class has a generate of its own"
    name = name_of(model_state.methods.original(model, "generate"))
    return f"{name} replaces generate and has no **kwargs to pass custom_generate on with; wrap generate after enable"


def _extract_generation_mode_kwargs(
    model_state: ModelState, model: PreTrainedModel, custom_generate: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    original = model_state.methods.original(model, "_extract_generation_mode_kwargs")
    call = active_call_of_thread.get()
    if call is not None and call.model is model:
        call.begin(may_hold=custom_generate is _decode and not model.config.is_encoder_decoder)
    return original(None if custom_generate is _decode else custom_generate, *args, **kwargs)


def _get_deprecated_gen_repo(
    model_state: ModelState,
    model: PreTrainedModel,
    mode: GenerationMode,
    trust_remote_code: Any,
    custom_generate: Any = None,
) -> Any:
    original = model_state.methods.original(model, "_get_deprecated_gen_repo")
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
                if synced_gpus:
                    raise _synced()
                call.ranks.watch.at("prefill")
                start = start_shared(call, passes, input_ids)
            if not call.runs_stock:
                if is_compiled_in_place(model):
                    call.state.log_once(
                        "model.compile() does not apply to passes with shared context, which run uncompiled; "
                        "hf_fastdecode.enable(model, mode='compile') compiles their layers on a GPU"
                    )
                call.ranks.watch.at("decoding")
                return _for_callers(
                    model,
                    decode_shared(
                        call, passes.make_steps, start, input_ids, logits_processor, stopping_criteria, streamer
                    ),
                )
        require_same_draws(call, "transformers")
        call.ranks.watch.enter_foreign_loop()
    cache = model_kwargs.get(CACHE)
    if synced_gpus and isinstance(cache, SharedContextCache) and isinstance(cache.first_pass, FirstPassPrompts):
        cache.first_pass.call.refuse(_synced())
        cache.first_pass.enter_stock()
        model_kwargs[CACHE] = cache.first_pass.stock
    if active_call is not None and not isinstance(model_kwargs.get(CACHE), SharedContextCache):
        active_call.give_back(model_kwargs)
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


def _synced() -> Unsupported:
    return Unsupported("synced_gpus=True: all processes must run the same number of forward passes")


def _encode(
    model_state: ModelState, model: PreTrainedModel, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any
) -> dict[str, Any]:
    if not model.config.is_encoder_decoder:
        return hold_before_encoding(model_state, model, inputs_tensor, model_kwargs, *args)
    encode = model_state.methods.original(model, ENCODE)
    encodes = model.config.model_type in ENCODER_DECODERS and model_kwargs.get(ENCODER_OUTPUTS) is None
    if not encodes or model_state.disable_pending or model.training:  # noise of training differs from row to row
        found: dict[str, Any] = encode(inputs_tensor, model_kwargs, *args)
        return found
    return encode_distinct(lambda inputs, arguments: encode(inputs, arguments, *args), inputs_tensor, model_kwargs)


METHODS: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "generate": _generate,
    "_extract_generation_mode_kwargs": _extract_generation_mode_kwargs,
    "_get_deprecated_gen_repo": _get_deprecated_gen_repo,
    "_prepare_cache_for_generation": _prepare_cache_for_generation,
    ENCODE: _encode,
    **INPUT_METHODS,
}
"""Overrides by method name."""
