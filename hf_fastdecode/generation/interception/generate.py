"""Overrides of an enabled model's methods, by which `generate` chooses a mode, a cache and an encoder's output.

Each is called with the state (`ModelState`), the model and the method's arguments:

- ``generate`` passes this package's decoding loop as ``custom_generate``, transformers' official extension point,
  called with the same prepared arguments as its own loops. The loop forwards unsupported calls to transformers' loops.
- ``_extract_generation_mode_kwargs`` and ``_get_deprecated_gen_repo``: with a ``custom_generate``, transformers 5.17
  to 5.23 drop the streamer, the tokenizer (stop_strings) and the deprecated modes; these two hide ours.
- ``_prepare_cache_for_generation``, which `generate` calls once it knows the mode: decides whether the call can share,
  and gives other decoding loops a cache that prefills on their first pass (`first_pass`).
- `_compat.ENCODE`, which `generate` calls to run an encoder: runs it once for neighbouring rows of one input.
- ``_expand_inputs_for_generation``, and `ENCODE` where images are a decoder's: hold back images, video or audio of a
  call (`call_context`).
- ``forward``: activates the functions of `attention.interface` for passes with a shared-context cache (`forward`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMixin, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.utils import ModelOutput

from ..._compat import CACHE, ENCODE, cache_in, is_compiled_in_place, setting, untested_transformers
from ...cache.layers.cross import ENCODER_OUTPUTS
from ...cache.shared import SharedContextCache
from ...errors import Unsupported, reason_of
from ...parallel.ranks import ALONE, in_several_processes
from ..call_context import (
    ActiveCall,
    CallContext,
    active_call_of,
    active_call_of_thread,
    expand_inputs,
    hold_before_encoding,
    structure_of_call,
)
from ..decoding.log_probs import CHOICES, field_of_call, finishing, require_scored
from ..decoding.loop import decode_shared
from ..decoding.stopping import CountedCriteria, agreed_criteria
from ..forward_pass import forget_offset, left_out
from ..inputs.distinct import encode_distinct, tokens_of_encoder
from ..model_state import ModelState
from ..prompts.first_pass import FirstPassPrompts
from ..prompts.gain import told_by_shapes
from ..prompts.start import start_shared
from ..report import CallReport
from ..routing.choices import Recorder
from ..steps.modes import call_passes, choose_mode
from ..steps.prefill_passes import begin_compiling_sampler
from ..support import check_call, check_sequence_parallel, other_loop
from .forward import forward
from .switches import OwnGenerate, reads_its_cache, signature_of
from .switches import left_out as overrides_left_out

# Arguments of transformers' `_prepare_cache_for_generation` that ours reads.
_PREPARED_FROM = ("generation_config", "model_kwargs", "generation_mode", "max_cache_length")


def prepare_cache_for_generation(model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    """Decide whether the call shares; other decoding loops get a cache that prefills on their first pass."""
    active_call, of_model = active_call_of_thread.get(), active_call_of(model)
    given = signature_of(partial(GenerationMixin._prepare_cache_for_generation, model)).bind(*args, **kwargs).arguments
    prepare = partial(model_state.methods.original(model, "_prepare_cache_for_generation"), *args, **kwargs)
    if of_model is not None:
        of_model.context = None  # of an earlier try, which failed before it decoded
        if of_model.inputs is not None:
            prepare = partial(of_model.inputs.shown_to, prepare, given.get("model_kwargs", {}))
    if model_state.disable_pending and not (active_call is not None and active_call.loop_is_ours):
        return prepare()
    report = _new_report(model_state, active_call)
    if of_model is not None:
        of_model.reports.append(report)
    newer = untested_transformers()
    if newer is not None and (missing := [name for name in _PREPARED_FROM if name not in given]):
        what = f"transformers {newer}, newer than tested, prepares its cache without {', '.join(missing)}"
        _report_stock(model_state, report, what)
        return prepare()
    config, model_kwargs, mode, max_cache_length = map(given.__getitem__, _PREPARED_FROM)
    call = _call_context(model_state, model, config, model_kwargs, report)
    call.stock_cache = partial(_stock_cache, prepare, model_kwargs)
    loop = "custom_generate" if call.loop_is_users else other_loop(call, mode)
    with call.or_stock(), call.together() as offer:
        given_tensors = {} if of_model is None else of_model.given
        offer.compare(lambda: call.compared(given_tensors, loop or mode.value), "generate was called differently")
        _require_shareable(call, mode, active_call)
        if call.inputs is not None:
            call.inputs.check(model, call.structure, mode)
        check_sequence_parallel(model, call.structure, longest=max_cache_length + 1)
        if loop is not None and config.cache_implementation == "static":
            raise Unsupported(f"cache_implementation='static' was requested for the loop of {loop}", "leave it out")
    if call.runs_stock:
        call.require_same_draws("transformers")
        call.enter_stock_loop()
    elif loop is not None:
        in_chunks = mode is not GenerationMode.ASSISTED_GENERATION  # which verifies drafts in its first pass
        return _prepare_first_pass(call, prepare, loop, longest=max_cache_length + 1, in_chunks=in_chunks)
    elif of_model is not None:
        of_model.context = call
    return prepare()


def _call_context(
    model_state: ModelState,
    model: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    report: CallReport,
) -> CallContext:
    """The context of a call with these prepared arguments, by what is known of it since its start."""
    active_call = active_call_of_thread.get()
    loop_is_users = active_call is not None and active_call.loop is not None
    for name in () if loop_is_users else left_out(model, model_kwargs):
        del model_kwargs[name]
    call = CallContext(model, model_state, config, model_kwargs, report, structure_of_call(model_state, model))
    report.ranks, call.loop_is_users = call.ranks.count, loop_is_users
    if (active_call := active_call_of(model)) is not None:
        call.scope, held = active_call.scope, active_call.inputs
        if active_call.of_prefill:
            call.options = replace(call.options, max_rows=None)
        if (recorder := active_call.recorder) is not None:  # kept prompts were not recorded
            call.recorder, call.options = recorder, replace(call.options, reuse_prefix=False)
        call.inputs = None if held is None or held.says_nothing else held
        call.places_given = call.names.positions in active_call.given
    return call


def _prepare_first_pass(
    call: CallContext, prepare: Callable[[], Any], loop: str, *, longest: int, in_chunks: bool
) -> Any:
    """Prepare a cache that prefills on the first pass of a `loop` other than this package's."""
    call.arguments.pop(CACHE, None)
    prepared = prepare()  # creates the fallback cache
    cache = SharedContextCache(backend=call.options.backend)
    stock, chunk = call.arguments.get(CACHE), call.config.prefill_chunk_size if in_chunks else None
    cache.first_pass = FirstPassPrompts(call, stock=stock, longest=longest, loop=loop, chunk=chunk)
    call.config.prefill_chunk_size = None  # one pass over whole prompts, which is chunked here
    call.report.reason = f"the decoding loop of {loop} has not called the model"
    call.require_same_draws(f"the loop of {loop}")
    call.arguments[CACHE] = cache
    return prepared


def _stock_cache(prepare: Callable[[], Any], model_kwargs: dict[str, Any]) -> Cache | None:
    """The cache that the model's own method prepares for a call that is given none; None where the model makes it."""
    model_kwargs.pop(CACHE, None)
    prepare()
    cache: Cache | None = model_kwargs.get(CACHE)
    return cache


def _require_shareable(call: CallContext, mode: GenerationMode, active_call: ActiveCall | None) -> None:
    """Raise `Unsupported` if a call must run stock, by what is known of it before an encoder runs."""
    check_call(call, mode)
    if active_call is None or not (active_call.loop_is_ours or active_call.loop):
        raise Unsupported(OwnGenerate(call.state.methods, call.model).why_not())
    if active_call.recorder is not None and (loop := other_loop(call, mode)) is not None:
        raise Unsupported(f"{CHOICES}=True does not record the loop of {loop} over a shared cache")
    if active_call.model is call.model and active_call.synced_gpus:
        raise Unsupported(
            "synced_gpus=True: all processes must run the same number of forward passes", "use synced_gpus=False"
        )


def generate(model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    """Run the model's own method, with this package's decoding loop as ``custom_generate`` where it takes one."""
    recorder = _recorder(model, args, kwargs)
    told = partial(told_by_shapes, model_state, model, args, kwargs)
    if recorder is None and not in_several_processes() and (report := told()) is not None:
        return _generate_stock(model_state, model, report, args, kwargs)
    own = OwnGenerate(model_state.methods, model)
    given = signature_of(own.method).bind_partial(*args, **kwargs).arguments | kwargs  # in a wrapper's, too
    loop = given.get("custom_generate")
    if not (takes_ours := own.takes_loop(len(args), given)):
        require_scored(model, given, own.why_not(loop))
    with model_state.call(model) as may_share, overrides_left_out(None):
        ours, before = may_share and takes_ours, model_state.last_call
        tensors = {name: one for name, one in given.items() if isinstance(one, Tensor)}
        call = ActiveCall(model, ours, loop if may_share and callable(loop) else None, tensors, recorder=recorder)
        try:
            with (
                setting(active_call_of_thread, call),
                model_state.gathered(model) as call.gathered,
                closing(call.scope),
            ):
                several = may_share and in_several_processes()  # one alone reads its structure when it needs that
                ranks = structure_of_call(model_state, model).ranks if several else ALONE
                ranks.watchdog.frees(model_state.captures)
                with ranks.watchdog.call("generate", model_state.options.peer_timeout):
                    if may_share and isinstance(cache_in(kwargs), SharedContextCache):
                        forget_offset(model)
                    if ours and ranks.alone and recorder is None:  # several agree on who captures, and not prefill
                        _begin_prefill(model_state, model, call, args, kwargs)
                    output = own.method(*args, **(kwargs | {"custom_generate": decode} if ours else kwargs))
            if may_share:
                _report_bypass(model_state, call, before, loop, own)
            return output
        except BaseException as error:
            if call.report is None:  # failed before the path was chosen
                call.reports.append(_new_report(model_state, call))
            call.reports[-1].fail(error)
            raise
        finally:
            if len(call.reports) > 1 and model_state.last_call is call.reports[-1]:
                model_state.last_call = CallReport.of_inner(call.reports)
            if call.structure is not None:
                call.structure.release()


def _recorder(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | None:
    """A recorder if a call, or its config, asks for what routers choose; takes that out of the arguments."""
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    asked, cache = bool(kwargs.pop(CHOICES, field_of_call(model, config, CHOICES))), cache_in(kwargs)
    if asked and cache is not None:
        name = next(name for name, value in kwargs.items() if value is cache)
        raise ValueError(f"{CHOICES}=True needs a cache that the call itself makes; leave {name} out")
    return Recorder(model) if asked else None


def _report_bypass(
    model_state: ModelState, call: ActiveCall, before: CallReport | None, loop: object, own: OwnGenerate
) -> None:
    """Report why a call that has returned did not share, where what it ran has never asked this package."""
    if not call.reports and model_state.last_call is before and not model_state.disable_pending:
        report, reason = _new_report(model_state, call), _why_unseen(call.model, loop)
    elif call.loop_is_ours and call.report is not None and not (call.report.reason or call.report.rows):
        report, reason = call.report, f"{own}, which replaces generate, left out custom_generate"
    else:
        return
    _report_stock(model_state, report, reason)


def _report_stock(model_state: ModelState, report: CallReport, reason: str) -> None:
    report.reason = reason
    model_state.log_once(f"this generate call runs stock transformers: {reason}")


def _generate_stock(
    model_state: ModelState, model: PreTrainedModel, report: CallReport, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    original = model_state.methods.original(model, "generate")
    with model_state.call(model) as may_share, overrides_left_out(model):
        if may_share:
            model_state.last_call = report
            model_state.log_once(f"this generate call runs stock transformers: {report.reason}")
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            if may_share:
                report.fail(error)
            raise


def _new_report(model_state: ModelState, call: ActiveCall | None) -> CallReport:
    report = CallReport(gathered=None if call is None else call.gathered)
    if call is None or not call.of_prefill:
        model_state.last_call = report
    return report


def _why_unseen(model: PreTrainedModel, loop: object) -> str:
    if isinstance(loop, str):
        return f"custom_generate={loop!r} decodes by itself"
    why = f"generate of {type(model).__name__} does not call that of transformers for this model"
    parts = [
        name
        for name, part in model.named_modules()
        if name and isinstance(part, PreTrainedModel) and part.can_generate()
    ]
    return f"{why}; enable the parts that generate, and explain them: {', '.join(parts)}" if parts else why


def _begin_prefill(
    model_state: ModelState, model: PreTrainedModel, call: ActiveCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Begin the prefill of a call of `generate` with these arguments, if it may be guessed."""
    prefills = model_state.captures.prefills
    prefills.asked = len(args), frozenset(kwargs)
    if prefills.again is None or prefills.again[1] != prefills.asked or model_state.options.reuse_prefix:
        return
    if kwargs.get(CACHE) is None:
        inputs = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        model_state.captures.begin_prefill(model, inputs, call.scope)


def extract_generation_mode_kwargs(
    model_state: ModelState, model: PreTrainedModel, custom_generate: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Hide this package's loop from the model's own method."""
    original = model_state.methods.original(model, "_extract_generation_mode_kwargs")
    if (call := active_call_of(model)) is not None:
        call.begin(may_hold=custom_generate is decode and not model.config.is_encoder_decoder)
    given = signature_of(original).bind(None if custom_generate is decode else custom_generate, *args, **kwargs)
    if in_several_processes() and (synced := given.arguments.get("synced_gpus", False)) is not False:
        # transformers asks by the kind of training alone, also of parameters that are gathered for the call. There
        # each process runs its own passes, whatever the caller has asked for.
        if call is not None and call.gathered is not None:
            given.arguments["synced_gpus"] = False
        elif synced is None:
            given.arguments["synced_gpus"] = structure_of_call(model_state, model).gathering is not None
    found: dict[str, Any] = original(*given.args, **given.kwargs)
    if call is not None:
        call.synced_gpus = bool(found.get("synced_gpus"))
    return found


def get_deprecated_gen_repo(
    model_state: ModelState,
    model: PreTrainedModel,
    mode: GenerationMode,
    trust_remote_code: Any,
    custom_generate: Any = None,
) -> Any:
    original = model_state.methods.original(model, "_get_deprecated_gen_repo")
    if (call := active_call_of(model)) is not None:
        call.mode = mode
    return original(mode, trust_remote_code, None if custom_generate is decode else custom_generate)


def encode(
    model_state: ModelState, model: PreTrainedModel, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any
) -> dict[str, Any]:
    """Run an encoder once for neighbouring rows of one input; hold back images, video and audio of a decoder."""
    if not model.config.is_encoder_decoder:
        return hold_before_encoding(model_state, model, inputs_tensor, model_kwargs, *args)
    original = model_state.methods.original(model, ENCODE)
    unread = {name: model_kwargs[name] for name in left_out(model, model_kwargs)}
    read = {name: value for name, value in model_kwargs.items() if name not in unread}
    if read.get(ENCODER_OUTPUTS) is not None or not _shares_encoder(model_state, model, read, args):
        found: dict[str, Any] = original(inputs_tensor, model_kwargs, *args)
        return found
    tokens = tokens_of_encoder(model, inputs_tensor)
    encoded = encode_distinct(
        lambda inputs, arguments: original(inputs, arguments, *args),
        inputs_tensor,
        read,
        None if tokens is None else max(1, model_state.options.max_prefill_tokens // max(1, tokens)),
    )
    return encoded | unread


def _shares_encoder(
    model_state: ModelState, model: PreTrainedModel, arguments: dict[str, Any], others: tuple[Any, ...]
) -> bool:
    """Whether a call's encoder may run once for equal inputs, which calls that run stock must not notice.

    Rows of equal inputs differ by noise, by hooks and by adapters of their own; `check_call` refuses all of these.
    """
    active_call = active_call_of(model)
    config = next((one for one in others if isinstance(one, GenerationConfig)), None)
    if config is None or active_call is None or active_call.mode is None:
        return False
    if model_state.disable_pending or model.training:  # which draws numbers in each pass, though none drops anything
        return False
    structure = structure_of_call(model_state, model)
    call = CallContext(model, model_state, config, arguments, CallReport(), structure)
    return reason_of(_require_shareable, call, active_call.mode, active_call) is None


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
    given = logits_processor, stopping_criteria, generation_config, model_kwargs
    finish = finishing(model, input_ids, *given, synced_gpus=synced_gpus)
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
                parts = input_ids, logits_processor, stopping_criteria, streamer
                shared, drawn = decode_shared(call, passes.make_steps, start, *parts)
        if not call.runs_stock:
            shared = _for_callers(model, shared)
            return shared if finish is None else finish(shared, drawn)
        if call.recorder is not None:
            call.recorder.begin(model_kwargs.get(CACHE))
        if call.must_share:  # its prompts cannot use the given cache
            model_kwargs[CACHE] = call.stock_cache()
        call.require_same_draws("transformers")
        call.ranks.watchdog.enter_foreign_loop()
    if active_call is not None and not isinstance(model_kwargs.get(CACHE), SharedContextCache):
        active_call.give_back(model_kwargs)
    elif active_call is not None and active_call.inputs is not None:
        model_kwargs |= active_call.inputs.of_each_pass(model)  # needed if the first pass runs stock after all
    mode = generation_config.get_generation_mode(model_kwargs.get("assistant_model"))
    stock = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    if "inputs_tensor" in inspect.signature(stock).parameters:  # passed to loops that accept it
        model_kwargs["inputs_tensor"] = inputs_tensor
    if (of_model := active_call_of(model)) is not None and of_model.structure is not None:
        ranks, device = of_model.structure.ranks, input_ids.device
        stopping_criteria = agreed_criteria(ranks, stopping_criteria, generation_config, device)
    if finish is not None:
        stopping_criteria = counted = CountedCriteria(stopping_criteria, input_ids)
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
    output = _for_callers(model, output)
    return output if finish is None else finish(output, counted.drawn)


def _for_callers(model: PreTrainedModel, output: Any) -> Any:
    """An output without a shared cache where a class's own `generate` would read each row's tensors in it."""
    if not reads_its_cache(type(model)) or not isinstance(output, ModelOutput):
        return output
    if not isinstance(output.get(CACHE), SharedContextCache):
        return output
    return type(output)(**{name: value for name, value in output.items() if name != CACHE})


METHODS: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "generate": generate,
    "_extract_generation_mode_kwargs": extract_generation_mode_kwargs,
    "_get_deprecated_gen_repo": get_deprecated_gen_repo,
    "_prepare_cache_for_generation": prepare_cache_for_generation,
    ENCODE: encode,
    "_expand_inputs_for_generation": expand_inputs,
}
"""Overrides by method name."""
