"""Prefill: every node's keys and values, computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.autocast import no_autocast
from ..attention.forest import Path, Span
from ..cache.layer import PrefillItem
from ..cache.shared import SharedContextCache
from .passes import forward_pass, input_device
from .prompts import PromptPlan


@torch.no_grad()
def prefill_nodes(
    model: PreTrainedModel, cache: SharedContextCache, plan: PromptPlan, *, max_tokens: int, length: int | None = None
) -> Tensor | None:
    """Compute the plan's new nodes into the cache and plant its forest.

    The new tokens run through the model end to end in one row, several nodes in one forward pass and no padding; each
    attends to its own path only. A node longer than `max_tokens` is prefilled in parts.

    Args:
        model: The enabled model.
        cache: Where the plan's spans point; its next segment takes the new tokens.
        plan: From `plan_prompts` with this cache.
        max_tokens: Most tokens in one forward pass.
        length: Padded length of the rows so far, as `SharedContextCache.plant` takes it.

    Returns:
        ``[groups, vocabulary]``: for each of the plan's groups of rows the logits after its last token; None when a
        group's last token was stored before, which leaves its logits unknown.
    """
    device = input_device(model)
    # A segment of its own even when nothing is new keeps the numbering that the plan counted on.
    cache.add_segment(plan.new_tokens)
    logits: dict[int, Tensor] = {}
    for items in _passes(plan.items, max_tokens):
        offsets = _ranges((item.span.start, item.span.length) for item in items)  # into the new segment
        positions = _ranges((item.position, item.span.length) for item in items)
        ends = [index for index, offset in enumerate(offsets.tolist()) if offset in plan.ends]
        keep = torch.tensor(ends or [len(offsets) - 1], device=device)
        # Logits of a whole context would take more room than its keys and values.
        keeps = model._supports_logits_to_keep()
        with cache.prefilling(items):
            output = forward_pass(
                model,
                input_ids=plan.new_tokens[offsets][None].to(device),
                position_ids=positions[None].to(device),
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **({"logits_to_keep": keep} if keeps else {}),
            )
        kept = output.logits[0] if keeps else output.logits[0, keep]
        logits |= {int(offsets[index]): kept[row] for row, index in enumerate(ends)}
    cache.plant(plan.forest, length)
    known = [logits[end] for end in plan.ends if end is not None]
    with no_autocast(
        device
    ):  # an inner autocast may have given them another half-precision dtype than the outer one's
        return torch.stack(known) if known and len(known) == len(plan.ends) else None


def _ranges(runs: Iterable[tuple[int, int]]) -> Tensor:
    """Runs of numbers, given by the first and how many, end to end: ``[total]`` int64 on the CPU."""
    return torch.cat([torch.arange(first, first + count, device="cpu") for first, count in runs])


def _passes(items: Sequence[PrefillItem], max_tokens: int) -> Iterator[list[PrefillItem]]:
    """Pack items into forward passes of at most `max_tokens`, parents in an earlier pass than their children."""
    batch: list[PrefillItem] = []
    size = 0
    for item in (part for whole in items for part in _parts(whole, max_tokens)):
        here = {waiting.span for waiting in batch}
        if batch and (size + item.span.length > max_tokens or _reads_any(item.context, here)):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.span.length
    if batch:
        yield batch


def _parts(item: PrefillItem, max_tokens: int) -> Iterator[PrefillItem]:
    for start in range(0, item.span.length, max_tokens):
        before = (item.span[:start],) if start else ()
        yield PrefillItem(item.span[start : start + max_tokens], (*item.context, *before))


def _reads_any(context: Path, pending: set[Span]) -> bool:
    """Whether a path touches tokens that a pass still has to compute."""
    return any(
        span.segment == other.segment and span.start < other.stop and other.start < span.stop
        for span in context
        for other in pending
    )
