"""Shared prefill on the first forward pass of other decoding loops.

Beam search, assisted decoding, ``custom_generate`` and others use transformers' or the user's loop. The loop gets an
empty shared-context cache. Its first pass, over whole prompts, prefills shared tokens once and returns the output that
the model would have returned for all rows. Later passes use the cache like any other, captured where they can be
(`steps.loop_passes`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache

from ..._compat import CACHE, prefill_of_transformers, with_cache
from ...attention.forest import path_slice
from ...cache.layers.cross import ENCODER_OUTPUTS
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext, Positions, reduced
from ..forward_pass import counts_padding, places_tokens, reads_positions
from ..inputs.encoded import find_inputs
from ..inputs.seen import UNCONTINUED, images_of_layers, mask_of_images
from ..steps.loop_passes import capture_passes, choose_pass_mode, first_passes
from ..steps.modes import holding_captures
from ..support.call import OWN_METHOD, check_arguments
from ..support.prompts import PLACED_OTHERWISE, check_prompts, check_unkept, require_counted, require_rows
from .by_rows import Rows, counted_with_padding, row_passes, try_step
from .gain import require_gain
from .image_beginnings import ImageBeginnings, kept_ids
from .packed import prefill_passes
from .prompt_plan import PromptGroup, PromptPlan, group_prompts
from .sharing import Shared, end_prefill, find_shared, merge_returned, planned_alike

_KNOWN_ARGUMENTS = {
    "attention_mask",
    "input_ids",
    "inputs_embeds",
    "logits_to_keep",
    "output_hidden_states",
    CACHE,
    "position_ids",
    "return_dict",
    "use_cache",
}
_RETURNS_KEYS: Final = "return_shared_kv_states"
"""Argument by which loops ask a pass for the keys and values of whole rows, as for Gemma 4's assistants."""

# Options without effect in other decoding loops.
_UNSUPPORTED_OPTIONS = ("sampler='fast'",)


class _PlannedFirstPass(NamedTuple):
    """What a first pass prefills.

    Attributes:
        ids: ``[rows, width]``; of embeddings, see `_ids_of_embeddings`.
        padded: Whether positions count the padding of prompts.
        apart: Whether tokens have other positions than those counted from a row's first: of padding, or the model's.
        by_rows: Whether prompts run by rows, see `by_rows`.
        tokens_say_all: Whether prompts with equal tokens are equal, see `CallContext.tokens_say_all`.
        embeddings: The embeddings of ids, if the prompts are embeddings.
        hidden: Whether hidden states are returned.
        wanted: Number of last positions to return logits for.
        inputs_of: ``[rows]`` int64 on the CPU: which encoder input each row reads, if there are any.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Positions
    padded: bool
    apart: bool
    by_rows: bool
    tokens_say_all: bool
    embeddings: Callable[[Tensor], Tensor] | None
    hidden: bool
    wanted: int
    groups: list[PromptGroup]
    found: Shared
    plan: PromptPlan
    inputs_of: Tensor | None

    @property
    def reuses(self) -> bool:
        """Whether kept prompts may be used, and these kept."""
        return self.embeddings is None and self.tokens_say_all and not self.apart


@dataclass
class FirstPassPrompts:
    """Runs a decoding loop's first pass as a shared prefill.

    Attributes:
        stock: The cache that transformers would have used; None where the model makes its own.
        longest: Maximum row length, padding included.
        loop: Feature that needs another decoding loop, for reports.
        chunk: The call's ``prefill_chunk_size``, which its config no longer has: the first pass is of whole prompts.
        checks_masks: Whether to check the masks of later passes: those of a user's loop, or over a returned cache.
    """

    call: CallContext
    stock: Cache | None
    longest: int
    loop: str
    chunk: int | None
    checks_masks: bool

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
        self.enter_stock()
        if self.stock is None:
            return forward(**with_cache(self._with_inputs(cache, arguments), None))
        cache.become(self.stock)  # the loop may go on with the object that it was given
        ids = arguments.get("input_ids")
        if self.chunk is not None and self.loop != "custom_generate" and ids is not None:
            own = ("input_ids", "return_dict")
            others = {name: value for name, value in arguments.items() if name not in own} | {CACHE: cache}
            if self.call.inputs is not None:  # which the method prepares by itself, for each chunk
                others = self._before_prepared(cache)
            return prefill_of_transformers(self.call.model, ids, self.call.config, others)
        return forward(**self._with_inputs(cache, arguments) | {CACHE: cache})

    def enter_stock(self) -> None:
        """Have the loop go on as in stock, where other calls may use the model's captures."""
        self.call.state.captures.end_ahead(self.call.scope)
        self.call.config.prefill_chunk_size = self.chunk
        self.call.ranks.watchdog.enter_foreign_loop()

    def _prefill(self, cache: SharedContextCache, arguments: dict[str, Any], held: ExitStack) -> Any:
        """The first pass's output; `held` then has what is held until the call's end."""
        call, model, report = self.call, self.call.model, self.call.report
        users, reason = self.loop == "custom_generate", f"{self.loop} uses another decoding loop"
        planned = planned_alike(call, partial(self._planned, arguments))
        ids, mask, positions, padded = planned.ids, planned.mask, planned.positions, planned.padded
        embeddings, hidden, wanted = planned.embeddings, planned.hidden, planned.wanted
        groups, found, plan, width = planned.groups, planned.found, planned.plan, ids.shape[1]
        max_suffix = max(0, self.longest - width)
        report.sampler_reason = reason
        mode, why = choose_pass_mode(call, max_suffix)
        call.set_mode(mode, why)
        if not users:
            with call.ranks.together():
                require_gain(call, found, plan, max_suffix, loop="transformers'")
        holds = held.enter_context(holding_captures(call))
        watches = users or self.loop.startswith(OWN_METHOD)
        unused = [option for option in call.options.forced if option in _UNSUPPORTED_OPTIONS]
        if (most := call.options.max_rows) is not None and most < len(ids):
            unused.append(f"max_rows={most}")
        if unused:
            call.state.log_once(f"{', '.join(unused)} not used: {reason}")
        report.padded_length = report.context_width = width
        cache.adopt_state(found.cache)
        if mask is not None and not users and bool((mask[:, 1:] < mask[:, :-1]).any()):
            self.checks_masks = False  # transformers' loop repeats the holes of a prompt's mask at every step
        cache.checks_masks = self.checks_masks
        cache.state.position_planes = 0 if positions.differ else positions.planes
        cache.state.padded_width, cache.state.counts_tokens = width if padded else None, not positions.differ
        report.cache = ref(cache)
        places = _places(groups, plan, width, wanted)
        extra: dict[str, Any] = {"output_hidden_states": True} if hidden else {}
        limit = call.max_prefill_tokens
        if planned.by_rows:
            inputs = ids if embeddings is None else arguments[call.names.embeddings]
            given = counted_with_padding(width) if padded else positions.ids
            if call.inputs is not None:  # as the model is given them, which may prepare them further
                given = call.arguments.get(call.names.positions)
            distinct = Rows.of(inputs, mask, given, planned.inputs_of, call.input_rows).distinct(groups)
            layout = call.structure.layout
            rows_of = partial(row_passes, model, cache, plan, distinct, layout, keep=wanted, max_tokens=limit)
            passes = list(rows_of(captured=first_passes(call) if holds and not watches else None))
            try_step(call, cache, distinct)
        else:
            tokens = sorted(set(places[places >= 0].tolist()))
            packed = partial(prefill_passes, model, cache, plan, tokens, max_tokens=limit, length=width)
            passes = list(packed(embeddings=embeddings, **extra))
        if planned.reuses:
            merge_returned(call, cache)
        end_prefill(call, cache, reusable=planned.reuses)
        call.report.fused = call.structure.fused_names
        numbers = torch.tensor([token for done in passes for token in done.wanted], device="cpu")
        numbers, order = numbers.sort()
        logits = torch.cat([done.logits for done in passes])[order.to(passes[0].logits.device)]
        rows = torch.tensor([group.count for group in groups], device="cpu")
        kind: Any = type(passes[-1].output)
        fields: dict[str, Any] = {CACHE: cache} if CACHE in kind.__dataclass_fields__ else {}
        fields["logits"] = _expand_to_rows(logits, torch.searchsorted(numbers, places), places >= 0, rows)
        if hidden:
            every = _places(groups, plan, width, width)
            states = zip(*(done.output.hidden_states for done in passes), strict=True)
            if passes[0].output.hidden_states[0].dim() > 3:
                raise Unsupported("its hidden states have more dimensions than rows, tokens and numbers")
            fields["hidden_states"] = tuple(
                _expand_to_rows(torch.cat([part[0] for part in parts]), every, every >= 0, rows) for parts in states
            )
        if holds:
            reorders = call.config.num_beams is not None and call.config.num_beams > 1
            capture_passes(call, cache, held, reorders=reorders, watches=watches)
        return kind(**fields)

    def _planned(self, arguments: dict[str, Any]) -> _PlannedFirstPass:
        call, model = self.call, self.call.model
        names, cross, seen = call.names, bool(call.structure.layout.cross), mask_of_images(call)
        others = {*names, ENCODER_OUTPUTS} if cross else set() if seen is None else {seen}
        check_arguments(arguments, _KNOWN_ARGUMENTS | others)
        if seen is not None and call.must_share:
            raise Unsupported(UNCONTINUED)
        if arguments.get(_RETURNS_KEYS):
            raise Unsupported(f"its drafter reads each row's keys and values ({_RETURNS_KEYS}=True)")
        if arguments.get("return_dict") is False:
            raise Unsupported("return_dict=False was requested")
        ids, embeddings = arguments.get(names.ids), None
        if ids is None:
            ids, embeddings = _ids_of_embeddings(arguments[names.embeddings])
            if call.given is not None:
                raise Unsupported("its tokens cannot be compared with inputs_embeds")
        mask, width = arguments.get(names.mask), ids.shape[1]
        positions, text = reduced(arguments.get(names.positions), mask), call.inputs is None
        require_rows(positions, len(ids))
        given = positions if text else Positions(None)
        check_prompts(model, call.structure, ids, mask, given, longest=self.longest)
        inputs = find_inputs(arguments, len(ids)) if cross else None
        counts = positions.ids is None and (reads_positions(model) or counts_padding(model))
        if counts and not text:
            raise Unsupported("without position_ids, models count those behind images by themselves")
        padded = mask is not None and counts and not bool(mask.all())
        apart = padded or places_tokens(model)
        if inputs is not None or embeddings is not None:  # later passes of PEFT's have masks that cut tokens off
            require_counted(model, mask, positions)
        hidden = arguments.get("output_hidden_states")
        hidden = model.config.output_hidden_states if hidden is None else hidden
        tokens_say_all = text and not positions.differ
        by_rows = apart or not tokens_say_all or call.structure.layout.prefills_by_rows
        if not tokens_say_all:
            check_unkept(call, kept=self.checks_masks, hidden=hidden, own_loop=self.loop == "custom_generate")
        if apart and (self.checks_masks or hidden) and inputs is None:
            what = "hidden states are asked for" if hidden else "the call's cache would be kept"
            raise Unsupported(f"{PLACED_OTHERWISE}, and {what}")
        if by_rows and hidden:
            raise Unsupported("output_hidden_states is not accelerated yet for models with states or an encoder")
        of_rows = None if inputs is None else inputs.of_rows
        numbers = of_rows if call.input_rows is None else call.input_rows.numbers()
        images = None if text or seen is not None else ImageBeginnings(call, behind=False)
        known = kept_ids(call, ids) if images is not None and (call.must_share or call.returns_cache) else ids
        groups = group_prompts(known, mask, positions.ids if positions.differ else None, numbers)
        inputs = inputs or images_of_layers(call, [group.count for group in groups])
        wanted = _tokens_to_keep(arguments.get("logits_to_keep"), width)
        max_suffix, recompute = max(0, self.longest - width), width if hidden else wanted
        alike = tokens_say_all and not apart and inputs is None
        reuse = embeddings is None and alike
        found = find_shared(
            *(call, groups, max_suffix),
            recompute=recompute,
            by_rows=by_rows,
            alike=alike,
            images=images,
            reuse=reuse or images is not None,
        )
        if inputs is not None:
            found.cache.inputs = inputs.inputs
        plan = found.prompts.plan()
        if self.loop == "custom_generate":  # it may read keys, so that it gets stock's cache unless sharing gains
            require_gain(call, found, plan, max_suffix, loop="a user's")
        return _PlannedFirstPass(
            *(ids, mask, positions, padded, apart, by_rows, tokens_say_all),
            *(embeddings, hidden, wanted, groups, found, plan, None if inputs is None else inputs.of_rows),
        )

    def _with_inputs(self, cache: SharedContextCache, arguments: dict[str, Any]) -> dict[str, Any]:
        """The pass's arguments with the images, videos or audio that stock would have given it."""
        if self.call.inputs is None:
            return arguments
        given = self._before_prepared(cache)
        return arguments | self.call.model.prepare_inputs_for_generation(
            arguments["input_ids"], is_first_iteration=True, **given
        )

    def _before_prepared(self, cache: Cache) -> dict[str, Any]:
        """The model arguments of the call, as transformers' loops have them in stock before they prepare a pass."""
        assert self.call.inputs is not None
        return self.call.arguments | self.call.inputs.expanded() | {"use_cache": True, CACHE: cache}


def _tokens_to_keep(asked: int | Tensor | None, width: int) -> int:
    """Number of last positions of the padded prompts to return logits for."""
    if isinstance(asked, Tensor):
        raise Unsupported("logits_to_keep is a tensor of positions")
    return min(asked or width, width)  # 0 and None mean all


def _places(groups: list[PromptGroup], plan: PromptPlan, width: int, last: int) -> Tensor:
    """Indices in the plan's new tokens of each group's last positions: ``[groups, last]``, -1 for padding."""
    places = torch.full((len(groups), last), -1, device="cpu")
    segment = plan.items[0].span.segment
    row = 0
    for index, group in enumerate(groups):
        length = len(group.tokens)
        spans = path_slice(plan.forest.paths[row], max(0, length - last), length)
        new = [torch.arange(span.start, span.stop, device="cpu") for span in spans if span.segment == segment]
        if new:
            found = torch.cat(new)
            places[index, last - len(found) :] = found
        row += group.count
    return places


def _expand_to_rows(numbers: Tensor, places: Tensor, real: Tensor, rows: Tensor) -> Tensor:
    """Expand per-token outputs ``[tokens, ...]`` to all rows: ``[rows, last, ...]``, 0 for padding.

    Args:
        places: ``[groups, last]`` int64 on the CPU: token index of each position.
        real: ``[groups, last]`` bool on the CPU: False for padding.
        rows: ``[groups]`` int64 on the CPU: rows per group.
    """
    device = numbers.device
    spread = numbers[places.clamp(0, len(numbers) - 1).to(device)]
    if not bool(real.all()):
        spread[~real.to(device)] = 0
    return spread if bool((rows == 1).all()) else spread.repeat_interleave(rows.to(device), dim=0)


def _ids_of_embeddings(embeddings: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Assign negative ids ``[rows, width]`` to embeddings ``[rows, width, hidden]``, equal for bitwise equal vectors.

    The second result maps ids ``[tokens]`` back to ``[tokens, hidden]``.
    """
    rows, width, hidden = embeddings.shape
    vectors = embeddings.detach()
    distinct, row_of = [0], [0]  # expanded prompts are equal neighbours
    for row in range(1, rows):
        if not torch.equal(vectors[row], vectors[row - 1]):
            distinct.append(row)
        row_of.append(len(distinct) - 1)
    known = vectors[distinct].reshape(-1, hidden)
    bits = known.contiguous().view(torch.int16 if known.dtype.itemsize == 2 else torch.int32).long()
    _, numbers = torch.unique(bits, dim=0, return_inverse=True)
    first = torch.full((int(numbers.max()) + 1,), len(known), device=known.device)
    first.scatter_reduce_(0, numbers, torch.arange(len(known), device=known.device), "amin")
    ids = (-1 - first[numbers]).view(len(distinct), width)[row_of]
    return ids, lambda wanted: known[-1 - wanted.to(known.device)]
