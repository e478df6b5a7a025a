"""Computes what a call's plan has to prefill: for this package's loop, up to the first logits of every row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ...cache.forest_cache import consolidate
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext
from ..fingerprint import filled_by
from ..forward_pass import Beside, forward_pass, input_device, places_tokens
from ..steps.modes import CallPasses
from ..steps.prefill_passes import begin_compiling_attention
from .by_rows import prefill_passes, try_step
from .call_plan import CallPlan, Request, keeps_prompts, plan_call, planned_alike, weights_hold
from .gain import require_gain
from .packed import PrefillPass, UnsharedPrompts, prefill_unshared, stacked
from .prompt_plan import continuation_of
from .reading import Prompts, read_prompts


@dataclass
class Start:
    """State at the start of decoding."""

    cache: SharedContextCache
    logits: Tensor  # [rows, vocabulary] after each prompt
    positions: Tensor  # [rows] int64: position of each row's next token
    # [rows, tokens] int64: last tokens of the prompts that suffixes hold because nodes hold the whole prompts but for
    # them; at most one.
    suffix_tokens: Tensor
    # Prompt tokens that suffixes hold because no other row has them; None if nodes hold them.
    unshared: UnsharedPrompts | None = None


def start_shared(call: CallContext, passes: CallPasses, input_ids: Tensor) -> Start:
    """Find the prefixes that prompts share, and prefill each once, in a call whose mode is set.

    Args:
        passes: How its passes run.
        input_ids: ``[rows, width]``, expanded to all samples, as passed to decoding loops.

    Raises:
        Unsupported: The call must run stock.
        ValueError: The caller's cache does not fit the prompts or the model.
    """

    def read() -> CallPlan:
        if places_tokens(call.model):
            raise Unsupported("the model derives positions from the ids of whole prompts")
        longest, given = int(call.config.max_length), (call, input_ids, call.arguments, call.positions)
        prompts = read_prompts(*given, longest=longest)
        again = 0 if prompts.prefixes.of_text else 1
        request = Request(longest - prompts.width, recompute=again, ends_in_steps=True, checks_later=True)
        return _planned(call, prompts, request)

    beside = Beside(input_ids.device, "checks")
    plan = planned_alike(call, read)
    try:
        start = _begin(call, passes, plan)
    except Unsupported:
        if (prompts := plan.prompts.narrowed(plan.nodes)) is None:
            raise
        plan, start = _begin_again(call, passes, prompts, plan.request)
    # The device prefills meanwhile. Where the weights changed, the store is empty now, so that nothing is reused.
    if plan.checks_later and not weights_hold(call, beside) and plan.reuses:
        plan, start = _begin_again(call, passes, plan.prompts, plan.request)
    end_prefill(call, start.cache, reusable=plan.prompts.reusable)
    return start


def _planned(call: CallContext, prompts: Prompts, request: Request) -> CallPlan:
    plan = plan_call(call, prompts, request)
    plan.cache.state.position_planes = prompts.positions.planes
    plan.cache.state.counts_tokens = not prompts.positions.differ
    require_gain(call, plan, loop="this package's")
    return plan


def _begin_again(call: CallContext, passes: CallPasses, prompts: Prompts, request: Request) -> tuple[CallPlan, Start]:
    call.report.captured_prefill_tokens, call.report.known_tokens = 0, None
    plan = planned_alike(call, partial(_planned, call, prompts, replace(request, checks_later=False)))
    return plan, _begin(call, passes, plan)


def _begin(call: CallContext, passes: CallPasses, plan: CallPlan) -> Start:
    """Prefill what is not stored, or queue it on the device."""
    model, prompts, cache, forest = call.model, plan.prompts, plan.cache, plan.nodes.forest
    ids, width = prompts.ids, prompts.width
    if not cache.state.division.is_divided:  # whose steps launch others
        begin_compiling_attention(call, forest)
    call.report.padded_length, call.report.context_width = width, width - plan.last_again
    if call.recorder is not None:
        call.recorder.begin(paths=forest.paths)  # those of the cache may be merged
    if plan.unshared is not None:
        return _start_with_unshared(call, plan, plan.unshared)
    # Sent to the device before the prefill is queued there, after which a transfer would wait.
    next_positions = [width] * len(ids) if prompts.padded else forest.context_lengths
    positions, group_of_row = torch.tensor([next_positions, prompts.row_groups], device=ids.device)
    if prompts.by_rows and not prompts.tokens_say_all and (after := prompts.positions.after) is not None:
        positions = after.to(ids.device).expand(len(ids)).contiguous()
    found = _logits_of_groups(call, plan, captured=passes.prefill, captured_rows=passes.by_rows)
    logits = [one for one in found if one is not None]
    last = stacked(model, logits) if len(logits) == len(found) else None
    merge_returned(call, cache)
    suffix_tokens = ids[:, width - plan.last_again :]
    if plan.last_again or last is None:
        logits_again = _last_token_again(call, passes, cache, suffix_tokens[:, 0], positions)
        return Start(cache, logits_again, positions + 1, suffix_tokens)
    return Start(cache, last.index_select(0, group_of_row.to(last.device)), positions, suffix_tokens)


@torch.no_grad()
def _logits_of_groups(call: CallContext, plan: CallPlan, **captured: Any) -> list[Tensor | None]:
    """Compute the plan's nodes: the logits after each group; None where its last token is in no new node."""
    known: dict[int | None, Tensor] = {}
    for done in passes_of(call, plan.cache, plan, plan.nodes.last_tokens, **captured):
        known |= zip(done.wanted, done.logits, strict=True)
    return [known.get(end) for end in plan.nodes.ends]


def _last_token_again(
    call: CallContext, passes: CallPasses, cache: SharedContextCache, tokens: Tensor, positions: Tensor
) -> Tensor:
    """Logits ``[rows, vocabulary]`` of the prompts' last tokens, computed as the first decode step."""
    steps = None
    if passes.prefill is not None:
        with suppress(torch.OutOfMemoryError):  # the loop, which makes steps again, can split the rows
            steps = passes.make_steps(cache)
    if steps is not None:
        return steps(tokens, positions).clone()  # which the next step would overwrite
    device = input_device(call.model)
    ids, places = tokens[:, None].to(device), positions[:, None].to(device)
    output = forward_pass(call.model, cache, places, input_ids=ids, use_cache=True, return_dict=True)
    return output.logits[:, -1]


def _start_with_unshared(call: CallContext, plan: CallPlan, unshared: UnsharedPrompts) -> Start:
    """Prefill shared tokens into nodes, and each row's unshared prompt tokens into its suffix."""
    model, cache, ids = call.model, plan.cache, plan.prompts.ids
    call.report.own_tokens = unshared.total
    after_nodes = _logits_of_groups(call, plan)
    merge_returned(call, cache)
    if cache.state.max_suffix is not None:
        cache.state.max_suffix += unshared.longest
    of_suffixes = prefill_unshared(model, cache, unshared, max_tokens=call.max_prefill_tokens)
    of_nodes = (after_nodes[group] for group in plan.prompts.row_groups)
    logits = [of_suffixes.get(row, of_node) for row, of_node in enumerate(of_nodes)]
    assert all(last is not None for last in logits)  # a prompt without unshared tokens ends in a new node
    positions = torch.tensor(plan.nodes.forest.context_lengths, device=ids.device) + unshared.lengths.to(ids.device)
    return Start(cache, stacked(model, cast(list[Tensor], logits)), positions, ids[:, ids.shape[1] :], unshared)


def passes_of(
    call: CallContext,
    cache: SharedContextCache,
    plan: CallPlan,
    tokens: Sequence[int],
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """Compute a plan's nodes into a cache, pass by pass, with further arguments of `prefill_passes`.

    Logits are of the new `tokens` with these indices, ascending; by rows, of the plan's last positions.
    """
    prompts, rows = plan.prompts, plan.prompts.distinct_rows() if plan.prompts.by_rows else None
    if prompts.embeddings is not None:
        arguments["embeddings"] = prompts.embeddings.of_ids
    yield from prefill_passes(
        *(call.model, cache, plan.nodes, continuation_of(call.structure.layout)),
        rows=rows,
        wanted=tokens,
        keep=plan.request.wanted,
        length=prompts.width - plan.last_again,
        max_tokens=call.max_prefill_tokens,
        **arguments,
    )
    if rows is not None:
        try_step(call, cache, rows)


def merge_returned(call: CallContext, cache: SharedContextCache) -> None:
    """Merge the prefilled nodes of a cache that the caller gets, on all processes of the model or on none."""
    if call.returns_cache:
        with suppress(torch.OutOfMemoryError):
            consolidate(cache, call.together())


def end_prefill(call: CallContext, cache: SharedContextCache, *, reusable: bool) -> None:
    """Keep prefilled nodes in the prefix store if they are `reusable`, and note which model filled a kept cache.

    Not within passes, for whose time methods of modules are replaced.
    """
    if cache.kept:
        cache.fingerprint = filled_by(cache.fingerprint, call.model, call.structure.walk)
    of_gaps = cache.gaps and bool(cache.state_layers)  # from which nothing is continued
    of_call = call.given is None  # a given one may hold tokens of direct passes
    if reusable and of_call and not of_gaps and keeps_prompts(call):
        with suppress(torch.OutOfMemoryError):
            call.report.kept_bytes = call.state.prefix_store.keep(
                call.model, call.structure, cache, call.options.reused_bytes, found=call.then
            )
    call.report.observe_nodes(cache)
