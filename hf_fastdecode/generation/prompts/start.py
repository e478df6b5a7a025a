"""Start of decoding: shared prefill and the first logits of every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ..call_context import CallContext
from ..forward_pass import forward_pass, input_device
from ..support import check_prompts
from .prefill import prefill_nodes
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
        suffix_tokens: ``[rows, tokens]`` int64: prompt tokens stored in suffixes rather than nodes; at most one.
    """

    cache: SharedContextCache
    logits: Tensor
    positions: Tensor
    suffix_tokens: Tensor


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
    check_prompts(model, input_ids, mask, positions, longest=longest)
    max_suffix = longest - width
    found = find_shared(call, group_prompts(input_ids, mask), max_suffix)
    groups, plan, cache = found.groups, found.plan, found.cache
    # If the cache holds a whole prompt, or all but its last token, compute that token as the first decode step.
    rerun_last_token = None in plan.ends or (found.known and len(plan.new_tokens) <= len(groups))
    if rerun_last_token:
        groups = [PromptGroup(group.tokens[:-1], group.count) for group in groups]
        plan = plan_prompts(groups, StoredPrompts(cache), min_shared_tokens=call.options.min_shared_tokens)
        cache.state.max_suffix = max_suffix + 1
        found = Shared(cache, groups, plan, found.known)
    require_gain(call, found, max_suffix)
    call.report.padded_length, call.report.context_width = width, width - rerun_last_token
    logits = prefill_nodes(model, cache, plan, max_tokens=call.max_prefill_tokens, length=width - rerun_last_token)
    keep_nodes(call, cache)
    suffix_tokens = input_ids[:, width - rerun_last_token :]
    positions = torch.tensor(plan.forest.context_lengths, device=input_ids.device)
    if rerun_last_token or logits is None:
        device = input_device(model)
        output = forward_pass(
            model,
            input_ids=suffix_tokens.to(device),
            position_ids=positions[:, None].to(device),
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        return Start(cache, output.logits[:, -1], positions + 1, suffix_tokens)
    counts = torch.tensor([group.count for group in groups], device=logits.device)
    return Start(cache, logits.repeat_interleave(counts, dim=0), positions, suffix_tokens)
