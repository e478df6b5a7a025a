"""A `generate` call in progress: what is known of it from its start on, and the context that planning, prefill and
decoding of its prompts need.

`ActiveCall` is there from the start; `CallContext` is made once `generate` has prepared the call's arguments. Images,
video and audio are held back in between, by overrides of the methods in which transformers encodes and expands them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from .._compat import CACHE, ENCODE, setting, untested_transformers
from ..attention.torch_operators.operators import BackendError
from ..cache.shared import SharedContextCache
from ..errors import PeerFailedError, Unsupported
from ..parallel.ranks import Offer, Ranks, described
from .decoding.sampling import generator_state
from .fingerprint import ModelThen
from .forward_pass import Positions, PromptNames, left_out, prompt_names, reduced
from .inputs.given import PLAIN, GivenInputs
from .inputs.items import counting_tokens
from .inputs.rows import InputRows
from .model_state import ModelState
from .options import Options
from .report import CallReport
from .routing.choices import Recorder
from .structure import Structure

Entered = TypeVar("Entered")


class CallScope:
    """Contexts that code of a `generate` call entered, held until the call ends."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._thread: int | None = get_ident()  # None after the call

    @property
    def is_open(self) -> bool:
        return self._thread == get_ident()

    def enter(self, context: AbstractContextManager[Entered]) -> Entered:
        """Enter a context, which the call's end leaves, and return what it yields."""
        return self._held.enter_context(context)

    def callback(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function at the call's end, before contexts that were entered earlier are left."""
        self._held.callback(function, *arguments)

    def let_go(self) -> None:
        """Leave what was entered, as at the call's end, though the call goes on."""
        self._held.close()

    def close(self) -> None:
        self._thread = None
        self.let_go()


@dataclass
class CallContext:
    """One `generate` call of an enabled model."""

    model: PreTrainedModel
    state: ModelState
    config: GenerationConfig  # the call's generation config, with lengths prepared
    arguments: dict[str, Any]  # model arguments, as `generate` prepared them
    report: CallReport  # the call's report, which is written here and never read
    structure: Structure
    mode: str = "eager"  # how decode steps run: eager or graph
    runs_stock: bool = False  # whether the call turned out to be unsupported
    scope: CallScope | None = None  # ends with the call; None if its `generate` is not known
    inputs: GivenInputs | None = None  # images, videos or audio that the prompts come with
    places_given: bool = False  # whether the caller gave positions, which the model makes otherwise
    # The model of the prefix store's nodes, by all that the host can tell this one; None if there is none.
    then: ModelThen | None = None
    stock_cache: Callable[[], Cache | None] = lambda: None  # makes the cache that stock would begin with
    loop_is_users: bool = False  # whether a custom_generate of the user's decodes, which may keep the cache
    recorder: Recorder | None = None  # records what routers choose, where that is asked for
    options: Options = field(init=False)  # the model's at the start of the call, unaffected by a concurrent `enable`
    # The caller's `SharedContextCache`, if not empty; every prompt begins with a prefix that it holds.
    given: SharedContextCache | None = field(init=False)
    # Whether the caller passed a `SharedContextCache`, empty or not, so that stock is no fallback.
    must_share: bool = field(init=False)
    max_prefill_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        cache = self.arguments.get(CACHE)
        self.options, limit = self.state.options, self.state.options.max_prefill_tokens
        self.must_share = isinstance(cache, SharedContextCache)
        self.given = cache if isinstance(cache, SharedContextCache) and not cache.is_empty else None
        self.max_prefill_tokens = min(self.config.prefill_chunk_size or limit, limit)

    @cached_property
    def positions(self) -> Positions:
        return reduced(self.arguments.get(self.names.positions), self.mask)

    @cached_property
    def names(self) -> PromptNames:
        return prompt_names(self.model)

    @property
    def mask(self) -> Tensor | None:
        mask: Tensor | None = self.arguments.get(self.names.mask)
        return mask

    @cached_property
    def input_rows(self) -> InputRows | None:
        if self.inputs is None:
            return None
        count_tokens = counting_tokens(self.model, self.structure, self.arguments)
        return InputRows(self.inputs, self.model.config, count_tokens)

    @property
    def ranks(self) -> Ranks:
        return self.structure.ranks

    @property
    def alone(self) -> bool:
        return self.structure.alone

    def together(self) -> AbstractContextManager[Offer]:
        """Context of work that fails on all processes of the model if it does on one, see `Ranks.together`."""
        return self.ranks.together()

    @property
    def shares_anyway(self) -> bool:
        """Whether the call shares whatever that saves: with a cache of the caller's, or to divide each context."""
        return self.must_share or self.structure.division.is_divided

    def fork(self, base: SharedContextCache | None, max_suffix: int) -> SharedContextCache:
        cache = (SharedContextCache() if base is None else base).fork(
            max_suffix=max_suffix, backend=self.options.backend
        )
        cache.state.division, cache.kept = self.structure.division, self.may_keep_cache
        return cache

    def enter_stock_loop(self) -> None:
        """Have another loop go on as in stock, where other calls may use the model's captures."""
        self.state.captures.end_ahead(self.scope)
        self.ranks.watchdog.enter_foreign_loop()

    def compared(self, given: Mapping[str, Tensor], loop: str) -> dict[str, object]:
        """The fields that processes that compute a model together must give alike.

        One with other prompts or options would run other passes than the others, which ends in an error of the
        communication library, in a hang, or in tokens that no process would compute alone.
        """
        settings = {name: value for name, value in vars(self.config).items() if name != "transformers_version"}
        fields: dict[str, object] = {"decoding loop": loop}
        fields |= {name: value for name, value in given.items() if name not in self.arguments}
        fields |= {name: value for name, value in settings.items() if not name.startswith("_")} | self.arguments
        fields |= {f"enable(..., {name}=)": value for name, value in vars(self.options).items()}
        if isinstance(cache := fields.get(CACHE), SharedContextCache):
            tokens = ", ".join(map(described, cache.segment_tokens))
            fields[CACHE] = f"{cache!r} of tokens {tokens}" if cache.rows else "an empty SharedContextCache"
        return fields

    def require_same_draws(self, loop: str) -> None:
        """Raise ValueError on all ranks if a loop of others would draw other tokens on some of them."""
        if not self.config.do_sample:
            return
        device = self.model.device
        with self.together() as offer:
            offer.compare(lambda: {"generator": generator_state(device)})
        if offer.different:
            raise ValueError(
                f"the random generators ({device.type}) of the {self.ranks.count} processes that compute "
                f"{type(self.model).__name__} together differ, so that this call, which {loop} decodes, would draw "
                "other tokens on each: call transformers.set_seed(0), or with another number, on all of them before "
                "generate"
            )

    @property
    def returns_cache(self) -> bool:
        """Whether the caller gets the cache, and may keep it."""
        return bool(self.config.return_dict_in_generate)

    @property
    def may_keep_cache(self) -> bool:
        """Whether the call's cache may outlive it: the caller or a loop of the user's gets it."""
        return self.returns_cache or self.loop_is_users

    def set_mode(self, mode: str, reason: str) -> None:
        self.mode = self.report.mode = mode
        self.report.mode_reason = reason

    @contextmanager
    def or_stock(self) -> Iterator[None]:
        """Context that ends early, with `runs_stock` set, where the call is `Unsupported`.

        With a transformers release that is newer than tested, errors are taken for its changes, so that calls go on.
        Raises ValueError where the call must share.
        """
        try:
            yield
            return
        except Unsupported as error:  # the error itself would keep its frames' tensors alive during the stock call
            what, remedy, of_prompts = error.what, error.remedy, error.of_prompts
        except (BackendError, PeerFailedError, torch.OutOfMemoryError):  # no changes of transformers
            raise
        except Exception as error:
            newer = untested_transformers()
            if newer is None or self.must_share or not self.alone:
                raise
            what = f"it failed with transformers {newer}, newer than tested ({type(error).__name__}: {error})"
            remedy, of_prompts = None, False
        self.refuse(Unsupported(what, remedy, of_prompts=of_prompts))

    def refuse(self, error: Unsupported) -> None:
        """Report that the call runs stock, and log each reason once.

        Raises ValueError if the call must share, unless its prompts alone are why it does not.
        """
        if self.must_share and not error.of_prompts:
            remedy = error.remedy or f"leave {CACHE} out"
            raise ValueError(f"this call cannot use a SharedContextCache: {error.what}; {remedy}") from None
        reason = f"{error}; the given cache is not used" if self.must_share else str(error)
        if unused := self.options.unmet_by_stock:
            reason = f"{reason}; {', '.join(unused)} not used"
        self.runs_stock = True
        self.report.path, self.report.reason = "stock", reason
        self.state.log_once(f"this generate call runs stock transformers: {reason}")


_of_prefill: ContextVar[bool] = ContextVar("hf_fastdecode_of_prefill", default=False)


def calls_of_prefill() -> AbstractContextManager[None]:
    """Context in which this thread's calls of `generate` are those of `prefill`, see `ActiveCall.of_prefill`."""
    return setting(_of_prefill, True)


scores_rows: ContextVar[bool] = ContextVar("hf_fastdecode_scores_rows", default=False)
"""Whether this thread's pass scores rows as a trainer's with gradients would: it neither reads nor keeps prefixes."""


@dataclass
class ActiveCall:
    """A `generate` call in progress."""

    model: PreTrainedModel
    loop_is_ours: bool  # whether this package's decoding loop was passed
    may_hold: bool = field(default=False, init=False)  # whether `generate` has got it, and so what is held back
    loop: Callable[..., Any] | None = None  # the user's custom_generate, if any
    mode: GenerationMode | None = field(default=None, init=False)  # that `generate` chose; None before that
    synced_gpus: bool = field(default=False, init=False)  # whether all processes must run as many passes
    given: dict[str, Tensor] = field(default_factory=dict)  # tensors that `generate` was given, by name
    # One for each call of transformers' `generate`, of which a class's own `generate` may make several.
    reports: list[CallReport] = field(default_factory=list, init=False)
    structure: Structure | None = None
    inputs: GivenInputs | None = None  # images, videos or audio that are held back
    context: CallContext | None = None  # what our loop decodes; None for a call that it hands over to others
    scope: CallScope = field(default_factory=CallScope)
    gathered: tuple[int, float] | None = field(default=None, init=False)  # how divided parameters were gathered
    recorder: Recorder | None = None  # records what routers choose, where that is asked for
    # Whether `prefill` makes it: it is not reported, and `max_rows` does not bound its rows, which do not decode.
    of_prefill: bool = field(default_factory=_of_prefill.get, init=False)

    def __post_init__(self) -> None:
        if self.recorder is not None and not self.loop_is_ours:
            raise ValueError("output_router_choices=True records no loops of others; leave custom_generate out")

    @property
    def report(self) -> CallReport | None:
        """The report of the last of its calls of transformers' `generate`; None before the path of the first."""
        return self.reports[-1] if self.reports else None

    def begin(self, *, may_hold: bool) -> None:
        """Begin one call of transformers' `generate`, which a user's or a class's own may make several times.

        Captures that the one before held are free again: Whisper's own makes one for each segment and temperature.
        """
        if self.reports:
            self.scope.let_go()
        self.may_hold, self.inputs, self.mode = may_hold, None, None

    def hold(self, arguments: dict[str, Any], encode: Callable[[], dict[str, Any]] | None = None) -> None:
        """Take images, videos or audio out of these model arguments, until `give_back`.

        What a method of the instance prepares is none of them, such as the tasks of PEFT's prompt tuning.
        """
        prepare = vars(self.model).get("prepare_inputs_for_generation")
        taken = left_out(self.model, arguments) | (set() if prepare is None else signature(prepare).parameters.keys())
        others = {name: value for name, value in arguments.items() if name not in taken}
        if self.inputs is not None or others.keys() <= PLAIN:
            return
        if (inputs := GivenInputs.among(others, encode)) is not None:
            self.inputs = inputs
            for name in inputs.arguments:
                del arguments[name]

    def give_back(self, arguments: dict[str, Any]) -> None:
        """Add what was held back to these model arguments, as stock passes it on."""
        if self.inputs is not None:
            arguments.update(self.inputs.expanded())
            self.inputs = None


# The innermost active call of this thread.
active_call_of_thread: ContextVar[ActiveCall | None] = ContextVar("hf_fastdecode_active_call", default=None)


def active_call_of(model: PreTrainedModel) -> ActiveCall | None:
    """The innermost active call of this thread, if it is this model's."""
    call = active_call_of_thread.get()
    return call if call is not None and call.model is model else None


def structure_of_call(model_state: ModelState, model: PreTrainedModel) -> Structure:
    """The model's structure, read once per call."""
    if (call := active_call_of(model)) is None:
        return model_state.structure_of(model)
    if call.structure is None:
        call.structure = model_state.structure_of(model)
    return call.structure


def hold_before_encoding(
    model_state: ModelState, model: PreTrainedModel, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any
) -> dict[str, Any]:
    """`ENCODE` of a decoder: is called with model arguments that hold raw images, and returns encoded ones."""
    original, call = model_state.methods.original(model, ENCODE), active_call_of(model)
    if call is not None and call.may_hold:
        call.hold(model_kwargs, partial(original, inputs_tensor, dict(model_kwargs), *args))
        if call.inputs is not None:
            return model_kwargs
    found: dict[str, Any] = original(inputs_tensor, model_kwargs, *args)
    return found


def expand_inputs(model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    original, call = model_state.methods.original(model, "_expand_inputs_for_generation"), active_call_of(model)
    if call is None or args or not call.may_hold:
        return original(*args, **kwargs)
    call.hold(kwargs)
    if call.inputs is None:
        return original(**kwargs)
    ids, copies = kwargs["input_ids"], kwargs.get("expand_size", 1)
    call.inputs.expand(original, ids, copies)
    # Tokens of no image, as images are held back: VideoLlama 3 counts both, before transformers 5.24.
    _, expanded = original(**kwargs | {"input_ids": torch.full_like(ids, -1)})
    return ids.repeat_interleave(copies, dim=0), expanded
