"""Passes of another decoding loop, which calls the model itself: replays captured ones in place of eager ones.

Beam search, assisted decoding and a user's loop pass tokens to the model and read its output. After the first pass,
which prefills (`prompts.first_pass`), each pass replays a captured one where its arguments allow; others run eagerly,
and the call's report says how many and why. Processes that compute the model together replay the same ones
(`PassAgreement`).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Hashable
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..._compat import CACHE
from ...attention.forest import Forest
from ...attention.overrides import autocast_dtype
from ...cache.captured import storages_in_place
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ...kernels.forest_decode.limits import MAX_QUERIES
from ...parallel.ranks import NoRoomError, Ranks
from ..call_context import CallContext
from ..forward_pass import arguments_of_decoders, takes_positions
from ..snapshot import ModelWalk, ModelWatch, captured_state
from ..support import is_nothing
from .captured_step import CapturedPass, CaptureOptions
from .captures import capture_reason
from .modes import choose_mode, fused_rows, report_captured
from .prefill_passes import Failure, fall_back

_QUERIES = (1, 4, MAX_QUERIES)
"""Captured numbers of tokens: up to 64 tokens in all, a pass takes about as long as one of one token per row."""

_MOST_PARTS = 4
"""Parts of a divided pass; more take longer than one eager pass (H200, 7B: 7 and 38 ms)."""

# Arguments that a captured pass reads itself, or leaves out as the decode steps do.
_READ = {"input_ids", "position_ids", "attention_mask", "cache_position", "logits_to_keep", "return_dict", "use_cache"}


class CapturedPasses:
    """Replaces the passes of one call's decoding loop by captured ones, while the call holds the model's captures.

    Args:
        reorders: Whether the loop reorders rows, as beam search does.
        watches: Whether the model may change between passes: the loop is the user's.
    """

    def __init__(self, call: CallContext, *, reorders: bool, watches: bool):
        self._call, self._captures, self._model = call, call.state.captures, call.model
        self._reorders, self._watches = reorders, watches
        self._agreement = PassAgreement(call.ranks, asks_always=watches)
        self._autocast = autocast_dtype(call.model.device)  # that of the first pass
        self._checked = False
        self._state: Hashable = None  # of the model at the first pass, for a loop of the user's
        self._watch: ModelWatch | None = None
        self._failures: dict[CaptureOptions, str] = {}  # of this call, on all ranks
        self._changed: str | None = None  # why no further pass is captured
        self._captured, self._eager = 0, Counter[str]()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the cache has passes of its own

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def run(self, cache: SharedContextCache, arguments: dict[str, Any]) -> ModelOutput | None:
        """The output of a pass with these named arguments, or None for one that must run eagerly.

        Raises ValueError if a forced mode cannot be captured.
        """
        output = None
        if (reason := self._changed or self._refusal(cache, arguments)) is not None:
            reason = self._agreement.refuse(reason)
        else:
            output, reason = self._run(cache, arguments)
        if reason is not None:
            self._eager[reason] += 1
        return output

    def end(self, cache: SharedContextCache) -> None:
        """End with the call, and report what ran."""
        cache.later_passes = None
        call, eager = self._call, self._eager
        if call.returns_cache or self._watches:
            self._captures.release_buffers()
        if not eager:
            return
        why, total = eager.most_common(1)[0][0], eager.total()
        forced = call.options.needs_capture
        if self._captured:
            reason = f"{call.report.mode_reason}; {total} of {total + self._captured} passes ran eagerly: {why}"
            call.set_mode(call.mode, reason)
            return
        call.set_mode("eager", why)
        if forced:
            call.state.log_once(f"{forced} not used: {why}")

    def _refusal(self, cache: SharedContextCache, arguments: dict[str, Any]) -> str | None:
        """Why a pass cannot be captured, or None if no reason is known."""
        if self._captures.owner != threading.get_ident():
            return "it runs in another thread than generate"
        if torch.is_grad_enabled():
            return "gradients are enabled in the loop"
        if autocast_dtype(self._model.device) != self._autocast:
            return "it runs under another torch.autocast than the first pass"
        return (
            self._tokens_refusal(cache, arguments)
            or self._output_refusal(arguments)
            or self._layers_refusal(cache, arguments[self._call.names.ids].shape[1])
            or self._check_model()
        )

    def _tokens_refusal(self, cache: SharedContextCache, arguments: dict[str, Any]) -> str | None:
        """Why a pass over these tokens, positions and mask cannot be captured."""
        names = self._call.names
        ids, positions = arguments.get(names.ids), self._positions(arguments)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.device != self._model.device or not ids.numel():
            return "its input is not input_ids on the model's device"
        met = cache.state.met and cache.state.met()
        if met is not self._model or len(ids) != cache.rows:
            return "its rows are not those of the cache"
        if ids.shape[1] > _MOST_PARTS * MAX_QUERIES:
            return f"it has more than {_MOST_PARTS * MAX_QUERIES} tokens in each row"
        if not isinstance(positions, Tensor) or positions.shape[-1] != ids.shape[1]:
            return "its position_ids are not of its tokens"
        if positions.dim() not in (2, 3) or positions.shape[-2] not in (1, len(ids)):
            return "its position_ids are not of its rows"
        mask = arguments.get(names.mask)
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            return "its attention_mask is not [rows, tokens]"
        return None

    def _output_refusal(self, arguments: dict[str, Any]) -> str | None:
        """Why a pass cannot be captured that is to return what these arguments ask for."""
        config, kept = self._model.config, arguments.get("logits_to_keep")
        if not (kept is None or (isinstance(kept, int) and kept >= 0)):
            return "logits_to_keep is not a number of tokens"
        as_tuple = arguments.get("return_dict") is False or not getattr(config, "return_dict", True)
        if as_tuple or arguments.get("use_cache") is False:
            return "it returns no output object with the cache"
        if arguments.get("output_attentions") or getattr(config, "output_attentions", False):
            return "it returns attention weights"
        for name, value in self._others(arguments).items():
            if not is_nothing(value) and not isinstance(value, bool | int | float | str):
                return f"the argument {name!r} is a {type(value).__name__}"
        return None

    def _others(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a pass that a captured one bakes in."""
        read = _READ | {CACHE, *self._call.names} | arguments_of_decoders(self._model)
        return {name: value for name, value in arguments.items() if name not in read}

    def _layers_refusal(self, cache: SharedContextCache, tokens: int) -> str | None:
        """Why layers such as the cache's cannot be captured with so many tokens of each row."""
        if storages_in_place(cache) and (self._reorders or tokens > 1 or not cache.state.suffixes.in_order):
            return "slim layers are captured with one token of each row, in order"
        if cache.state_layers and tokens > 1:
            return "layers with states are captured with one token of each row"
        queries = next((number for number in _QUERIES if number >= tokens), MAX_QUERIES)
        if any(layer.store.most_queries(self._model.device) < queries for layer in cache.attention_layers):
            return f"layers with latents are captured with fewer than {queries} tokens of each row"
        return None

    def _positions(self, arguments: dict[str, Any]) -> Any:
        """The positions of a pass; some tensor of their shape for a model that takes none, with states alone."""
        names = self._call.names
        given = arguments.get(names.positions)
        return arguments.get(names.ids) if given is None and not takes_positions(self._model) else given

    def _check_model(self) -> str | None:
        """Check the model once for a loop of transformers, and before every pass for one of the user's."""
        call, configs = self._call, self._call.structure.configs
        if not self._checked:
            if self._watches:
                call.structure.forget()
            self._captures.refresh(self._model, call.structure)
            self._checked = True
            if self._watches:
                walk = ModelWalk(self._model)
                self._state, self._watch = captured_state(self._model, configs, walk), ModelWatch(walk, configs)
        elif self._watch is not None and self._watch.touched():
            walk = ModelWalk(self._model)
            self._changed = capture_reason(self._model, call.structure.layout, walk, call.options.backend)
            if captured_state(self._model, configs, walk) != self._state:
                self._changed = "the model's weights or modules changed between passes"
            self._watch = ModelWatch(walk, configs)
        return self._changed

    def _run(self, cache: SharedContextCache, arguments: dict[str, Any]) -> tuple[ModelOutput | None, str | None]:
        names, before = self._call.names, cache.suffix_length
        ids, positions = arguments[names.ids], self._positions(arguments)
        if positions.dim() == 2 and cache.position_planes:
            positions = positions.expand(cache.position_planes, -1, -1)
        extra = self._others(arguments)
        self._reorders |= not cache.state.suffixes.in_order
        parts: list[list[Tensor]] = []
        step: CapturedPass | None = None
        at_once = min(ids.shape[1], MAX_QUERIES)
        for part, places in zip(ids.split(at_once, 1), positions.split(at_once, -1), strict=True):
            step, reason = self._step(cache, part.shape[1], tuple(positions.shape[:-2]), extra)
            if step is None:
                if parts:  # the whole pass runs eagerly
                    cache.crop(before - cache.suffix_length)
                return None, reason
            with self._call.structure.running_pass():
                parts.append(step.run(cache, part, places))
            if (origins := cache.state.suffixes.origins) is not None:
                origins.append(cache.suffix_length + part.shape[1])
            cache.record_captured_step(part)
        assert step is not None
        tensors = [torch.cat(same, 1) for same in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]
        self._captured += 1
        return step.fields.output(tensors, cache, arguments.get("logits_to_keep") or ids.shape[1]), None

    def _step(
        self, cache: SharedContextCache, tokens: int, planes: tuple[int, ...], extra: dict[str, Any]
    ) -> tuple[CapturedPass | None, str | None]:
        """The captured pass for `tokens` tokens of each row, or None and why there is none."""
        call, captures, agreement = self._call, self._captures, self._agreement
        queries = next(number for number in _QUERIES if number >= tokens)
        given = tuple(sorted((name, value) for name, value in extra.items() if not is_nothing(value)))
        fused = fused_rows(call.options.fuse_projections)
        options = CaptureOptions(fused, given, queries, planes, self._reorders, autocast=self._autocast)
        if (reason := self._failures.get(options)) is not None:
            return None, agreement.refuse(reason)
        grows = not cache.has_room(cache.suffix_length + queries)  # on all ranks or on none
        if not grows and (step := agreement.replayed(cache, options)) is not None:
            return step, None
        has_room = not grows or self._has_grown(cache, queries)
        step, reason = agreement.ask(cache, options, captures.failures.get(options), has_room=has_room)
        if step is None and reason is None:
            return self._find(cache, options)
        if reason is not None and not agreement.asks_always:
            self._failures[options] = reason
        return step, reason

    def _find(self, cache: SharedContextCache, options: CaptureOptions) -> tuple[CapturedPass | None, str | None]:
        """As `_step`, where all ranks are to find or capture the pass: it fails on all alike or ends the call."""
        call, captures = self._call, self._captures
        try:
            found = captures.find(self._model, cache, call.structure, options, CapturedPass)
        except Exception as error:
            failure = Failure.of(error)
            if failure.out_of_memory:
                captures.clear()
                self._agreement.forget()
                self._changed = f"out of memory ({failure.reason})"
                return None, self._changed
            what = "passes of a decoding loop run eagerly: they cannot be captured"
            reason = fall_back(call, what, failure, options, lasts=not failure.unsupported, raises=True)
        else:
            assert isinstance(found, CapturedPass)
            self._agreement.keep(options, found)
            report_captured(cache, call.structure)
            return found, None
        self._failures[options] = reason
        return None, reason

    def _has_grown(self, cache: SharedContextCache, queries: int) -> bool:
        """Allocate room for a pass's tokens, and for some more passes of drafts; whether there was memory for it.

        A process with a model of its own raises its error.
        """
        needed = cache.suffix_length + queries
        try:
            cache.reserve(needed if queries == 1 else needed + 4 * MAX_QUERIES)
        except torch.OutOfMemoryError:
            if self._call.alone:
                raise
            return False
        return True


def choose_pass_mode(call: CallContext, new_tokens: int) -> tuple[str, str]:
    """Choose the mode of a loop's later passes, with the reason, as `choose_mode` does for decode steps."""
    try:
        with call.together():
            if call.scope is None or not call.scope.is_open:
                raise Unsupported("the decoding loop runs outside of generate, or in another thread")
    except Unsupported as error:
        if forced := call.options.needs_capture:
            call.state.log_once(f"{forced} not used: {error.what}")
        return "eager", error.what
    return choose_mode(call, new_tokens)


class Way(IntEnum):
    """How a rank would run a pass; all take the least of what any of them would."""

    NOT_AT_ALL = 0  # memory for its tokens is short
    EAGERLY = 1
    CAPTURING = 2
    REPLAYING = 3


class Bounds(NamedTuple):
    """The longest rows that a captured pass serves, for the nodes that its tables fit.

    Attributes:
        row: Most tokens of a row by the end of the call, see `SharedContextCache.longest_row`.
        suffix: Most tokens of a suffix before the pass.
    """

    row: int = sys.maxsize
    suffix: int = sys.maxsize

    @classmethod
    def of(cls, step: CapturedPass) -> Bounds:
        return cls(step.longest_row or sys.maxsize, step.longest_suffix or sys.maxsize)


_ANY = Bounds()


class _Known(NamedTuple):
    """A captured pass, and for which nodes all ranks are known to replay theirs: None before they agreed."""

    step: CapturedPass
    forest: Forest | None = None
    limits: Bounds = _ANY


class PassAgreement:
    """Which captured passes the ranks of a model replay, and which they run eagerly, as agreed on in one call.

    No rank may replay a pass that another runs eagerly, and all capture in one order. What follows from a pass's
    arguments and the batch alone is the same on every rank, and so are growing suffixes and what a loop of
    transformers' own does: nobody is asked. What one rank may know otherwise is agreed on by one collective: failures
    of earlier captures, memory, and whether its captured pass fits the batch. That holds for the passes that follow,
    as long as the nodes are the same and rows are no longer than what the captures of all ranks serve. Code of the
    user's may do something else on each rank, so that its loops ask before each pass.

    Args:
        asks_always: Whether the loop is the user's.
    """

    def __init__(self, ranks: Ranks, *, asks_always: bool):
        self._ranks = ranks
        self.asks_always = asks_always and not ranks.alone
        self._known: dict[CaptureOptions, _Known] = {}

    def keep(self, options: CaptureOptions, step: CapturedPass) -> None:
        """Keep a pass that all ranks have captured or found."""
        self._known[options] = _Known(step)

    def forget(self) -> None:
        """Let go of all captured passes."""
        self._known = {}

    def replayed(self, cache: SharedContextCache, options: CaptureOptions) -> CapturedPass | None:
        """The captured pass that all ranks replay, where that is known without asking them."""
        known = self._known.get(options)
        if known is None or self.asks_always or known.forest is not cache.forest:
            return None
        row, suffix = known.limits
        serves = cache.longest_row(options.queries) <= row and cache.suffix_length <= suffix
        return known.step if serves and known.step.reads(cache) else None

    def refuse(self, reason: str) -> str:
        """Run a pass eagerly, for a reason that other ranks need not have in a loop of the user's."""
        if self.asks_always:
            self._ask(Way.EAGERLY, reason)
        return reason

    def ask(
        self, cache: SharedContextCache, options: CaptureOptions, reason: str | None, *, has_room: bool
    ) -> tuple[CapturedPass | None, str | None]:
        """The captured pass that all ranks replay, or why all run it eagerly; neither where all are to capture it.

        Args:
            reason: Why this rank does not capture such passes.
            has_room: Whether this rank's suffixes have room for the pass.

        Raises:
            NoRoomError: On all ranks, as memory of one is short.
        """
        known = self._known.get(options)
        fits = known is not None and known.step.fits(cache)
        way = Way.EAGERLY if reason is not None else Way.REPLAYING if fits else Way.CAPTURING
        limits = Bounds.of(known.step) if known is not None and fits else _ANY
        agreed, reason, limits = self._ask(way if has_room else Way.NOT_AT_ALL, reason, limits)
        if known is None or agreed != Way.REPLAYING:
            return None, reason
        self._known[options] = _Known(known.step, cache.forest, limits)
        return known.step, None

    def _ask(self, way: Way, reason: str | None, limits: Bounds = _ANY) -> tuple[Way, str | None, Bounds]:
        """The way of all ranks, why it is eager, and what the captures of all serve; one collective."""
        ranks = self._ranks
        least, most, *smallest = ranks.smallest(way, -way, *limits)
        if least == Way.NOT_AT_ALL:
            raise NoRoomError("the memory of a process of the model does not suffice for the tokens of a pass")
        if least == Way.EAGERLY and -most != Way.EAGERLY:
            try:
                with ranks.together():
                    if reason is not None:
                        raise Unsupported(reason)
            except Unsupported as error:
                reason = error.what
        return Way(least), reason, Bounds(*smallest)
