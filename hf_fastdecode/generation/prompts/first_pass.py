"""Shared prefill on the first forward pass of other decoding loops.

Beam search, assisted decoding, ``custom_generate`` and others use transformers' or the user's loop. The loop gets an
empty shared-context cache. Its first pass, over whole prompts, prefills shared tokens once and returns the output that
the model would have returned for all rows. Later passes use the cache like any other, captured where they can be
(`steps.loop_passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache

from ..._compat import CACHE, prefill_of_transformers, with_cache
from ...attention.forest import path_slice
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext
from ..forward_pass import arguments_of_decoders, reduced
from ..steps.loop_passes import CapturedPasses, choose_pass_mode
from ..steps.modes import holding_captures
from ..steps.prefill_passes import RowPasses
from ..support import OWN_METHOD, check_arguments
from .call_plan import CallPlan, Request, plan_call, planned_alike
from .gain import require_gain
from .packed import PrefillPass
from .reading import read_prompts
from .start import end_prefill, merge_returned, passes_of

_KNOWN_ARGUMENTS = {
    *("attention_mask", "input_ids", "inputs_embeds", "position_ids", CACHE),
    *("logits_to_keep", "output_hidden_states", "return_dict", "use_cache"),
}
_RETURNS_KEYS: Final = "return_shared_kv_states"
"""Argument by which loops ask a pass for the keys and values of whole rows, as for Gemma 4's assistants."""


@dataclass
class FirstPassPrompts:
    """Runs a decoding loop's first pass as a shared prefill."""

    call: CallContext
    stock: Cache | None  # the cache that transformers would have used; None where the model makes its own
    longest: int  # maximum row length, padding included
    loop: str  # feature that needs another decoding loop, for reports
    # The prefill_chunk_size of a loop that reads it, which the call's config no longer has: the first pass is of whole
    # prompts.
    chunk: int | None

    def run(self, cache: SharedContextCache, arguments: dict[str, Any], forward: Callable[..., Any]) -> Any:
        """Prefill the prompts into the cache, or run `forward` with the stock cache if they cannot share.

        Raises ValueError if the caller's cache cannot be used.
        """
        cache.first_pass = None
        output, scope = None, self.call.scope
        with self.call.or_stock(), ExitStack() as held:
            output = self._prefill(cache, arguments, held)
            if scope is not None:  # else the mode is eager, and nothing is held
                scope.enter(held.pop_all())
        if output is not None:
            return output
        self.call.config.prefill_chunk_size = self.chunk
        self.call.enter_stock_loop()
        if self.stock is None:
            return forward(**with_cache(self._with_inputs(cache, arguments), None))
        cache.become(self.stock)  # the loop may go on with the object that it was given
        ids = arguments.get("input_ids")
        if self.chunk is not None and not self.call.loop_is_users and ids is not None:
            own = ("input_ids", "return_dict")
            others = {name: value for name, value in arguments.items() if name not in own} | {CACHE: cache}
            if self.call.inputs is not None:  # which the method prepares by itself, for each chunk
                others = self._before_prepared(cache)
            return prefill_of_transformers(self.call.model, ids, self.call.config, others)
        return forward(**self._with_inputs(cache, arguments) | {CACHE: cache})

    def _prefill(self, cache: SharedContextCache, arguments: dict[str, Any], held: ExitStack) -> Any:
        """The first pass's output; `held` then has what is held until the call's end."""
        call = self.call
        plan = planned_alike(call, partial(self._planned, arguments))
        prompts, request, hidden = plan.prompts, plan.request, self._returns_hidden(arguments)
        reason = f"{self.loop} uses another decoding loop"
        call.report.sampler_reason = reason
        mode, why = choose_pass_mode(call, request.new_tokens)
        call.set_mode(mode, why)
        if not call.loop_is_users:
            with call.together():
                require_gain(call, plan, loop="transformers'")
        holds = held.enter_context(holding_captures(call))
        watches = call.loop_is_users or self.loop.startswith(OWN_METHOD)
        self._log_unused(len(prompts.ids), reason)
        self._adopt(cache, plan)
        positions = _positions_of_last(plan, request.wanted)
        tokens = sorted(set(positions[positions >= 0].tolist()))
        captured = None
        if holds and not watches and call.alone:
            captured = RowPasses(call, partial(call.state.captures.refresh, call.model, call.structure))
        extra: dict[str, Any] = {"output_hidden_states": True} if hidden else {}
        passes = list(passes_of(call, cache, plan, tokens, captured_rows=captured, **extra))
        if prompts.reusable:
            merge_returned(call, cache)
        end_prefill(call, cache, reusable=prompts.reusable)
        call.report.fused = call.structure.fused_names
        output = _output(cache, plan, passes, positions, hidden=hidden)
        if holds:
            reorders = call.config.num_beams is not None and call.config.num_beams > 1
            cache.later_passes = later = CapturedPasses(call, reorders=reorders, watches=watches)
            held.callback(later.end, cache)
        return output

    def _log_unused(self, rows: int, reason: str) -> None:
        options = self.call.options
        unused = [option for option in options.forced if option == "sampler='fast'"]
        if options.max_rows is not None and options.max_rows < rows:
            unused.append(f"max_rows={options.max_rows}")
        if unused:
            self.call.state.log_once(f"{', '.join(unused)} not used: {reason}")

    def _adopt(self, cache: SharedContextCache, plan: CallPlan) -> None:
        prompts, report = plan.prompts, self.call.report
        mask, positions, width = prompts.mask, prompts.positions, prompts.width
        report.padded_length = report.context_width = width
        cache.adopt_state(plan.cache)
        cache.checks_masks = self.call.may_keep_cache  # else passes are transformers' own
        if mask is not None and not self.call.loop_is_users and bool((mask[:, 1:] < mask[:, :-1]).any()):
            cache.checks_masks = False  # transformers' loop repeats the holes of a prompt's mask at every step
        cache.state.position_planes = 0 if positions.differ else positions.planes
        cache.state.padded_width = width if prompts.padded else None
        cache.state.counts_tokens = not positions.differ
        report.cache = ref(cache)

    def _returns_hidden(self, arguments: dict[str, Any]) -> bool:
        hidden = arguments.get("output_hidden_states")
        return bool(self.call.model.config.output_hidden_states if hidden is None else hidden)

    def _planned(self, arguments: dict[str, Any]) -> CallPlan:
        call, names, hidden = self.call, self.call.names, self._returns_hidden(arguments)
        self._check(arguments)
        prompts = read_prompts(
            *(call, arguments.get(names.ids), arguments),
            reduced(arguments.get(names.positions), arguments.get(names.mask)),
            longest=self.longest,
            hidden=hidden,
            of_pass=True,
        )
        asked = arguments.get("logits_to_keep")
        if isinstance(asked, Tensor):
            raise Unsupported("logits_to_keep is a tensor of positions", "pass a number")
        wanted = min(asked or prompts.width, prompts.width)  # 0 and None mean all
        new_tokens, recompute = max(0, self.longest - prompts.width), prompts.width if hidden else wanted
        plan = plan_call(call, prompts, Request(new_tokens, wanted, recompute))
        if call.loop_is_users:  # it may read keys, so that it gets stock's cache unless sharing gains
            require_gain(call, plan, loop="a user's")
        return plan

    def _check(self, arguments: dict[str, Any]) -> None:
        call, inputs = self.call, self.call.inputs
        others = arguments_of_decoders(call.model) if inputs is None else inputs.names_in_passes(call.model)
        check_arguments(arguments, _KNOWN_ARGUMENTS | others)
        if arguments.get(_RETURNS_KEYS):
            raise Unsupported(f"its drafter reads each row's keys and values ({_RETURNS_KEYS}=True)")
        if arguments.get("return_dict") is False:
            raise Unsupported("return_dict=False was requested", "leave it out")
        if arguments.get(call.names.ids) is None and call.given is not None:
            raise Unsupported("its tokens cannot be compared with inputs_embeds")

    def _with_inputs(self, cache: SharedContextCache, arguments: dict[str, Any]) -> dict[str, Any]:
        """The pass's arguments with the images, videos or audio that stock would have given it."""
        if self.call.inputs is None:
            return arguments
        given = self._before_prepared(cache)
        return arguments | self.call.model.prepare_inputs_for_generation(
            arguments["input_ids"], is_first_iteration=True, **given
        )

    def _before_prepared(self, cache: Cache) -> dict[str, Any]:
        """The call's model arguments, as transformers' loops have them in stock before they prepare a pass."""
        assert self.call.inputs is not None
        return self.call.arguments | self.call.inputs.expanded() | {"use_cache": True, CACHE: cache}


def _output(
    cache: SharedContextCache, plan: CallPlan, passes: Sequence[PrefillPass], positions: Tensor, *, hidden: bool
) -> Any:
    """The output of the model's class that one pass over all rows would have, with logits at `_positions_of_last`."""
    rows = torch.tensor([group.count for group in plan.prompts.groups], device="cpu")
    tokens, order = torch.tensor([token for done in passes for token in done.wanted], device="cpu").sort()
    logits = torch.cat([done.logits for done in passes])[order.to(passes[0].logits.device)]
    kind: Any = type(passes[-1].output)
    fields: dict[str, Any] = {CACHE: cache} if CACHE in kind.__dataclass_fields__ else {}
    fields["logits"] = _expand_to_rows(logits, torch.searchsorted(tokens, positions), positions >= 0, rows)
    if hidden:
        every = _positions_of_last(plan, plan.prompts.width)
        if passes[0].output.hidden_states[0].dim() > 3:
            raise Unsupported("its hidden states have more dimensions than rows, tokens and numbers")
        states = zip(*(done.output.hidden_states for done in passes), strict=True)
        fields["hidden_states"] = tuple(
            _expand_to_rows(torch.cat([part[0] for part in parts]), every, every >= 0, rows) for parts in states
        )
    return kind(**fields)


def _positions_of_last(plan: CallPlan, last: int) -> Tensor:
    """Indices in the plan's new tokens of each group's last positions: ``[groups, last]``, -1 for padding."""
    groups, nodes = plan.prompts.groups, plan.nodes
    found = torch.full((len(groups), last), -1, device="cpu")
    segment, row = nodes.items[0].span.segment, 0
    for index, group in enumerate(groups):
        length = len(group.tokens)
        spans = path_slice(nodes.forest.paths[row], max(0, length - last), length)
        new = [torch.arange(span.start, span.stop, device="cpu") for span in spans if span.segment == segment]
        if new:
            of_group = torch.cat(new)
            found[index, last - len(of_group) :] = of_group
        row += group.count
    return found


def _expand_to_rows(values: Tensor, positions: Tensor, real: Tensor, rows: Tensor) -> Tensor:
    """Outputs ``[tokens, ...]`` at positions ``[groups, last]``, of so many rows each: ``[rows, last, ...]``."""
    device = values.device
    spread = values[positions.clamp(0, len(values) - 1).to(device)]
    if not bool(real.all()):
        spread[~real.to(device)] = 0
    return spread if bool((rows == 1).all()) else spread.repeat_interleave(rows.to(device), dim=0)
