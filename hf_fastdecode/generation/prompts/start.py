"""Start of decoding: shared prefill and the first logits of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext
from ..forward_pass import forward_pass, input_device
from ..support import check_prompts, why_not_counted
from .own_prompts import OwnPrompts, own_prompts, prefill_own_prompts, without_own_tokens
from .packed import node_logits, prefill_nodes, stacked
from .prompt_tree import PromptGroup, group_prompts, plan_prompts
from .sharing import Shared, find_shared, keep_nodes, require_gain
from .stored_prompts import StoredPrompts


@dataclass
class Start:
    """State at the start of decoding.

    Attributes:
        cache: The prefilled cache; suffixes hold `suffix_tokens`.
        logits: ``[rows, vocabulary]`` after each prompt.
        positions: ``[rows]`` int64: position of each row's next token.
        suffix_tokens: ``[rows, tokens]`` int64: last tokens of the prompts that suffixes hold because nodes hold the
            whole prompts but for them; at most one.
        own: Tokens that rows have in their suffixes because no other row has them; None if there are none.
    """

    cache: SharedContextCache
    logits: Tensor
    positions: Tensor
    suffix_tokens: Tensor
    own: OwnPrompts | None = None


def start_shared(call: CallContext, input_ids: Tensor) -> Start:
    """Find the prefixes that prompts share, and prefill each once.

    Args:
        call: The call, with the mode set.
        input_ids: ``[rows, width]``, expanded to all samples, as passed to decoding loops.

    Raises:
        Unsupported: The call must run stock.
        ValueError: The caller's cache does not fit the prompts or the model.
    """
    model, width, longest = call.model, input_ids.shape[1], int(call.config.max_length)
    mask, positions = call.arguments.get("attention_mask"), call.arguments.get("position_ids")
    given = check_prompts(model, call.structure.layout, input_ids, mask, positions, longest=longest)
    if given.differ:  # this loop gives every step a position per row
        raise Unsupported(why_not_counted(model, cast(Tensor, positions)))
    max_suffix = longest - width
    found = find_shared(call, group_prompts(input_ids, mask), max_suffix)
    groups, plan, cache = found.groups, found.plan, found.cache
    cache.state.position_planes = given.planes
    # If the cache holds a whole prompt, or all but its last token, compute that token as the first decode step.
    rerun_last_token = None in plan.ends or (found.known and len(plan.new_tokens) <= len(groups))
    if rerun_last_token:
        groups = [PromptGroup(group.tokens[:-1], group.count) for group in groups]
        plan = plan_prompts(groups, StoredPrompts(cache), min_shared_tokens=call.options.min_shared_tokens)
        cache.state.max_suffix = max_suffix + 1
        found = Shared(cache, groups, plan, found.known)
    own = own_prompts(call, found)
    require_gain(call, found, max_suffix, smaller_suffixes=own is not None)
    if own is not None:
        return _start_with_own_prompts(call, found, own, input_ids)
    call.report.padded_length, call.report.context_width = width, width - rerun_last_token
    logits = prefill_nodes(model, cache, plan, max_tokens=call.max_prefill_tokens, length=width - rerun_last_token)
    keep_nodes(call, cache)
    suffix_tokens = input_ids[:, width - rerun_last_token :]
    positions = torch.tensor(plan.forest.context_lengths, device=input_ids.device)
    if rerun_last_token or logits is None:
        device = input_device(model)
        output = forward_pass(
            model,
            cache,
            positions[:, None].to(device),
            input_ids=suffix_tokens.to(device),
            use_cache=True,
            return_dict=True,
        )
        return Start(cache, output.logits[:, -1], positions + 1, suffix_tokens)
    counts = torch.tensor([group.count for group in groups], device=logits.device)
    return Start(cache, logits.repeat_interleave(counts, dim=0), positions, suffix_tokens)


def _start_with_own_prompts(call: CallContext, found: Shared, own: OwnPrompts, input_ids: Tensor) -> Start:
    """Prefill shared tokens into nodes, and each row's own prompt tokens into its suffix."""
    model, cache, (rows, width), device = call.model, found.cache, input_ids.shape, input_ids.device
    groups = without_own_tokens(found.groups, own)
    plan = plan_prompts(groups, StoredPrompts(cache), min_shared_tokens=call.options.min_shared_tokens)
    report, limit = call.report, call.max_prefill_tokens
    report.padded_length = report.context_width = width
    report.own_tokens = own.total
    found_logits = node_logits(model, cache, plan, max_tokens=limit, length=width)
    of_rows = [logits for logits, group in zip(found_logits, groups, strict=True) for _ in range(group.count)]
    keep_nodes(call, cache)
    if cache.state.max_suffix is not None:
        cache.state.max_suffix += own.longest
    found_own = prefill_own_prompts(model, cache, own, max_tokens=limit)
    logits = [found_own.get(row, of_rows[row]) for row in range(rows)]
    assert all(last is not None for last in logits)  # a prompt without own tokens ends in a new node
    positions = torch.tensor(plan.forest.context_lengths, device=device) + own.lengths.to(device)
    return Start(cache, stacked(model, cast(list[Tensor], logits)), positions, input_ids[:, width:], own)
