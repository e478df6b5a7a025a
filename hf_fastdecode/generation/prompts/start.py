"""Start of decoding: shared prefill and the first logits of every row."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..beside import Beside
from ..call_context import CallContext, Positions
from ..decoding.decisions import Logits, rows_that_fit
from ..forward_pass import counts_padding, forward_pass, input_device, places_tokens
from ..inputs.encoded import FoundInputs, find_inputs
from ..inputs.seen import UNCONTINUED, images_of_layers, mask_of_images
from ..steps.early_kernels import begin_compiling_attention
from ..steps.modes import CallPasses
from ..support.prompts import PLACED_OTHERWISE, check_prompts, check_unkept, require_counted, require_rows
from .by_rows import Rows, counted_with_padding, prefill_rows, try_step
from .gain import require_gain
from .image_beginnings import ImageBeginnings, kept_ids
from .packed import node_logits, prefill_nodes, stacked
from .prompt_plan import PromptGroup, PromptPlan, group_prompts
from .sharing import Shared, end_prefill, find_shared, merge_returned, numbers_hold, planned_alike
from .unshared_prompts import UnsharedPrompts, prefill_unshared, unshared_prompts

_BEHIND = "images behind stored tokens"
"""Whether passes may have them: where tokens of an image see each other, our attention does not compute them."""

_FEW = 1 << 17
"""Numbers of prompts, mask and positions that are checked on the CPU: a copy of 1 MB."""


@dataclass
class Start:
    """State at the start of decoding.

    Attributes:
        cache: The prefilled cache; suffixes hold `suffix_tokens`.
        logits: ``[rows, vocabulary]`` after each prompt.
        positions: ``[rows]`` int64: position of each row's next token.
        suffix_tokens: ``[rows, tokens]`` int64: last tokens of the prompts that suffixes hold because nodes hold the
            whole prompts but for them; at most one.
        unshared: Prompt tokens that suffixes hold because no other row has them; None if nodes hold them.
    """

    cache: SharedContextCache
    logits: Tensor
    positions: Tensor
    suffix_tokens: Tensor
    unshared: UnsharedPrompts | None = None


def start_shared(call: CallContext, passes: CallPasses, input_ids: Tensor) -> Start:
    """Find the prefixes that prompts share, and prefill each once.

    Args:
        call: The call, with the mode set.
        passes: How its passes run.
        input_ids: ``[rows, width]``, expanded to all samples, as passed to decoding loops.

    Raises:
        Unsupported: The call must run stock.
        ValueError: The caller's cache does not fit the prompts or the model.
    """
    with call.ranks.together():
        inputs = find_inputs(call.arguments, len(input_ids)) if call.structure.layout.cross else None
        groups, padded = _checked_prompts(call, input_ids, inputs)
    # Whether the weights are still those of kept keys and values is asked while the device prefills; several processes
    # would have to agree on the answer.
    ahead, beside = call.ranks.count == 1, Beside(input_ids.device, "checks")
    width = input_ids.shape[1]
    planned = planned_alike(call, partial(_planned, call, groups, width, padded, inputs, ahead=ahead))
    try:
        start = _begin(call, passes, planned, input_ids)
    except Unsupported:
        if not call.images_behind:
            raise
        call.structure.keep(_BEHIND, False)
        call.report.begin_again()
        planned = planned_alike(call, partial(_planned, call, groups, width, padded, inputs, behind=False))
        start = _begin(call, passes, planned, input_ids)
    if ahead and call.given is None and not numbers_hold(call, beside) and planned.found.reuses:
        call.report.begin_again()
        again = planned_alike(call, partial(_planned, call, groups, width, padded, inputs))
        start = _begin(call, passes, again, input_ids)
    end_prefill(call, start.cache, reusable=not padded and call.tokens_say_all)
    return start


def _checked_prompts(
    call: CallContext, input_ids: Tensor, inputs: FoundInputs | None
) -> tuple[list[PromptGroup], bool]:
    """The groups of prompts, and whether their positions count padding."""
    require_rows(call.positions, len(input_ids))
    ids, mask, planar = _on_host(input_ids, call.mask, call.positions)
    longest = int(call.config.max_length)
    if not call.tokens_say_all:
        check_unkept(call, kept=call.returns_cache)
        of_layers = mask_of_images(call) is not None
        if of_layers and call.must_share:
            raise Unsupported(UNCONTINUED)
        check_prompts(call.model, call.structure, ids, mask, longest=longest)
        if call.input_rows is not None and not of_layers and (call.must_share or call.returns_cache):
            ids = kept_ids(call, ids)
        planes = planar.ids if planar.ids is None or planar.differ else planar.ids[None]
        return group_prompts(ids, mask, planes, None if call.input_rows is None else call.input_rows.numbers()), False
    check_prompts(call.model, call.structure, ids, mask, planar, longest=longest)
    padded = counts_padding(call.model) and mask is not None and not bool(mask.all())
    if places_tokens(call.model):
        raise Unsupported("the model derives positions from the ids of whole prompts")
    if inputs is not None:
        require_counted(call.model, mask, planar)
        return group_prompts(ids, mask, inputs=inputs.of_rows), padded
    if padded and call.returns_cache:
        raise Unsupported(f"{PLACED_OTHERWISE}, and the call's cache would be kept")
    return group_prompts(ids, mask), padded


class _Planned(NamedTuple):
    """What is to be prefilled.

    Attributes:
        unshared: Prompt tokens for suffixes, if any.
        rerun_last_token: Whether each prompt's last token is computed as the first decode step.
        padded: Whether positions count the padding of prompts.
        by_rows: Whether prompts run by rows, see `by_rows`.
        inputs_of: ``[rows]`` int64 on the CPU: which encoder input each row reads, if there are any.
    """

    found: Shared
    plan: PromptPlan
    unshared: UnsharedPrompts | None
    rerun_last_token: bool
    padded: bool
    by_rows: bool
    inputs_of: Tensor | None


def _planned(
    call: CallContext,
    groups: list[PromptGroup],
    width: int,
    padded: bool,
    inputs: FoundInputs | None,
    *,
    ahead: bool = False,
    behind: bool = True,
) -> _Planned:
    max_suffix = int(call.config.max_length) - width
    by_rows = padded or call.by_rows
    inputs = inputs or images_of_layers(call, [group.count for group in groups])
    alike = not padded and inputs is None and call.tokens_say_all
    images = (
        None
        if call.inputs is None or inputs is not None
        else ImageBeginnings(call, behind and call.structure.kept(_BEHIND, lambda: True))
    )
    found = find_shared(
        *(call, groups, max_suffix),
        recompute=0 if images is None else 1,
        by_rows=by_rows,
        alike=alike,
        images=images,
        reuse=alike or images is not None,
        ahead=ahead,
    )
    if inputs is not None:
        found.cache.inputs = inputs.inputs
    found.cache.state.position_planes, found.cache.state.counts_tokens = (
        call.positions.planes,
        not call.positions.differ,
    )
    # If the cache holds a whole prompt, or all but its last token, compute that token as the first decode step.
    few_new = found.prompts.any_stored_whole or found.prompts.new_length <= len(groups)
    rerun_last_token = found.reuses and few_new and not by_rows
    rows = sum(group.count for group in groups)
    if rerun_last_token and not call.returns_cache and rows > _rows_at_once(call, found.cache, rows, max_suffix):
        # That step would be of all rows: the last token of each prompt becomes a node, as any other new one.
        rerun_last_token, found.prompts = False, replace(found.prompts, recompute=1)
    unshared = None if rerun_last_token or by_rows else unshared_prompts(call, found)
    if rerun_last_token:
        found.prompts = found.prompts.without_last([1] * len(groups))
        found.cache.state.max_suffix = max_suffix + 1
    elif unshared is not None:
        found.prompts = found.prompts.without_last(found.prompts.unshared_lengths)
    plan = found.prompts.plan()
    again = len(groups) if rerun_last_token else 0
    of_suffixes = 0 if unshared is None else unshared.total
    require_gain(call, found, plan, max_suffix, unshared=of_suffixes, again=again, loop="this package's")
    inputs_of = None if inputs is None else inputs.of_rows
    return _Planned(found, plan, unshared, rerun_last_token, padded, by_rows, inputs_of)


def _rows_at_once(call: CallContext, cache: SharedContextCache, rows: int, new_tokens: int) -> int:
    """Of so many rows, how many may decode at once, by `max_rows` and, of a process of its own, by memory."""
    most = call.options.max_rows or rows
    if call.ranks.count > 1:  # which would have to agree on it
        return most
    vocabulary = int(call.structure.text_config.vocab_size)
    return min(most, rows_that_fit(cache, rows, Logits(call.model.device, vocabulary), new_tokens))


def _begin(call: CallContext, passes: CallPasses, planned: _Planned, input_ids: Tensor) -> Start:
    """Prefill what is not stored, or queue it on the device."""
    found, plan, unshared, rerun_last_token, padded, by_rows, inputs_of = planned
    model, width, cache = call.model, input_ids.shape[1], found.cache
    begin_compiling_attention(call, plan.forest)
    if unshared is not None:
        return _start_with_unshared(call, found, plan, unshared, input_ids)
    call.report.padded_length, call.report.context_width = width, width - rerun_last_token
    # Sent to the device before the prefill is queued there, behind which a transfer would wait.
    numbers = [index for index, group in enumerate(found.prompts.groups) for _ in range(group.count)]
    next_places = [width] * len(numbers) if padded else plan.forest.context_lengths
    positions, group_of_row = torch.tensor([next_places, numbers], device=input_ids.device)
    limit, length = call.max_prefill_tokens, width - rerun_last_token
    if by_rows:
        places = counted_with_padding(width) if padded else call.positions.ids
        if call.inputs is not None:
            places = call.arguments.get(call.names.positions)
        if not call.tokens_say_all and (after := call.positions.after) is not None:
            positions = after.to(input_ids.device).expand(len(input_ids)).contiguous()
        rows = Rows.of(input_ids, call.mask, places, inputs_of, call.input_rows)
        distinct, layout = rows.distinct(found.prompts.groups), call.structure.layout
        logits = prefill_rows(model, cache, plan, distinct, layout, max_tokens=limit, captured=passes.by_rows)
        try_step(call, cache, rows)
        merge_returned(call, cache)
        return Start(cache, logits.index_select(0, group_of_row.to(logits.device)), positions, input_ids[:, width:])
    known = prefill_nodes(model, cache, plan, max_tokens=limit, length=length, captured=passes.prefill)
    merge_returned(call, cache)
    suffix_tokens = input_ids[:, width - rerun_last_token :]
    if rerun_last_token or known is None:
        logits = _last_token_again(call, passes, cache, suffix_tokens[:, 0], positions)
        return Start(cache, logits, positions + 1, suffix_tokens)
    return Start(cache, known.index_select(0, group_of_row.to(known.device)), positions, suffix_tokens)


def _on_host(input_ids: Tensor, mask: Tensor | None, positions: Positions) -> tuple[Tensor, Tensor | None, Positions]:
    """Prompts, mask and positions on the CPU, by one transfer, where launches of their checks would take longer."""
    given = [one for one in (input_ids, mask, positions.ids) if one is not None]
    few = all(one.dim() == 2 and one.shape[1] == input_ids.shape[1] for one in given)
    few = few and sum(one.numel() for one in given) <= _FEW and len({one.device for one in given}) == 1
    if not few or not input_ids.is_cuda:
        return input_ids, mask, positions
    whole = torch.cat([one.long() for one in given]).cpu()
    parts = dict(zip(map(id, given), whole.split([len(one) for one in given]), strict=True))
    return parts[id(input_ids)], parts.get(id(mask)), positions._replace(ids=parts.get(id(positions.ids)))


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
    output = forward_pass(
        call.model,
        cache,
        positions[:, None].to(device),
        input_ids=tokens[:, None].to(device),
        use_cache=True,
        return_dict=True,
    )
    return output.logits[:, -1]


def _start_with_unshared(
    call: CallContext, found: Shared, plan: PromptPlan, unshared: UnsharedPrompts, input_ids: Tensor
) -> Start:
    """Prefill shared tokens into nodes, and each row's unshared prompt tokens into its suffix."""
    model, cache, (rows, width), device = call.model, found.cache, input_ids.shape, input_ids.device
    report, limit = call.report, call.max_prefill_tokens
    report.padded_length = report.context_width = width
    report.own_tokens = unshared.total
    after_nodes = zip(
        node_logits(model, cache, plan, max_tokens=limit, length=width), found.prompts.groups, strict=True
    )
    of_nodes = [logits for logits, group in after_nodes for _ in range(group.count)]
    merge_returned(call, cache)
    if cache.state.max_suffix is not None:
        cache.state.max_suffix += unshared.longest
    of_suffixes = prefill_unshared(model, cache, unshared, max_tokens=limit)
    logits = [of_suffixes.get(row, of_nodes[row]) for row in range(rows)]
    assert all(last is not None for last in logits)  # a prompt without unshared tokens ends in a new node
    positions = torch.tensor(plan.forest.context_lengths, device=device) + unshared.lengths.to(device)
    return Start(cache, stacked(model, cast(list[Tensor], logits)), positions, input_ids[:, width:], unshared)
