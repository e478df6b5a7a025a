"""Start of decoding: shared prefill and the first logits of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ...cache.shared import SharedContextCache
from ...unsupported import Unsupported
from ..forward_pass import forward_pass, input_device
from ..report import CallReport
from ..steps.modes import State
from ..support import check_prompts
from .prefill import prefill_nodes
from .prompt_tree import PromptGroup, group_prompts, plan_prompts
from .sharing import Shared, find_shared, keep_nodes, prefill_limit, require_gain
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


def start_shared(
    model: PreTrainedModel,
    state: State,
    call: CallReport,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Start:
    """Find the prefixes that prompts share, and prefill each once.

    Args:
        model: The enabled model.
        state: Options and kept prefixes of the model.
        call: The report to fill in, with the mode set.
        input_ids: ``[rows, width]``, expanded to all samples, as passed to decoding loops.
        generation_config: The call's generation config, with lengths prepared.
        model_kwargs: Model arguments prepared by `generate`.

    Raises:
        Unsupported: The call must run stock.
        ValueError: A given `SharedContextCache` does not fit the prompts or the model.
    """
    given = model_kwargs.get("past_key_values")
    given = given if isinstance(given, SharedContextCache) and not given.is_empty else None
    try:
        return _start(model, state, call, input_ids, generation_config, model_kwargs, given)
    except Unsupported as error:
        reason, level = str(error), error.level
    # Raise a new error: storing the caught one would keep this frame's tensors alive during the stock call.
    if given is not None:
        raise ValueError(f"this call cannot use a SharedContextCache: {reason}")
    raise Unsupported(reason, level=level)


def _start(
    model: PreTrainedModel,
    state: State,
    call: CallReport,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    given: SharedContextCache | None,
) -> Start:
    options, width = state.options, input_ids.shape[1]
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    check_prompts(model, input_ids, mask, positions, longest=generation_config.max_length)
    max_suffix = int(generation_config.max_length) - width  # max_length may be another library's integer
    found = find_shared(model, state, call, group_prompts(input_ids, mask), given, max_suffix)
    groups, plan, cache = found.groups, found.plan, found.cache
    # If the cache holds a whole prompt, or all but its last token, compute that token as the first decode step.
    rerun_last_token = None in plan.ends or (found.known and len(plan.new_tokens) <= len(groups))
    if rerun_last_token:
        groups = [PromptGroup(group.tokens[:-1], group.count) for group in groups]
        plan = plan_prompts(groups, StoredPrompts(cache), min_shared_tokens=options.min_shared_tokens)
        cache.state.max_suffix = max_suffix + 1
        found = Shared(cache, groups, plan, found.known)
    asked = isinstance(model_kwargs.get("past_key_values"), SharedContextCache)
    require_gain(model, state, call, found, max_suffix, asked=asked)
    call.padded_length, call.context_width = width, width - rerun_last_token
    logits = prefill_nodes(
        model, cache, plan, max_tokens=prefill_limit(options, generation_config), length=width - rerun_last_token
    )
    keep_nodes(model, state, call, cache, given, returned=bool(generation_config.return_dict_in_generate))
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
