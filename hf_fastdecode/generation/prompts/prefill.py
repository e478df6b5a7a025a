"""Prefill: computes each node's keys and values once, packed into long rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import keeps_logits
from ...attention.autocast import no_autocast
from ...attention.forest import Path, Span
from ...cache.shared import SharedContextCache
from ...cache.state import PrefillItem
from ..forward_pass import forward_pass, input_device
from .prompt_tree import PromptPlan


@torch.no_grad()
def prefill_nodes(
    model: PreTrainedModel, cache: SharedContextCache, plan: PromptPlan, *, max_tokens: int, length: int | None = None
) -> Tensor | None:
    """Compute the plan's new nodes into the cache and set its forest.

    Args:
        model: The enabled model.
        cache: The cache the plan was made for; the new tokens become its next segment.
        plan: From `plan_prompts` with this cache.
        max_tokens: Maximum tokens per forward pass.
        length: Padded length of the rows, see `SharedContextCache.set_forest`.

    Returns:
        ``[groups, vocabulary]``: the logits after each group's last token; None if a group's last token was already
        stored, so that its logits are unknown.
    """
    wanted = sorted({end for end in plan.ends if end is not None})
    logits: dict[int, Tensor] = {}
    for run in prefill_passes(model, cache, plan, wanted, max_tokens=max_tokens, length=length):
        logits |= zip(run.wanted, run.logits, strict=True)
    known = [logits[end] for end in plan.ends if end is not None]
    with no_autocast(
        input_device(model)
    ):  # stack as is: an inner autocast may have produced another dtype than the outer one's
        return torch.stack(known) if known and len(known) == len(plan.ends) else None


@dataclass(frozen=True)
class PrefillPass:
    """One forward pass over new tokens.

    Attributes:
        wanted: Indices of the new tokens that `logits` belong to.
        logits: ``[wanted, vocabulary]``.
        output: The model's output; its logits may belong to other tokens.
    """

    wanted: list[int]
    logits: Tensor
    output: Any


def prefill_passes(
    model: PreTrainedModel,
    cache: SharedContextCache,
    plan: PromptPlan,
    wanted: Sequence[int],
    *,
    max_tokens: int,
    length: int | None = None,
    embeddings: Callable[[Tensor], Tensor] | None = None,
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """Compute the plan's new nodes into the cache, pass by pass, then set its forest.

    New tokens are packed into one row without padding, several nodes per forward pass; each token attends to its own
    path only. A node longer than `max_tokens` is prefilled in chunks.

    Args:
        model: The enabled model.
        cache: The cache the plan was made for; the new tokens become its next segment.
        plan: From `plan_prompts` with this cache.
        wanted: Indices of new tokens to return logits for, ascending.
        max_tokens: Maximum tokens per forward pass.
        length: Padded length of the rows, see `SharedContextCache.set_forest`.
        embeddings: Maps ids ``[tokens]`` to ``[tokens, hidden]``, if the prompts are embeddings.
        arguments: Further model arguments.
    """
    device = input_device(model)
    # Add the segment even if empty: the plan assumes its number.
    cache.add_segment(plan.new_tokens)
    # Logits of a whole context would take more memory than its keys and values.
    keeps = keeps_logits(model)
    for items in _passes(plan.items, max_tokens):
        start, stop = items[0].span.start, items[-1].span.stop  # in the new segment
        here = list(wanted[bisect_left(wanted, start) : bisect_left(wanted, stop)])
        keep = torch.tensor([token - start for token in here] or [stop - start - 1], device=device)
        ids = plan.new_tokens[None, start:stop]
        given = {"input_ids": ids.to(device)} if embeddings is None else {"inputs_embeds": embeddings(ids[0])[None]}
        with cache.prefilling(items):
            output = forward_pass(
                model,
                **given,
                position_ids=_positions(items)[None].to(device),
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **arguments,
                **({"logits_to_keep": keep} if keeps else {}),
            )
        kept = output.logits[0] if keeps else output.logits[0, keep]
        yield PrefillPass(here, kept[: len(here)], output)
    cache.set_forest(plan.forest, length)


def _positions(items: Iterable[PrefillItem]) -> Tensor:
    """Position ids of the items' tokens, concatenated: ``[total]`` int64 on the CPU."""
    firsts = ((item.position, item.span.length) for item in items)
    return torch.cat([torch.arange(first, first + count, device="cpu") for first, count in firsts])


def _passes(items: Sequence[PrefillItem], max_tokens: int) -> Iterator[list[PrefillItem]]:
    """Pack items into forward passes of at most `max_tokens`, parents in an earlier pass than their children.

    The items are ordered by their place in the new segment, so each pass fills one contiguous run of it.
    """
    batch: list[PrefillItem] = []
    for item in (part for whole in items for part in _parts(whole, max_tokens)):
        if batch and (item.span.stop - batch[0].span.start > max_tokens or _reads(item.context, batch[0].span)):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _parts(item: PrefillItem, max_tokens: int) -> Iterator[PrefillItem]:
    for start in range(0, item.span.length, max_tokens):
        before = (item.span[:start],) if start else ()
        yield PrefillItem(item.span[start : start + max_tokens], (*item.context, *before))


def _reads(path: Path, first: Span) -> bool:
    """Whether a path contains tokens of the pass starting at `first`, which are not yet computed."""
    return any(span.segment == first.segment and span.stop > first.start for span in path)
